"""A small random model, host memory, and an engine on them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from prefixd.base.sampling import Sampling
from prefixd.worker.attention.attention import AttentionBackend
from prefixd.worker.decoding.draft import Draft
from prefixd.worker.engine import Engine
from prefixd.worker.memory.cross_kv import CrossKv
from prefixd.worker.memory.embedding_memory import PromptEmbeddings
from prefixd.worker.memory.grouped_kv import GroupedKv
from prefixd.worker.memory.kv_memory import KvMemory, KvSequence, Segment
from prefixd.worker.memory.make_kv import make_embeddings, make_kv
from prefixd.worker.memory.state_memory import PagedStates
from prefixd.worker.memory.virtual_kv import VirtualKv
from prefixd.worker.model import CausalModel, load_model
from prefixd.worker.spec.model_spec import read_model_spec
from prefixd.worker_protocol.protocol import Done, ImageFrames, PromptImage, Start, StateFrames, Step
from prefixd.worker_protocol.worker_settings import WorkerSettings
from prefixd_swap.tiers import GpuTier, PagedGpuTier
from prefixd_swap.vmem import FramePool, create_memory
from prefixd_swap.vtensor import VirtualTensorManager

VOCAB = 96
EOS = 95


def tiny_llama_config(**changes: object) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "initializer_range": 0.3,
            "bos_token_id": None,
            "eos_token_id": EOS,
            "tie_word_embeddings": False,
            **changes,
        }
    )


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """The models are small, and other tests may want the other cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    torch.manual_seed(7)
    LlamaForCausalLM(tiny_llama_config()).save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def model(llama_directory: Path) -> CausalModel:
    return load_model(read_model_spec(WorkerSettings(model=str(llama_directory))))


@pytest.fixture(scope="session")
def wide_llama_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small weights and much KV, 128 KiB a token in float32: the 2 MiB chunk of a GPU holds 16 tokens."""
    directory = tmp_path_factory.mktemp("wide_llama")
    wide = {"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    torch.manual_seed(9)
    LlamaForCausalLM(tiny_llama_config(**wide, initializer_range=0.1)).save_pretrained(directory)
    return directory


def managers_of(kv: KvMemory) -> list[VirtualTensorManager]:
    """The managers below a memory; none below block tables."""
    if isinstance(kv, VirtualKv):
        return [kv.manager]
    if isinstance(kv, GroupedKv) and all(isinstance(memory, VirtualKv) for memory in kv._memories):
        if isinstance(kv._states, PagedStates):
            return []
        states = [] if kv._states is None else [kv._states.manager]
        cross = [] if kv.cross is None else [kv.cross.memory.manager]
        return [*(memory.manager for memory in kv._memories), *states, *cross]
    return []


def with_kv(model: CausalModel, kv: str) -> CausalModel:
    """The same model in virtual tensors or block tables."""
    same = copy.copy(model)
    same.spec = replace(model.spec, groups=replace(model.spec.groups, whole_pages=kv == "paged"))
    return same


class Rig:
    """The daemon's side of an engine, in one process."""

    def __init__(
        self,
        model: CausalModel,
        frames: int = 64,
        max_step_tokens: int = 64,
        device: str = "cpu",
        kv: str = "virtual",
        requests: int = 80,
        ahead: bool = False,
        background: Executor | None = None,
    ) -> None:
        self.model = model = with_kv(model, kv)
        self.block_tokens = model.spec.block_tokens
        self.block_frames = model.spec.block_slots
        self.memory = create_memory(device, model.spec.groups.chunk_bytes)
        self.pool = FramePool(self.memory, model.spec.groups.frame_bytes, frames)
        self.tier = PagedGpuTier(self.pool) if model.spec.groups.whole_pages else GpuTier(self.pool)
        self.kv = make_kv(
            model.spec, self.memory, self.pool.table, requests=requests, frames=frames, background=background
        )
        self.embeddings = make_embeddings(
            model.spec, self.memory, self.pool.table, self.kv, requests=requests, background=background
        )
        self.managers = managers_of(self.kv)
        if self.embeddings is not None and isinstance(self.embeddings.memory, VirtualKv):
            self.managers.append(self.embeddings.memory.manager)
        self.manager = self.managers[0] if self.managers else None
        draft = None
        if model.spec.draft is not None:
            draft = Draft(load_model(model.spec.draft), self.kv, model.spec.draft_tokens)
        clock = itertools.count().__next__
        self.engine = Engine(
            *(model, self.kv, max_step_tokens, clock), draft=draft, ahead=ahead, embeddings=self.embeddings
        )
        self.tokens: dict[int, list[int]] = {}
        self.filled: dict[int, int] = {}
        self.filled_images: dict[int, list[int]] = {}
        self.done: dict[int, Done] = {}
        self.steps: list[Step] = []
        self._ids = itertools.count()
        self._bare: list[KvSequence] = []

    def frames(self, count: int) -> list[int]:
        """So many slots of blocks, one block's after the other's."""
        groups = self.model.spec.groups
        widths = [group.frames for group in groups.attention] if groups.whole_pages else [1]
        return self._take(widths, count // len(widths)) if widths else []

    def state_frames(self) -> list[int]:
        """The slots of a state."""
        spec = self.model.spec
        return self._take([spec.state_frames // spec.state_slots] * spec.state_slots, 1) if spec.state_slots else []

    def _take(self, widths: Sequence[int], count: int) -> list[int]:
        slots = self.tier.allocate([width * self.pool.frame_bytes for width in widths], count)
        assert len(slots) == count
        return slots.ravel().tolist()

    def free(self, frames: Sequence[int]) -> None:
        self.tier.free(frames)

    def frames_of(self, sequence: KvSequence) -> list[int]:
        return list(sequence.frames)

    def window(self, frame: int) -> torch.Tensor:
        """A frame's numbers, as the daemon sees them."""
        geometry = self.model.spec.geometry
        start = frame * geometry.block_bytes
        count = geometry.block_bytes // geometry.element_bytes
        return self.pool._window.tensor((count,), getattr(torch, geometry.dtype), offset=start)

    def image_frames(self, images: Sequence[PromptImage]) -> list[ImageFrames]:
        """Frames for the keys and values, or the embeddings, of images that are in none yet."""
        spec, frames = self.model.spec, dict[bytes, list[int]]()
        for image in {image.digest: image for image in images}.values():
            widths = [1] * spec.embedding_frames(image.tokens)
            if spec.image_slots:
                widths = [spec.image_frames // spec.image_slots] * spec.image_slots
            frames[image.digest] = self._take(widths, 1) if widths else []
        return [ImageFrames(frames[image.digest], False) for image in images]

    def open_images(self, given: Sequence[ImageFrames]) -> CrossKv | PromptEmbeddings:
        """Memory for a prompt's images without an engine."""
        return self.kv.cross.open(given) if self.embeddings is None else self.embeddings.open(given)

    def close_images(self, memory: CrossKv | PromptEmbeddings) -> None:
        (self.kv.cross if self.embeddings is None else self.embeddings).close(memory, lambda: None)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def start(
        self,
        tokens: Sequence[int],
        frames: Sequence[int] | None = None,
        cached_blocks: int = 0,
        generated: int = 0,
        fork_of: int = -1,
        state: StateFrames | None = None,
        images: Sequence[PromptImage] = (),
        image_frames: Sequence[ImageFrames] | None = None,
        loading: bool = False,
        **sampling: object,
    ) -> int:
        """Begin a request; with frames for all it may need if none are given."""
        if image_frames is None:
            image_frames = self.image_frames(images)
        request = next(self._ids)
        choice = Sampling(**{"max_tokens": 8, "ignore_eos": True, **sampling})
        if frames is None:
            frames = self.frames(self.blocks(len(tokens) + choice.max_tokens) * self.block_frames)
        self.tokens[request] = []
        message = Start(
            id=request,
            tokens=np.array(tokens, dtype="<u4").tobytes(),
            generated=generated,
            cached_blocks=cached_blocks,
            frames=list(frames),
            sampling=choice,
            loading=loading,
            fork_of=fork_of,
            state=state,
            images=list(images),
            image_frames=list(image_frames),
        )
        self.take(self.engine.start(message))
        return request

    def take(self, messages: Sequence[Step | Done]) -> None:
        for message in messages:
            if isinstance(message, Done):
                assert message.id not in self.done
                self.done[message.id] = message
                continue
            self.steps.append(message)
            for update in message.updates:
                assert update.id not in self.done
                assert update.filled_blocks >= self.filled.get(update.id, 0)
                self.tokens[update.id] += update.tokens
                self.filled[update.id] = update.filled_blocks
                self.filled_images.setdefault(update.id, []).extend(update.images)

    def step(self) -> None:
        self.take(self.engine.step())

    def run(self) -> None:
        """Step until nothing can run."""
        while self.engine.runnable:
            self.step()

    def generate(self, tokens: Sequence[int], **arguments: object) -> list[int]:
        """One request alone, to its end."""
        request = self.start(tokens, **arguments)
        self.run()
        return self.tokens[request]

    def tensor(self, frames: Sequence[int]) -> KvSequence:
        """A request's memory without an engine."""
        tensor = self.kv.open(frames)
        self._bare.append(tensor)
        return tensor

    def forward(self, tokens: Sequence[int], segments: Sequence[Segment], wanted: Sequence[int]) -> torch.Tensor:
        """One pass."""
        return self.model.forward(tokens, self.kv.step(segments), wanted)

    def logits(self, tensor: KvSequence, tokens: Sequence[int], cuts: Sequence[int], start: int = 0) -> torch.Tensor:
        """Logits of tokens[start:], computed in pieces that end at `cuts` and at the end."""
        rows = []
        for stop in [*cuts, len(tokens)]:
            part = tokens[start:stop]
            rows.append(self.forward(part, [Segment(tensor, start, stop)], range(len(part))).clone())
            start = stop
        return torch.cat(rows)

    def close(self) -> None:
        self.engine.close()
        self.model.synchronize()
        for tensor in self._bare:
            self.kv.close(tensor, lambda: None)
        self.kv.poll(wait=True)
        for manager in self.managers:
            manager.check_integrity()
        if self.embeddings is not None:
            self.embeddings.memory.poll(wait=True)
            self.embeddings.memory.end()
        self.kv.end()
        self.pool.close()
        self.memory.close()


@pytest.fixture(scope="session")
def rig_type() -> type[Rig]:
    """For tests that make rigs themselves."""
    return Rig


@pytest.fixture
def rig(model: CausalModel) -> Iterator[Rig]:
    rig = Rig(model)
    yield rig
    rig.close()


@pytest.fixture
def prompt() -> list[int]:
    """Fifty tokens: three blocks of 16 and a bit."""
    return np.random.default_rng(11).integers(0, VOCAB - 1, 50).tolist()


@pytest.fixture
def make_rig(llama_directory: Path) -> Iterator[Callable[..., Rig]]:
    """Rigs on a given model, or on the small one with other settings."""
    rigs: list[Rig] = []

    def make(
        model: CausalModel | None = None,
        max_step_tokens: int = 64,
        frames: int = 160,
        kv: str = "virtual",
        **settings: object,
    ) -> Rig:
        chosen = model or load_model(read_model_spec(WorkerSettings(model=str(llama_directory), **settings)))
        rigs.append(Rig(chosen, frames, max_step_tokens, kv=kv))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig_with(llama_directory: Path) -> Iterator[Callable[..., Rig]]:
    """Rigs on the small model with an attention backend, a KV memory and a layout."""
    rigs: list[Rig] = []

    def make(attention: AttentionBackend | None, kv: str = "virtual", layout: str = "token") -> Rig:
        settings = WorkerSettings(model=str(llama_directory), layout=layout, chunk_bytes=4096)
        model = load_model(read_model_spec(settings))
        model.attention = attention or model.attention
        rigs.append(Rig(model, kv=kv))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
