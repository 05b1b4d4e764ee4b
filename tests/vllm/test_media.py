"""Prompts with images, which engines know by hashes, by counts of their requests, by what clients call them: the answer
is always that of the image that was asked about, and equal images share where their content can be told.

What is right is what the same engine computes under a salt that nothing was cached for.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest
from prefixd.cli.demo.daemon_process import DaemonProcess
from tests.vllm.served import NewRequests, StartEngine, Tokens, run
from tests.vllm.tiny_models import save_blip2

TEXT = 200  # tokens, behind the image's 8
CACHED = 192
NO_CACHES = {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}

_salts = itertools.count()
_images = itertools.count(1)


@pytest.fixture(scope="module")
def blip2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_blip2(tmp_path_factory.mktemp("blip2"))


@pytest.fixture(scope="module")
def edited(blip2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, after somebody has edited how images are processed."""
    model = tmp_path_factory.mktemp("edited") / blip2.name
    shutil.copytree(blip2, model)
    processor = json.loads((model / "processor_config.json").read_text())
    processor["image_processor"]["do_normalize"] = False
    (model / "processor_config.json").write_text(json.dumps(processor))
    return model


@pytest.fixture(scope="module")
def start(daemon: DaemonProcess, make_engine: StartEngine) -> StartEngine:
    def engine(model: Path, **arguments: object) -> EngineProcess:
        return make_engine(model, daemon, skip_tokenizer_init=False, max_model_len=2048, **arguments)

    return engine


@pytest.fixture(scope="module")
def one(blip2: Path, start: StartEngine) -> Iterator[EngineProcess]:
    with start(blip2) as engine:
        yield engine


@pytest.fixture(scope="module")
def other(blip2: Path, start: StartEngine) -> Iterator[EngineProcess]:
    """A replica, or the same engine after a restart, with a hash seed of its own."""
    with start(blip2, forked=False) as engine:
        yield engine


def ask(engine: EngineProcess, request: EngineRequest) -> tuple[Tokens, int]:
    """The answer, and how many tokens of the prompt came from prefixd."""
    forget = "enable_prefix_caching" not in engine._arguments
    return run(engine, [request], forget=forget)


def right(engine: EngineProcess, request: EngineRequest) -> Tokens:
    """What the engine computes when nothing of the prompt is cached."""
    tokens, hits = ask(engine, replace(request, salt=f"right {next(_salts)}"))
    assert hits == 0
    return tokens


def two_images(new_requests: NewRequests) -> tuple[EngineRequest, EngineRequest]:
    (text,) = new_requests(TEXT)
    return replace(text, image=next(_images)), replace(text, image=next(_images))


def test_images_by_hash(one: EngineProcess, other: EngineProcess, new_requests: NewRequests) -> None:
    cat, dog = two_images(new_requests)
    about_cat, none = ask(one, cat)
    about_dog, also_none = ask(other, dog)
    assert about_cat == right(other, cat) != about_dog == right(other, dog)
    assert none == also_none == 0
    assert ask(other, cat) == (about_cat, CACHED)
    assert ask(one, dog) == (about_dog, CACHED)


def test_images_by_what_clients_call_them(one: EngineProcess, other: EngineProcess, new_requests: NewRequests) -> None:
    """The same uuid for another image, on a replica or after a restart."""
    cat, dog = (replace(request, image_uuid="my image") for request in two_images(new_requests))
    about_cat, _ = ask(one, cat)
    about_dog, hits = ask(other, dog)
    assert hits == 0
    assert about_dog == right(other, dog) != about_cat
    assert ask(other, replace(cat, image_uuid="cat")) == (about_cat, CACHED), "uuid or hash, it is the same image"
    assert ask(one, replace(dog, image_uuid=None)) == (about_dog, CACHED)


def test_an_image_that_is_only_called(one: EngineProcess, other: EngineProcess, new_requests: NewRequests) -> None:
    """The client does not send it again."""
    cat, _ = two_images(new_requests)
    about_cat, _ = ask(one, replace(cat, image_uuid="only called"))
    called = replace(cat, image=None, image_uuid="only called")
    assert ask(one, called) == (about_cat, CACHED)
    assert ask(other, cat) == (about_cat, CACHED)


@pytest.fixture(scope="module")
def counting(blip2: Path, start: StartEngine) -> Iterator[EngineProcess]:
    """Without caches of its own vLLM counts its requests, every process from the start."""
    with start(blip2, **NO_CACHES) as engine:
        yield engine


@pytest.fixture(scope="module")
def other_counting(blip2: Path, start: StartEngine) -> Iterator[EngineProcess]:
    with start(blip2, **NO_CACHES) as engine:
        yield engine


def test_images_by_count(
    counting: EngineProcess, other_counting: EngineProcess, one: EngineProcess, new_requests: NewRequests
) -> None:
    """The first request of either, with the same text: the same name for two images."""
    cat, dog = two_images(new_requests)
    about_cat, _ = ask(counting, cat)
    about_dog, hits = ask(other_counting, dog)
    assert hits == 0
    assert about_dog == right(one, dog) != about_cat
    assert ask(other_counting, cat) == ask(counting, cat) == (about_cat, CACHED)


def test_two_images_of_one_name_in_one_engine(
    counting: EngineProcess, other_counting: EngineProcess, new_requests: NewRequests
) -> None:
    """vLLM embeds an image once by its name, and computes on that whatever comes under the name: what it computes then
    is not known to be about the one or about the other, and is not saved."""
    cat, dog = two_images(new_requests)
    longer = replace(cat, prompt=[*cat.prompt, *cat.prompt])
    about_cat, _ = ask(counting, replace(cat, image_uuid="both"))
    assert ask(counting, replace(dog, image_uuid="both"))[0] == about_cat, "vLLM answers for the image that it knows"
    ask(counting, replace(longer, image_uuid="both"))
    about_dog, hits = ask(other_counting, dog)
    assert hits == 0
    assert about_dog == right(other_counting, dog) != about_cat
    about_longer, hits = ask(other_counting, longer)
    assert hits == CACHED, "what was computed before there were two"
    assert about_longer == right(other_counting, longer)
    counted = [value for name, value in counting.metrics().samples.items() if "prefixd_unsure_media" in name]
    assert counted == [2]


def test_images_in_shared_memory_are_computed(
    one: EngineProcess, blip2: Path, start: StartEngine, new_requests: NewRequests
) -> None:
    """The scheduler does not see them, and a hash that vLLM hands over may be what a client has said."""
    cat, dog = (replace(request, image_uuid="in shared memory") for request in two_images(new_requests))
    ask(one, cat)
    with start(blip2, mm_processor_cache_type="shm") as engine:
        for request in (dog, dog):
            assert ask(engine, request) == (right(engine, dog), 0)
        assert "is not saved from its media on" in engine.log.read_text()
        (text,) = new_requests(TEXT)
        about, _ = ask(engine, text)
        assert ask(engine, text) == (about, CACHED)


@pytest.mark.parametrize("how", ["mm_processor_kwargs", "edited"])
def test_images_that_are_processed_otherwise(
    how: str, one: EngineProcess, blip2: Path, edited: Path, start: StartEngine, new_requests: NewRequests
) -> None:
    cat, _ = two_images(new_requests)
    named = replace(cat, image_uuid=f"processed otherwise, {how}")
    before, _ = ask(one, cat)
    assert ask(one, named) == (before, CACHED)
    model = edited if how == "edited" else blip2
    arguments = {} if how == "edited" else {"mm_processor_kwargs": {"do_normalize": False}}
    with start(model, **arguments) as engine:
        after, hits = ask(engine, named)
        assert hits == 0
        assert after != before
        assert ask(engine, cat) == (after, CACHED), "its own"
        assert after == right(engine, cat)
