"""Media are known by what is in them, as far as that can be told."""

from __future__ import annotations

import gc
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prefixd.integrations.vllm.naming import media_content
from prefixd.integrations.vllm.naming.media_content import MediaContents, digest_of


class Item(dict[str, Any]):
    """An item as vLLM processes it: fields by name, each with its data."""


def an_item(**fields: Any) -> Item:
    return Item({name: SimpleNamespace(data=data) for name, data in fields.items()})


def a_feature(item: Item | None, identifier: str = "id", offset: int = 10, mask: Any = None) -> Any:
    place = SimpleNamespace(offset=offset, length=5, is_embed=mask)
    return SimpleNamespace(data=item, identifier=identifier, modality="image", mm_position=place)


def pixels(value: float) -> Item:
    return an_item(pixel_values=torch.full((3, 4, 4), value))


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8)


def tensors() -> st.SearchStrategy[torch.Tensor]:
    shapes = st.lists(st.integers(0, 3), max_size=3)
    return st.builds(lambda shape, dtype, fill: torch.full(shape, fill, dtype=dtype), shapes, st.sampled_from(DTYPES),
                     st.integers(0, 1))  # fmt: skip


VALUES = st.recursive(
    tensors() | st.integers(-2, 2) | st.text(max_size=2) | st.booleans() | st.floats(width=16) | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)


def written_out(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.tolist()}"
    if isinstance(value, dict):
        return f"dict {sorted((name, written_out(item)) for name, item in value.items())}"
    if isinstance(value, list):
        return f"list {[written_out(item) for item in value]}"
    return repr(value)


@given(VALUES, VALUES)
def test_digests_are_equal_for_equal_content_alone(one: Any, other: Any) -> None:
    assert digest_of(one) is not None
    assert (digest_of(one) == digest_of(other)) == (written_out(one) == written_out(other))


def test_how_a_tensor_lies_in_memory_does_not_count() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    assert digest_of(tensor.t()) == digest_of(tensor.t().contiguous()) != digest_of(tensor)
    assert digest_of(np.arange(3)) == digest_of(np.arange(6)[::2] // 2)


@pytest.mark.parametrize("value", [None, object(), np.array([object()]), {"pixels": None}, [torch.zeros(1), None]])
def test_of_what_is_not_there_or_unknown_nothing_is_said(value: Any) -> None:
    assert digest_of(value) is None


def test_without_blake3_it_is_another_digest_of_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    monkeypatch.setattr(media_content, "_new_hash", hashlib.sha256)
    assert len(digest_of([1]) or "") == 64 and digest_of([1]) != digest_of([2])


def contents(**arguments: Any) -> MediaContents:
    return MediaContents(10, **arguments)


def test_the_same_image_under_any_name_is_the_same_and_another_is_not() -> None:
    known = contents()
    cat, same, dog = (
        known.of([a_feature(pixels(value), name)]).media[0].content
        for value, name in ((1.0, "a"), (1.0, "b"), (2.0, "c"))
    )
    assert cat == same != dog
    assert contents().of([a_feature(pixels(1.0), "in another process")]).media[0].content == cat


def test_which_tokens_are_embeddings_counts() -> None:
    masks = (None, torch.tensor([True, False, True, True, True]), torch.tensor([False, True, True, True, True]))
    assert len({contents().of([a_feature(pixels(1.0), mask=mask)]).media[0].content for mask in masks}) == 3


def test_two_contents_of_one_name_are_not_trusted_before_or_since() -> None:
    known = contents()
    first = known.of([a_feature(pixels(3.0), "sure", offset=4), a_feature(pixels(1.0))])
    assert known.sure_tokens(first) == math.inf
    second = known.of([a_feature(pixels(2.0))])
    again = known.of([a_feature(pixels(1.0))])
    assert [known.sure_tokens(each) for each in (first, second, again)] == [10, 10, 10]
    assert known.sure_tokens(known.of([a_feature(pixels(3.0), "sure")])) == math.inf
    assert all(each.known_tokens == math.inf for each in (first, second, again)), "what they are is known"


@pytest.mark.parametrize("item", [None, an_item(address=1, monotonic_id=2), an_item(pixel_values=None)])
def test_an_image_that_is_not_shown_is_like_no_other(item: Item | None) -> None:
    known = contents()
    requests = [known.of([a_feature(pixels(1.0), "sure", offset=2), a_feature(item)]) for _ in range(2)]
    assert requests[0].media[0] == requests[1].media[0]
    assert requests[0].media[1] != requests[1].media[1]
    assert [each.known_tokens for each in requests] == [known.sure_tokens(each) for each in requests] == [10, 10]


def test_where_embeddings_may_be_of_another_process_nothing_is_known() -> None:
    known = contents(believed=False)
    request = known.of([a_feature(pixels(1.0))])
    assert request.known_tokens == known.sure_tokens(request) == 10


def test_after_media_that_were_not_shown_nothing_is_sure() -> None:
    known = contents()
    before = known.of([a_feature(pixels(1.0))])
    known.distrust()
    after = known.of([a_feature(pixels(2.0), "new")])
    assert known.sure_tokens(before) == known.sure_tokens(after) == 10


def test_names_are_forgotten_in_turn_and_then_nothing_is_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_content, "_LEAST_REMEMBERED", 1)
    known = MediaContents(3)
    requests = {name: known.of([a_feature(pixels(1.0), name)]) for name in "abc"}
    known.of([a_feature(pixels(1.0), "a")])
    known.of([a_feature(pixels(1.0), "d")])
    for name, sure in (("a", True), ("b", False), ("c", True)):
        requests[name]._checked_conflicts = -1
        assert (known.sure_tokens(requests[name]) == math.inf) == sure


def test_an_item_is_read_once_however_many_requests_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    monkeypatch.setattr(media_content, "digest_of", lambda value: (read.append(1), digest_of(value))[1])
    known, item = contents(), pixels(1.0)
    for _ in range(3):
        known.of([a_feature(item), a_feature(item, "b")])
    assert len(read) == 1
    known.of([a_feature(pixels(1.0))])
    assert len(read) == 2
    del item
    gc.collect()
    assert not known._digests._known, "an id may be another item's tomorrow"
