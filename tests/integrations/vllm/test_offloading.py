"""What of the tier below vLLM's own offloading needs no vLLM. The stand-ins have the shape of vLLM's own objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from prefixd.base.errors import ConfigError
from prefixd.integrations.engine.pages_by_key.engine_pages import PagesUnusable
from prefixd.integrations.vllm.offloading.naming import own_name, prefix_groups, unsure_names
from prefixd.integrations.vllm.offloading.options import TierOptions
from prefixd.integrations.vllm.offloading.row_copies import Rows

ROW_BYTES = 64


def make_rows(count: int = 4) -> tuple[np.ndarray[Any, Any], memoryview, Rows]:
    """A host pool as vLLM has it: signed bytes, and a view that it lets go of itself."""
    pool = np.arange(count * ROW_BYTES, dtype=np.uint8).view(np.int8).reshape(count, ROW_BYTES)
    view = memoryview(pool)
    return pool, view, Rows(view)


def test_rows_go_to_the_arena_and_back() -> None:
    pool, _, rows = make_rows()
    arena = np.zeros(1024, np.uint8)
    checked: list[int] = []
    rows.at([3, 1]).save(arena, [(0, 512), (1, 0)], lambda: checked.append(1))
    assert (arena[512 : 512 + ROW_BYTES] == pool[3].view(np.uint8)).all()
    assert (arena[:ROW_BYTES] == pool[1].view(np.uint8)).all()
    assert len(checked) == 2
    wanted = pool[3].copy()
    rows.at([0]).load(arena, [(0, 512)], lambda: None)
    assert (pool[0] == wanted).all()


def test_nothing_is_copied_of_what_may_not_be() -> None:
    pool, _, rows = make_rows()
    before = pool.copy()

    def lost() -> None:
        raise PagesUnusable("the lease is lost")

    with pytest.raises(PagesUnusable):
        rows.at([0, 1]).load(np.ones(1024, np.uint8), [(0, 0), (1, 64)], lost)
    for chunks in ([4], [-1], [0, 7]):
        with pytest.raises(PagesUnusable, match="of a pool of 4"):
            rows.at(chunks)
    assert (pool == before).all()


def test_the_pool_can_be_let_go_of_though_pages_are_known_still() -> None:
    _, view, rows = make_rows()
    pages = rows.at([0])
    rows.close()
    view.release()  # BufferError where somebody still refers to its memory
    with pytest.raises(PagesUnusable, match="closed"):
        pages.load(np.zeros(1024, np.uint8), [(0, 0)], lambda: None)


LAYOUT = SimpleNamespace(kv_cache_layout="NHD")


def engine(
    algorithm: str = "sha256", *, caching: bool = True, lora: object = None, media_gb: float | None = None
) -> Any:
    """vLLM's configuration, as far as its keys depend on it."""
    media = None if media_gb is None else SimpleNamespace(mm_processor_cache_gb=media_gb)
    return SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm, enable_prefix_caching=caching),
        model_config=SimpleNamespace(multimodal_config=media),
        lora_config=lora,
    )


@pytest.mark.parametrize("config", [engine(), engine("sha256_cbor"), engine(caching=False), engine(media_gb=4.0)])
def test_keys_that_mean_the_same_everywhere(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert list(unsure_names(config, LAYOUT)) == []


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (engine("xxhash"), "PYTHONHASHSEED"),
        (engine("xxhash_cbor"), "PYTHONHASHSEED"),
        (engine(lora=object()), "LoRA"),
        (engine(caching=False, media_gb=0), "images"),
    ],
)
def test_keys_that_do_not(config: Any, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (why,) = unsure_names(config, LAYOUT)
    assert word in why


@pytest.mark.parametrize("silent", [SimpleNamespace(), SimpleNamespace(kv_cache_layout=None)])
def test_a_layout_that_vllm_does_not_tell(silent: Any) -> None:
    """Two engines may lay out the same chunk in two ways: no bytes of the one may come to the other."""
    (why,) = unsure_names(engine(), silent)
    assert "kv_cache_layout" in why


def test_a_seed_for_all_engines_makes_xxhash_the_same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert list(unsure_names(engine("xxhash"), LAYOUT)) == []


def test_an_own_name_replaces_an_own_name() -> None:
    first = own_name("vllm/model/digest")
    second = own_name(first)
    assert first != second
    assert first.partition("#")[0] == second.partition("#")[0] == "vllm/model/digest"


class FullAttentionSpec:
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class SlidingWindowSpec:
    pass


def group(*specs: object) -> Any:
    """A KV cache group; of several specs, one with layers of different kinds."""
    spec = specs[0] if len(specs) == 1 else SimpleNamespace(kv_cache_specs=dict(enumerate(specs)))
    return SimpleNamespace(kv_cache_spec=spec)


def test_which_groups_need_all_chunks_before_one() -> None:
    groups = [
        group(FullAttentionSpec()),
        group(SlidingWindowSpec()),
        group(MLAAttentionSpec(), FullAttentionSpec()),
        group(FullAttentionSpec(), SlidingWindowSpec()),
    ]
    assert prefix_groups(SimpleNamespace(kv_cache_groups=groups)) == {0, 2}


def test_options() -> None:
    assert TierOptions.parse({"address": "unix:/run/p.sock"}).timeout_s == 1.0
    with pytest.raises(ConfigError, match="no option 'adress'; there are address, save, timeout_s"):
        TierOptions.parse({"adress": "unix:/run/p.sock"})
    with pytest.raises(ConfigError, match="timeout_s = 0"):
        TierOptions.parse({"timeout_s": 0})
