"""Prompts with images, against transformers' own forward pass and `generate` over the same images."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers import AutoModelForImageTextToText
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from prefixd.base.sampling import BeamSearch
from prefixd.images.decoding import InputArray, Pixels
from prefixd.images.prepare import prepare_image, scaled, scales
from prefixd.worker.attention.attention import GroupedAttention
from prefixd.worker.attention.flex_attention import FlexAttention
from prefixd.worker.images import PromptImages, check_images, read_processor
from prefixd.worker.memory.grouped_kv import GroupedStep, places
from prefixd.worker.memory.kv_memory import KvSequence, Segment
from prefixd.worker.memory.virtual_kv import VirtualStep
from prefixd.worker.model import CausalModel, _PlainMemory, load_model
from prefixd.worker.spec.kv_groups import AttentionGroup, KvGroups, with_images
from prefixd.worker.spec.memory_estimate import most_pass_tokens
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.errors import ModelError, RequestError
from prefixd.worker_protocol.protocol import ImageFrames, ImageGroup, ImageShape, PromptImage
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap.group_shape import KvGeometry
from tests.worker.conftest import Rig
from tests.worker.tiny_models import IMAGE_TOKEN, IMAGES, save_image_model

TOLERANCE = 1e-4
BEGIN, END = IMAGE_TOKEN + 2, IMAGE_TOKEN + 3


def text(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, IMAGE_TOKEN, count).tolist()


def picture(seed: int, width: int = 112, height: int = 80) -> bytes:
    """A PNG of 4 x 4 colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).resize((width, height), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


class Prompt:
    """Tokens and images as the daemon sends them, and what transformers takes."""

    def __init__(self, tokens: list[int], images: list[PromptImage]) -> None:
        self.tokens = tokens
        self.images = images


class Vision:
    """A model of IMAGES, as the worker loads it and as transformers does."""

    def __init__(self, name: str, directory: Path, **settings: object) -> None:
        self.name = name
        self.directory = save_image_model(directory, name)
        self.processor = read_processor(directory)
        self.memory = os.memfd_create("pixels", os.MFD_CLOEXEC)
        self.files: dict[int, bytes] = {}
        """By the offset of their pixels in the memory."""
        self.model = self.load(**settings)
        self.reference = AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager").eval()
        self.cross = name == "mllama"
        self.token = self.model.spec.images.placeholder_id

    def load(self, **settings: object) -> CausalModel:
        settings = {"chunk_bytes": 4096, "pixels_fd": self.memory, **settings}
        return load_model(read_model_spec(WorkerSettings(model=str(self.directory), **settings)))

    def prompt(self, *parts: list[int] | bytes) -> Prompt:
        """Texts and files, the images between the tokens that the models have for that."""
        tokens: list[int] = []
        images: list[PromptImage] = []
        for part in parts:
            if isinstance(part, list):
                tokens += part
                continue
            rows = 1 if self.cross else self.rows(part)
            images.append(PromptImage(len(tokens) + 1, rows, hashlib.sha256(part).digest(), self.pixels(part)))
            tokens += [BEGIN, *[self.token] * rows, END]
        return Prompt(tokens, images)

    def pixels(self, file: bytes) -> Pixels:
        """As a daemon's decode process hands them over."""
        prepared = prepare_image(ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert("RGB"), self.processor)
        offset = len(self.files) << 30
        self.files[offset] = file
        os.pwrite(self.memory, prepared.pixels.tobytes(), offset)
        inputs = {
            name: InputArray(str(array.dtype), array.shape, array.tobytes()) for name, array in prepared.inputs.items()
        }
        return Pixels(offset, prepared.pixels.shape, inputs)

    def rows(self, file: bytes) -> int:
        """Rows of the embedding, by transformers."""
        inputs = self.inputs([file])
        with torch.inference_mode():
            return sum(map(len, self.reference.get_image_features(**inputs).pooler_output))

    def inputs(self, files: Sequence[bytes]) -> dict[str, torch.Tensor]:
        opened = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
        made = self.processor(images=[opened] if self.cross else opened, return_tensors="pt")
        return {name: made[name] for name in ("pixel_values", *self.model.images.kind.inputs)}

    def arguments(self, prompt: Prompt) -> dict[str, Any]:
        ids = torch.tensor([prompt.tokens])
        arguments: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if prompt.images:
            arguments |= self.inputs([self.files[image.pixels.offset] for image in prompt.images])
            if self.cross:
                tiles = arguments["aspect_ratio_mask"].sum(-1).tolist()
                spans = [get_cross_attention_token_mask(prompt.tokens, self.token)]
                mask = convert_sparse_cross_attention_mask_to_dense(spans, tiles, 2, len(prompt.tokens))
                arguments["cross_attention_mask"] = torch.from_numpy(mask)
            types = {"gemma3": "token_type_ids", "qwen2_5_vl": "mm_token_type_ids"}
            if self.name in types:
                arguments[types[self.name]] = (ids == IMAGE_TOKEN).long()
        return arguments

    def logits(self, prompt: Prompt) -> torch.Tensor:
        with torch.inference_mode():
            if self.name == "qwen2_5_vl":
                self.reference.model.rope_deltas = None
            return self.reference(**self.arguments(prompt), use_cache=False).logits[0]

    def greedy(self, prompt: Prompt, count: int = 8, **sampling: object) -> list[int]:
        self.reference.generation_config.eos_token_id = None
        with torch.inference_mode():
            made = self.reference.generate(
                **self.arguments(prompt), max_new_tokens=count, do_sample=False, pad_token_id=0, **sampling
            )
        return made[0, len(prompt.tokens) :].tolist()


def our_logits(
    rig: Rig,
    sequence: KvSequence,
    prompt: Prompt,
    cuts: Sequence[int] = (),
    start: int = 0,
    image_frames: Sequence[ImageFrames] | None = None,
) -> torch.Tensor:
    """Logits of the tokens from `start` on, in passes that end at `cuts` and at the end."""
    images = PromptImages(prompt.images, len(prompt.tokens), rig.model.images)
    if prompt.images:
        images.memory = rig.open_images(rig.image_frames(prompt.images) if image_frames is None else image_frames)
    rows = []
    for stop in [*cuts, len(prompt.tokens)]:
        images.hold(start, stop)
        segment = Segment(sequence, start, stop, images=images.of_pass(start, stop))
        rows.append(rig.forward(prompt.tokens[start:stop], [segment], range(stop - start)).clone())
        images.pass_by(stop)
        start = stop
    if images.memory is not None:
        rig.close_images(images.memory)
    return torch.cat(rows)


@pytest.fixture(scope="module", params=IMAGES)
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vision:
    return Vision(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def rig(vision: Vision, make_rig) -> Iterator[Rig]:
    yield make_rig(vision.model, max_step_tokens=32, frames=320)


def opened(rig: Rig, prompt: Prompt, frames: Sequence[int] = ()) -> tuple[KvSequence, list[int]]:
    """Memory for a prompt whose first blocks are `frames`."""
    taken = [*frames, *rig.frames(rig.blocks(len(prompt.tokens)) * rig.block_frames - len(frames))]
    return rig.tensor(taken), taken


def test_what_the_daemon_is_told(vision):
    row_bytes = 0 if vision.cross else 64 * 4
    expected = ImageShape(vision.token, "cross" if vision.cross else "rows", vision.name == "gemma3", row_bytes)
    hello = vision.model.spec.hello()
    assert hello.images == expected
    groups = vision.model.spec.groups
    assert hello.image_group == (ImageGroup(2, groups.cross.frames) if vision.cross else None)
    if vision.cross:
        half = groups.frame_bytes // 2
        assert hello.in_frames(half).image_group.frames == groups.in_frames(half, half).cross.frames
        assert groups.in_frames(half, half).cross.frames == 2 * groups.cross.frames


def test_frames_of_an_image_of_llama_3_2_11b():
    text_of_11b = KvGeometry(32, 8, 128, "bfloat16", 16)
    group = AttentionGroup("full", None, tuple(range(32)), text_of_11b, 1, (None,) * 32)
    plain = KvGroups((group,), None, 16, text_of_11b.block_bytes, 2 << 20)
    groups = with_images(plain, range(3, 40, 5), KvGeometry(8, 8, 128, "bfloat16", 4 * 1601))
    assert plain.alone and not groups.alone
    assert (groups.frame_bytes, groups.cross.frames) == (2 << 20, 101)
    assert (groups.cross.patches, groups.cross.geometry.block_tokens) == (6404, 6464)
    assert groups.cross.geometry.block_bytes == 101 * groups.frame_bytes


def test_logits_are_those_of_transformers_and_depend_on_the_image(vision, rig):
    prompt = vision.prompt(
        text(1, 9), picture(1), text(2, 20), picture(2, 30, 56), text(3, 7), picture(20, 20, 20), text(3, 5)
    )
    ours = our_logits(rig, opened(rig, prompt)[0], prompt)
    torch.testing.assert_close(ours, vision.logits(prompt), rtol=TOLERANCE, atol=TOLERANCE)
    other = vision.prompt(
        text(1, 9), picture(3), text(2, 20), picture(2, 30, 56), text(3, 7), picture(20, 20, 20), text(3, 5)
    )
    assert other.tokens == prompt.tokens
    behind = len(prompt.tokens) - 5
    assert (our_logits(rig, opened(rig, other)[0], other)[behind:] - ours[behind:]).abs().max() > 0.1


@pytest.mark.parametrize("vision", ["llava_onevision", "mllama"], indirect=True)
def test_images_side_by_side(vision, rig):
    first, second = (vision.prompt(picture(seed, *sides)).images[0] for seed, sides in ((21, (28, 28)), (22, (80, 40))))
    begin = text(34, 11)
    at = len(begin) + first.tokens
    images = [msgspec.structs.replace(first, first=len(begin)), msgspec.structs.replace(second, first=at)]
    prompt = Prompt([*begin, *[vision.token] * (first.tokens + second.tokens), *text(35, 9)], images)
    ours = our_logits(rig, opened(rig, prompt)[0], prompt)
    torch.testing.assert_close(ours, vision.logits(prompt), rtol=TOLERANCE, atol=TOLERANCE)


def test_bits_do_not_depend_on_cuts_nor_on_what_is_cached(vision, rig):
    prompt = vision.prompt(text(4, 21), picture(4), text(5, 40))
    sequence, frames = opened(rig, prompt)
    whole = our_logits(rig, sequence, prompt)
    image = prompt.images[0]
    inside = [image.first + 1, image.first + image.tokens - 1]
    cuts = [5, image.first, *([] if vision.name == "gemma3" else inside), image.first + image.tokens, 60]
    assert torch.equal(our_logits(rig, opened(rig, prompt)[0], prompt, sorted(set(cuts))), whole)
    behind = -(-(image.first + image.tokens) // rig.block_tokens)
    for cached in (1, behind, behind + 1):  # before the image and behind it
        resumed, _ = opened(rig, prompt, frames[: cached * rig.block_frames])
        start = cached * rig.block_tokens
        assert torch.equal(our_logits(rig, resumed, prompt, start=start), whole[start:])


def test_requests_with_images_beside_text(vision, rig):
    """Prompts are cut in passes of 32 tokens; the reference computes each alone."""
    prompts = [
        vision.prompt(text(6, 37)),
        vision.prompt(text(7, 18), picture(5), text(8, 23)),
        vision.prompt(picture(6), text(9, 30), picture(5, 28, 56)),
    ]
    requests = [rig.start(prompt.tokens, images=prompt.images) for prompt in prompts]
    rig.run()
    expected = [vision.greedy(prompt) for prompt in prompts]
    assert [rig.tokens[request] for request in requests] == expected
    assert [rig.done[request].encoded_images for request in requests] == [0, 1, 2]


@pytest.mark.parametrize("kv", ["virtual", "paged"])
def test_an_embedding_in_frames_is_not_made_again_and_serves_other_prompts(vision, make_rig, kv):
    rig = make_rig(vision.model, max_step_tokens=32, frames=640, kv=kv)
    file = picture(7)
    first = vision.prompt(text(10, 12), file, text(11, 4), file, text(12, 9))
    again = vision.prompt(text(13, 40), file, text(14, 3))
    frames = rig.image_frames(first.images)
    request = rig.start(first.tokens, images=first.images, image_frames=frames)
    rig.run()
    assert rig.tokens[request] == vision.greedy(first)
    assert (rig.done[request].encoded_images, rig.filled_images[request]) == (1, [0])
    request = rig.start(again.tokens, images=again.images, image_frames=[ImageFrames(frames[0].frames, True)])
    rig.run()
    assert rig.tokens[request] == vision.greedy(again)
    assert (rig.done[request].encoded_images, rig.filled_images[request]) == (0, [])


@pytest.mark.parametrize("vision", ["llava_onevision", "qwen2_5_vl"], indirect=True)
def test_frames_of_an_embedding_are_read_while_its_tokens_are_computed_and_no_longer(vision, rig):
    prompt = vision.prompt(picture(60), text(61, 40), picture(61), text(62, 9))
    frames = rig.image_frames(prompt.images)
    for each in frames:
        for frame in each.frames:
            frame_bytes(rig, frame).fill_(0xFF)
    request = rig.start(prompt.tokens, images=prompt.images, image_frames=frames)
    end = prompt.images[0].first + prompt.images[0].tokens
    spoilt = False
    while rig.engine.runnable:
        rig.step()
        if not spoilt and rig.filled.get(request, 0) * rig.block_tokens >= end:
            spoilt = True
            for frame in frames[0].frames:
                frame_bytes(rig, frame).fill_(0xFF)
    assert spoilt and rig.tokens[request] == vision.greedy(prompt)
    kept = [ImageFrames(each.frames, True) for each in frames]
    changed = rig.start(prompt.tokens, images=prompt.images, image_frames=kept)
    rig.run()
    assert rig.done[changed].reason == "error", "its first image is NaN"


def frame_bytes(rig: Rig, frame: int) -> torch.Tensor:
    nbytes = rig.pool.frame_bytes
    return rig.pool._window.tensor((nbytes,), torch.uint8, offset=frame * nbytes)


def test_an_image_behind_which_a_prompt_resumes_is_not_embedded(vision, rig):
    prompt = vision.prompt(text(15, 6), picture(8), text(16, 50))
    frames = rig.frames(rig.blocks(len(prompt.tokens) + 8) * rig.block_frames)
    expected = rig.generate(prompt.tokens, images=prompt.images, frames=frames)
    assert expected == vision.greedy(prompt)
    behind = rig.blocks(prompt.images[0].first + prompt.images[0].tokens)
    for cached, made in ((behind, int(vision.cross)), (0, 1)):
        kept = frames[: cached * rig.block_frames]
        more = rig.frames(len(frames) - len(kept))
        given = [ImageFrames([], False)] if cached and not vision.cross else None
        request = rig.start(
            prompt.tokens, images=prompt.images, frames=[*kept, *more], cached_blocks=cached, image_frames=given
        )
        rig.run()
        assert rig.tokens[request] == expected
        assert rig.done[request].encoded_images == made


def test_a_request_that_was_preempted_goes_on(vision, rig):
    """Its generated tokens are computed again behind the images."""
    prompt = vision.prompt(text(17, 10), picture(9), text(18, 10))
    expected = vision.greedy(prompt)
    tokens = rig.generate([*prompt.tokens, *expected[:4]], images=prompt.images, generated=4)
    assert tokens == expected[4:]


@pytest.mark.parametrize("vision", ["gemma3"], indirect=True)
def test_no_pass_ends_inside_an_image_that_attends_both_ways(vision, rig, monkeypatch):
    prompts = [vision.prompt(text(19, 25), picture(10), text(20, 3)), vision.prompt(picture(11), text(21, 40))]
    ends: dict[int, set[int]] = {}
    passes: list[int] = []
    step = rig.kv.step

    def watched(segments: Sequence[Segment]) -> Any:
        passes.append(sum(map(len, segments)))
        for segment in segments:
            ends.setdefault(id(segment.sequence), set()).add(segment.stop)
        return step(segments)

    monkeypatch.setattr(rig.kv, "step", watched)
    rig.engine._planner._max_step_tokens = 16
    requests = [rig.start(prompt.tokens, images=prompt.images) for prompt in prompts]
    memories = [id(rig.engine._runs[request].memory) for request in requests]
    rig.run()
    for memory, prompt in zip(memories, prompts, strict=True):
        image = prompt.images[0]
        assert not ends[memory] & set(range(image.first + 1, image.first + image.tokens))
        assert len(ends[memory]) > 8 + 1, "the prompt was computed at once"
    assert 16 < max(passes) <= most_pass_tokens(16, 2, rig.block_tokens, vision.model.spec.whole_image)
    assert [rig.tokens[request] for request in requests] == [vision.greedy(prompt) for prompt in prompts]


class ReplayedTokens:
    """In place of graphs: which tokens would be computed by their ids alone. It replays decode passes."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def run(
        self, tokens: Sequence[int], spans: Sequence[object], wanted: Sequence[int], unread: object
    ) -> torch.Tensor | None:
        del wanted, unread
        self.tokens += tokens
        if len(tokens) > len(spans):
            return None
        return torch.zeros(len(tokens), IMAGE_TOKEN).index_fill_(1, torch.tensor([7]), 1.0)


@pytest.mark.parametrize("vision", ["llava_onevision"], indirect=True)
def test_no_graph_computes_a_row_of_an_image(vision, rig, monkeypatch):
    """A prompt ends with an image, of which the last pass has one row."""
    rows = vision.rows(picture(40))
    whole = vision.prompt(text(50, -rows % 32 + 32), picture(40))
    prompt = Prompt(whole.tokens[:-1], whole.images)
    assert len(prompt.tokens) % 32 == 1
    graphs = ReplayedTokens()
    monkeypatch.setattr(rig.engine, "_graphs", graphs)
    tokens = rig.generate(prompt.tokens, images=prompt.images, max_tokens=3)
    assert vision.token not in graphs.tokens
    assert tokens[0] == vision.greedy(prompt, 1)[0]
    assert graphs.tokens[-2:] == tokens[:-1]  # before them the text in front of the image


@pytest.mark.parametrize("vision", ["llava_onevision", "mllama", "qwen2_5_vl"], indirect=True)
def test_a_fork_copies_what_has_equal_images_and_no_more(vision, rig):
    same = vision.prompt(text(22, 20), picture(12), text(23, 20))
    other = vision.prompt(text(22, 20), picture(13), text(23, 20))
    assert same.tokens == other.tokens
    parent = rig.start(same.tokens, images=same.images)
    for _ in range(4):
        rig.step()
    children = [rig.start(prompt.tokens, images=prompt.images, fork_of=parent) for prompt in (same, other)]
    computed = [rig.engine._runs[child].computed for child in children]
    assert computed == [len(same.tokens) - 1, 0 if vision.cross else same.images[0].first]
    if not vision.cross:  # whose placeholder alone is no token
        without = rig.start(same.tokens, fork_of=parent)
        assert rig.engine._runs[without].computed == same.images[0].first
    rig.run()
    assert [rig.tokens[child] for child in children] == [vision.greedy(prompt) for prompt in (same, other)]
    assert rig.tokens[parent] == rig.tokens[children[0]] != rig.tokens[children[1]]


@pytest.fixture(params=["virtual", "paged"])
def cross_rig(request: pytest.FixtureRequest, vision: Vision, make_rig) -> Rig:
    """An image in two frames of a block of 8 tokens."""
    rig = make_rig(vision.load(block_tokens=8), max_step_tokens=32, frames=320, kv=request.param)
    cross = rig.model.spec.groups.cross
    assert (cross.frames, cross.patches, cross.geometry.block_tokens) == (2, 10, 16)
    return rig


@pytest.mark.parametrize("vision", ["mllama"], indirect=True)
def test_keys_and_values_in_frames_spare_the_encoder_and_the_projections(vision, cross_rig, monkeypatch):
    """They serve another prompt, too: they depend on the image alone."""
    rig, first, second = cross_rig, picture(23), picture(24, 30, 56)
    prompt = vision.prompt(text(36, 9), first, text(37, 20), second, text(38, 7))
    frames = rig.image_frames(prompt.images)
    assert rig.generate(prompt.tokens, images=prompt.images, image_frames=frames) == vision.greedy(prompt)
    for name in ("encode", "cross_pairs"):
        monkeypatch.setattr(rig.model.images, name, None)
    filled = [ImageFrames(each.frames, True) for each in frames]
    other = vision.prompt(text(40, 13), second, text(41, 5), first, text(42, 11), first)
    request = rig.start(other.tokens, images=other.images, image_frames=[filled[1], filled[0], filled[0]])
    rig.run()
    assert rig.tokens[request] == vision.greedy(other)
    assert rig.done[request].encoded_images == 0


@pytest.mark.parametrize("vision", ["mllama"], indirect=True)
def test_bytes_of_other_images_and_behind_the_patches_change_nothing(vision, cross_rig):
    rig, prompt = cross_rig, vision.prompt(text(43, 9), picture(29, 28, 28), text(44, 20))
    frames = rig.image_frames(prompt.images)
    whole = our_logits(rig, opened(rig, prompt)[0], prompt, image_frames=frames)
    filled = [ImageFrames(frames[0].frames, True)]
    other = rig.image_frames(prompt.images)[0].frames
    first = frames[0].frames[0]
    second = first + 1 if rig.model.spec.groups.whole_pages else frames[0].frames[1]
    group = rig.model.spec.groups.cross
    patch_numbers = group.geometry.token_bytes // 4
    behind = group.patches * patch_numbers - frame_numbers(rig)  # in the second frame
    one_tile = group.patches // 2 * patch_numbers
    begin = prompt.images[0].first
    for frame, numbers, changes in (
        (other[0], slice(None), None),
        (second, slice(behind, None), None),
        (first, slice(one_tile, None), 0),  # the padding of a small image: rows before all images read it
        (first, slice(0, one_tile), begin),
    ):
        window = rig_frame(rig, frame)
        kept = window.clone()
        window[numbers] = 3.0
        spoilt = our_logits(rig, opened(rig, prompt)[0], prompt, image_frames=filled)
        window.copy_(kept)
        assert torch.equal(spoilt, whole) == (changes is None)
        if changes is not None:
            assert not torch.equal(spoilt[changes], whole[changes])
    assert torch.equal(our_logits(rig, opened(rig, prompt)[0], prompt, image_frames=filled), whole)


def frame_numbers(rig: Rig) -> int:
    """Numbers of a frame, of 4 bytes."""
    return rig.model.spec.groups.frame_bytes // 4


def rig_frame(rig: Rig, frame: int) -> torch.Tensor:
    return rig.pool._window.tensor((frame_numbers(rig),), torch.float32, offset=4 * frame * frame_numbers(rig))


@pytest.mark.parametrize("vision", ["mllama"], indirect=True)
def test_frames_of_images_that_hold_nan_are_filled_whole(vision, cross_rig):
    rig, prompt = cross_rig, vision.prompt(text(45, 9), picture(30), text(46, 5))
    frames = rig.image_frames(prompt.images)
    for frame in frames[0].frames:
        rig_frame(rig, frame).fill_(torch.nan)
    ours = our_logits(rig, opened(rig, prompt)[0], prompt, image_frames=frames)
    torch.testing.assert_close(ours, vision.logits(prompt), rtol=TOLERANCE, atol=TOLERANCE)


def test_frames_of_images_that_do_not_fit(vision, rig):
    prompt = vision.prompt(text(47, 9), picture(30), text(48, 5))
    frames = rig.image_frames(prompt.images)
    takes = f"frames for the image at token 10, with 0 tokens cached; it takes {len(frames[0].frames)}"
    more = rig.frames((len(frames[0].frames) + 1) * rig.block_frames)
    for image_frames, message in (
        ([], "frames for 0 images; 1 are needed"),
        ([*frames, *frames], "frames for 2 images; 1 are needed"),
        ([ImageFrames(more, False)], f"{len(more)} {takes}"),
        ([ImageFrames([], False)], f"0 {takes}"),
    ):
        request = rig.start(prompt.tokens, images=prompt.images, image_frames=image_frames)
        assert rig.done[request].detail == message


@pytest.mark.parametrize("vision", ["mllama"], indirect=True)
@pytest.mark.parametrize(("width", "height"), [(20, 20), (28, 28), (112, 80), (30, 56), (200, 20), (5, 300)])
def test_the_size_of_an_image_tells_its_patches(vision, width, height):
    image = vision.prompt(picture(31, width, height)).images[0]
    tiles = int(vision.inputs([vision.files[image.pixels.offset]])["aspect_ratio_mask"].sum())
    assert vision.model.images.visible(image) == 5 * tiles


@pytest.mark.parametrize("vision", ["mllama"], indirect=True)
def test_penalties_pass_over_placeholders_that_are_no_tokens(vision, rig):
    prompt = vision.prompt(text(38, 9), picture(27), text(39, 9))
    request = rig.start(prompt.tokens, images=prompt.images, repetition_penalty=100.0, max_tokens=4)
    rig.run()
    assert rig.done[request].reason == "length"
    assert not set(rig.tokens[request]) & set(prompt.tokens)


def test_beams_are_those_of_generate(vision, rig):
    prompt = vision.prompt(text(24, 13), picture(14), text(25, 6))
    needed = 8 * rig.blocks(len(prompt.tokens)) * rig.block_frames
    request = rig.start(
        prompt.tokens,
        images=prompt.images,
        frames=rig.frames(needed),
        beam_search=BeamSearch(width=3, early_stopping=True),
        max_tokens=6,
    )
    rig.run()
    assert rig.done[request].beams[0].tokens == vision.greedy(prompt, 6, num_beams=3, early_stopping=True)


@pytest.mark.parametrize("vision", ["gemma3"], indirect=True)
def test_bytes_before_the_window_change_nothing_and_those_in_it_do(vision, rig):
    """The window layers of Gemma 3, resumed behind an image."""
    prompt = vision.prompt(text(26, 30), picture(15), text(27, 70))
    sequence, frames = opened(rig, prompt)
    whole = our_logits(rig, sequence, prompt)
    window = next(number for number, group in enumerate(rig.model.spec.groups.attention) if group.shape.name != "full")
    cached = 5
    start = cached * rig.block_tokens
    for blocks, changed in ((range(cached - 4), False), (range(cached - 1, cached), True)):
        spoilt = [frames[block * rig.block_frames + window] for block in blocks]
        kept = {frame: rig.window(frame).clone() for frame in spoilt}
        for frame in spoilt:
            rig.window(frame).fill_(3.0 if changed else torch.nan)
        resumed, _ = opened(rig, prompt, frames[: cached * rig.block_frames])
        assert torch.equal(our_logits(rig, resumed, prompt, start=start), whole[start:]) != changed
        for frame, values in kept.items():
            rig.window(frame).copy_(values)


def test_an_image_that_cannot_be_read_ends_its_request_alone(vision, rig):
    file = picture(16)
    prompt = vision.prompt(text(28, 5), file, text(29, 5))
    image = prompt.images[0]
    gone = msgspec.structs.replace(image.pixels, offset=len(vision.files) << 30)
    bare = msgspec.structs.replace(image.pixels, inputs={})
    broken = [msgspec.structs.replace(image, pixels=pixels, digest=bytes(32)) for pixels in (gone, bare)]
    if not vision.model.images.kind.inputs:
        del broken[1]
    requests = [rig.start(prompt.tokens, images=[image]) for image in broken]
    healthy = rig.start(prompt.tokens, images=prompt.images)
    rig.run()
    for request, image in zip(requests, broken, strict=True):
        done = rig.done[request]
        assert done.reason == "error"
        why = "ends after 0 bytes; send" if image.pixels.inputs else "came without"
        assert done.detail.startswith(f"the image at token 6 (pixels {list(image.pixels.shape)}) {why}")
        assert "\n" not in done.detail
    assert rig.tokens[healthy] == vision.greedy(prompt)


@pytest.mark.parametrize("orientation", [1, 3, 6])
@pytest.mark.parametrize("vision", ["qwen2_5_vl"], indirect=True)
def test_an_image_is_turned_as_its_camera_was_held(vision, rig, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned, plain = io.BytesIO(), io.BytesIO()
    photo = Image.open(io.BytesIO(picture(28)))
    photo.save(turned, "PNG", exif=exif)
    turns = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_270}
    upright = photo.transpose(turns[orientation]) if orientation in turns else photo
    upright.save(plain, "PNG")
    prompt = vision.prompt(text(40, 5), plain.getvalue(), text(41, 5))
    image = msgspec.structs.replace(prompt.images[0], pixels=vision.pixels(turned.getvalue()))
    ours = our_logits(rig, opened(rig, prompt)[0], Prompt(prompt.tokens, [image]))
    torch.testing.assert_close(ours, vision.logits(prompt), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("vision", ["gemma3", "llava_onevision", "qwen2_5_vl"], indirect=True)
def test_an_image_with_another_number_of_placeholders(vision, rig):
    prompt = vision.prompt(text(30, 5), picture(17), text(31, 5))
    image = prompt.images[0]
    fewer = msgspec.structs.replace(image, tokens=image.tokens - 1)
    request = rig.start(prompt.tokens, images=[fewer])
    rig.run()
    assert rig.done[request].detail.startswith(
        f"the image at token 6 (pixels {list(image.pixels.shape)}) has an embedding of {image.tokens} rows, "
        f"but {image.tokens - 1} placeholders"
    )


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("vision", ["gemma3"], indirect=True)
def test_flex_attention_masks_images_as_tiles_do(vision, rig):
    flex = GroupedAttention(FlexAttention(rig.block_tokens, compiled=False))
    spec = vision.model.spec
    model = CausalModel(spec, vision.model._model, flex, vision.model.images)
    prompt = vision.prompt(text(32, 25), picture(18), text(33, 20))
    count = len(prompt.tokens)
    images = PromptImages(prompt.images, count, model.images)
    images.memory = rig.open_images(rig.image_frames(prompt.images))
    images.hold(0, count)
    memory = _PlainMemory(spec, count)  # what it does not compile reads all memory, and then masks it
    rows = []
    for start, stop in pairwise((0, prompt.images[0].first + prompt.images[0].tokens, count)):
        segment = Segment(memory._sequence, start, stop, images=images.of_pass(start, stop))
        steps = [VirtualStep(kv, [segment], [0]) for kv in memory._kv]
        step = GroupedStep([segment], steps, places(spec.groups.attention))
        rows.append(model.forward(prompt.tokens[start:stop], step, range(stop - start)))
    rig.close_images(images.memory)
    expected = our_logits(rig, opened(rig, prompt)[0], prompt)
    torch.testing.assert_close(torch.cat(rows), expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_a_directory_without_an_image_processor_is_refused(vision, tmp_path):
    vision.model.spec.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"image processor cannot be made: .*preprocessor_config\.json$"):
        read_model_spec(WorkerSettings(model=str(tmp_path)))


def test_a_draft_is_refused(vision):
    directory = str(vision.directory)
    with pytest.raises(ModelError, match="reads images, which no draft knows of"):
        read_model_spec(WorkerSettings(model=directory, draft_model=directory))


def test_tables_of_colours_have_the_bits_of_the_processor(vision):
    """Whatever an image's size, and with either half of the scale, or none."""
    for options in ({}, {"do_normalize": False}, {"do_rescale": False}, {"do_rescale": False, "do_normalize": False}):
        processor = type(vision.processor)(**{**vision.processor.to_dict(), **options})
        table = scales(processor)
        for seed, (width, height) in enumerate(((28, 28), (112, 80), (30, 56), (200, 20), (57, 300))):
            noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
            image = Image.fromarray(noise)
            made = scaled(prepare_image(image, processor), table, processor)
            expected = processor(images=[image], return_tensors="np")["pixel_values"]
            assert made.dtype == np.float32
            np.testing.assert_array_equal(made, expected)


SHAPE = ImageShape(IMAGE_TOKEN, "rows")
TOKENS = [1, 2, *[IMAGE_TOKEN] * 4, 3, *[IMAGE_TOKEN] * 4, 4]


def image_at(first: int, tokens: int = 4) -> PromptImage:
    return PromptImage(first, tokens, bytes(32), Pixels(0, (), {}))


@pytest.mark.parametrize(
    ("images", "cached", "apart", "message"),
    [
        ([image_at(2), image_at(7)], 2, True, None),
        ([image_at(2), image_at(7)], 6, True, None),
        ([image_at(2), image_at(7)], 3, False, "3 cached tokens end inside the image at tokens [2, 6)"),
        ([image_at(1)], 0, False, "tokens [1, 5) are not all the image's placeholder 90"),
        ([image_at(7), image_at(2)], 0, False, "an image at tokens [2, 6) of a prompt of 12, behind another's end"),
        ([image_at(9)], 0, False, "an image at tokens [9, 13) of a prompt of 12"),
        ([image_at(2, 0)], 0, False, "an image at tokens [2, 2) of a prompt of 12"),
        ([image_at(2, 2), image_at(4, 2)], 0, False, None),
        ([image_at(2, 2), image_at(4, 2)], 0, True, "two images meet at token 4"),
    ],
)
def test_images_that_do_not_fit_their_prompt(images, cached, apart, message):
    if message is None:
        check_images(images, TOKENS, len(TOKENS), cached, SHAPE, apart)
        return
    with pytest.raises(RequestError) as caught:
        check_images(images, TOKENS, len(TOKENS), cached, SHAPE, apart)
    assert str(caught.value).startswith(message)


def test_images_for_a_model_of_text(prompt, make_rig):
    rig = make_rig()
    request = rig.start(prompt, images=[image_at(2)])
    assert rig.done[request].detail == "1 images; the model reads text alone: send none"


@pytest.mark.parametrize("vision", ["llava_onevision"], indirect=True)
def test_an_image_that_the_device_has_no_memory_for_ends_its_request_alone(vision, make_rig, monkeypatch):
    rig, prompt = make_rig(vision.model), vision.prompt(text(61, 5), picture(31))

    def full(image: PromptImage) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB.\nMore lines of help.")

    with monkeypatch.context() as patch:
        patch.setattr(vision.model.images, "encode", full)
        request, other = rig.start(prompt.tokens, images=prompt.images), rig.start(text(62, 9))
        rig.run()
    assert rig.done[request].reason == "no_memory"
    assert rig.done[request].detail == ("an image could not be embedded: CUDA out of memory. Tried to allocate 20 MiB.")
    assert rig.done[other].reason == "length"
    assert rig.generate(prompt.tokens, images=prompt.images) == vision.greedy(prompt)
