"""The scheduler's half of the connector step by step: in vLLM's own scheduler, with no model and no workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, KVCacheTensor, MLAAttentionSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from benchmarks.engines.vllm_engine import connector
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from prefixd.integrations.engine.jobs import LoadOutcome, Outcomes, SaveJob
from prefixd.integrations.vllm import scheduler_half
from prefixd.integrations.vllm.connector import PrefixdConnector
from prefixd.integrations.vllm.naming.page_packing import Packing
from prefixd.integrations.vllm.scheduling.scheduler import find_connector
from prefixd.integrations.vllm.step_messages import Orders, Report
from tests.vllm.other_connectors import Handshake, beside, multi
from tests.vllm.schedulers import BLOCK, SHAPE, computed, make_config, make_scheduler
from tests.vllm.served import PATIENCE_S, make_prompt
from tests.waiting import wait_until


class Steps:
    """A scheduler with the connector, and what stands for the workers: they do what the test says."""

    def __init__(self, scheduler: Scheduler, address: str, packing: str, named: bool = True) -> None:
        ours = find_connector(scheduler.connector)
        assert isinstance(ours, PrefixdConnector) and ours._scheduler is not None
        self.scheduler, self.connector, self.half = scheduler, ours, ours._scheduler
        self.address = address
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        ours.bind_gpu_block_pool(scheduler.kv_cache_manager.block_pool)
        self.packing = Packing(packing)
        if named:
            self.half.name_model([self.packing])

    def add(
        self, name: str, prompt: list[int], max_tokens: int = 1, images: Sequence[MultiModalFeatureSpec] = ()
    ) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        request = Request(name, prompt, sampling, None, block_hasher=self.hasher, mm_features=list(images))
        self.scheduler.add_request(request)
        lookup = self.half.lookups._lookups.get(name)
        wait_until(lambda: lookup is None or lookup.asking is None or lookup.asking.done(), "the daemon did not answer")
        return request

    def cached(self, prompt: list[int]) -> None:
        """Puts the prompt's blocks into the daemon, as another engine would."""
        spec = self.half._geometry.spec(self.half._model, b"")
        with Client(self.address) as client:
            cache = client.register(spec)
            blocks = len(prompt) // spec.block_tokens
            cache.store(prompt, np.zeros((blocks, spec.parts[0].nbytes), np.uint8))

    def schedule(self) -> tuple[Any, Orders]:
        output = self.scheduler.schedule()
        return output, orders_of(output)

    def until_scheduled(self) -> tuple[Any, Orders]:
        """Steps that compute nothing are over at once."""
        for _ in range(1000):
            output, orders = self.schedule()
            if output.num_scheduled_tokens or orders.loads:
                return output, orders
            self.answer(output)
        raise AssertionError("nothing was ever scheduled")

    def answer(self, output: Any, outcomes: Outcomes | None = None, **transfers: Any) -> None:
        """The step has been computed."""
        orders = orders_of(output)
        report: Any = Report(outcomes or Outcomes(), orders.step, (self.packing,) if orders.ask_packing else ())
        if isinstance(output.kv_connector_metadata, MultiKVConnectorMetadata):
            others = len(output.kv_connector_metadata.metadata) - 1
            report = MultiKVConnectorWorkerMetadata((*[None] * others, report))
        connector_output = KVConnectorOutput(kv_connector_worker_meta=report, **transfers)
        answer = computed(self.scheduler, output)
        answer.kv_connector_output = connector_output
        self.scheduler.update_from_output(output, answer)

    def take_images(self, tokens: int) -> None:
        """As with a model that has a vision encoder: so many embeddings a step, and as many are kept."""
        self.scheduler.max_num_encoder_input_tokens = tokens
        self.scheduler.encoder_cache_manager = EncoderCacheManager(tokens)

    def do(self, jobs: Sequence[SaveJob]) -> Outcomes:
        """What the workers do with saves: the daemon has the blocks, all zeros. Says that they have ended."""
        with Client(self.address) as client:
            for job in jobs:
                cache = client.register(job.prefix.spec)
                parts = [np.zeros((job.blocks, cache.spec.parts[group].nbytes), np.uint8) for group in job.groups]
                tokens = np.frombuffer(job.prefix.tokens, "<u4")
                cache.store(tokens, parts, first_block=job.first_block, parts=job.groups)
        return Outcomes(saves={job.id: 1 for job in jobs})

    def run(self, name: str) -> int:
        """Steps until the request has ended; how many of its tokens were loaded."""
        loaded = 0
        while name in self.scheduler.requests:
            output, orders = self.schedule()
            loaded += sum(job.blocks for job in orders.loads) * self.half._geometry.block_tokens
            outcomes = self.do(orders.saves)
            outcomes.merge(Outcomes({job.request_id: (1, LoadOutcome(1, 0.1, 0)) for job in orders.loads}))
            self.answer(output, outcomes, finished_recving={job.request_id for job in orders.loads})
        return loaded


def orders_of(output: Any) -> Orders:
    """What a step tells the connector's workers; in MultiConnector it is the last child."""
    metadata = output.kv_connector_metadata
    orders = metadata.metadata[-1] if isinstance(metadata, MultiKVConnectorMetadata) else metadata
    assert isinstance(orders, Orders)
    return orders


MakeSteps = Callable[..., Steps]


@pytest.fixture
def make_steps(llama: Path, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeSteps]:
    """Makes one; arguments are those of vLLM, `options` the connector's, `before` what comes before it in
    MultiConnector. Unless `named`, the workers have not said yet how their bytes lie.

    While nothing runs a step waits for the daemon's answers for as long as they take: which requests go into one step
    must not hang on the machine.
    """
    monkeypatch.setattr(scheduler_half, "_IDLE_PATIENCE_S", PATIENCE_S)
    init_none_hash(sha256)
    made: list[Scheduler] = []

    def make(
        blocks: int = 400,
        options: dict[str, object] | None = None,
        asynchronous: bool = False,
        before: Sequence[dict[str, Any]] = (),
        named: bool = True,
        kind: type[FullAttentionSpec] = FullAttentionSpec,
        **arguments: Any,
    ) -> Steps:
        given = {"recompute_if_slower": False, "timeout_s": PATIENCE_S, "block_tokens": 64, **(options or {})}
        ours = connector(daemon.address, **given)
        transfer = KVTransferConfig(**(multi(*before, ours) if before else ours))
        config = make_config(llama, asynchronous=asynchronous, blocks=blocks, **{"max_num_seqs": 8, **arguments})
        spec = kind(**SHAPE)
        page = spec.page_size_bytes
        tensor = KVCacheTensor(blocks * page, ["layer"], blocks * page, page)
        groups = [KVCacheGroupSpec(["layer"], spec)]
        scheduler = make_scheduler(config, groups, [tensor], transfer)
        made.append(scheduler)
        return Steps(scheduler, daemon.address, kind.__name__, named)

    yield make
    for scheduler in made:
        scheduler.shutdown()


def test_what_a_step_computes_on_bytes_that_it_waits_for_is_saved_by_the_next(make_steps: MakeSteps) -> None:
    """The bytes may fail to come. Another request that shares them, in the same step, computes on the same."""
    steps = make_steps(options={"load": "layerwise"})
    prompt = make_prompt(71, 128)
    steps.cached(prompt)
    steps.add("a", prompt + make_prompt(72, 200), max_tokens=9)
    steps.add("b", prompt + make_prompt(73, 200), max_tokens=9)
    output, orders = steps.until_scheduled()
    assert [job.request_id for job in orders.loads] == ["a"] and set(output.num_scheduled_tokens) == {"a", "b"}
    assert orders.saves == []
    failed = Outcomes({"a": (1, LoadOutcome(0, 0.1, 2))})
    steps.answer(output, failed, invalid_block_ids=set(orders.loads[0].block_ids[0]))
    output, orders = steps.until_scheduled()
    assert set(output.num_scheduled_tokens) == {"a", "b"}
    assert sorted((job.first_block, job.blocks) for job in orders.saves) == [(2, 3), (2, 3)]
    steps.answer(output, Outcomes(saves={job.id: 1 for job in orders.saves}))
    assert not steps.half.saves.under_way


def test_what_a_step_computes_on_bytes_that_another_connector_loads_is_saved_by_the_next(make_steps: MakeSteps) -> None:
    """They may fail to come as well."""
    steps = make_steps(before=[beside("LoadingConnector", tokens=128)])
    steps.add("a", make_prompt(171, 328), max_tokens=9)
    output, orders = steps.until_scheduled()
    assert output.num_scheduled_tokens == {"a": 200}
    assert orders.saves == []
    invalid = set(steps.scheduler.kv_cache_manager.get_block_ids("a")[0][:2])
    steps.answer(output, invalid_block_ids=invalid)
    output, orders = steps.until_scheduled()
    assert output.num_scheduled_tokens == {"a": 328}
    assert [(job.first_block, job.blocks) for job in orders.saves] == [(0, 5)]
    steps.answer(output, Outcomes(saves={job.id: 1 for job in orders.saves}))
    assert not steps.half.saves.under_way


def test_a_lease_ends_when_another_connector_loads_the_prefix(make_steps: MakeSteps) -> None:
    steps = make_steps(before=[beside("LoadingConnector", tokens=64)])
    prompt = make_prompt(172, 300)
    steps.cached(prompt)
    steps.add("a", prompt, max_tokens=3)
    output, orders = steps.until_scheduled()
    assert output.num_scheduled_tokens == {"a": 236} and orders.loads == []
    assert steps.half.lookups._leases == 0
    steps.answer(output)
    steps.run("a")
    assert not steps.half._hits and not steps.half._loading


def test_requests_wait_until_the_workers_have_said_how_their_bytes_lie(make_steps: MakeSteps) -> None:
    """One step, in which nothing is computed. Those that came before it have their hits."""
    prompt = make_prompt(173, 300)
    for before in ([], [beside("ShakingConnector")]):
        make_steps().cached(prompt)
        steps = make_steps(before=before, named=False)
        steps.scheduler.connector.set_xfer_handshake_metadata({0: Handshake(1)})
        steps.add("a", prompt, max_tokens=3)
        steps.add("gone", make_prompt(174, 100))
        steps.scheduler.finish_requests("gone", RequestStatus.FINISHED_ABORTED)
        output, orders = steps.schedule()
        assert orders.ask_packing and orders.idle and not output.num_scheduled_tokens
        steps.answer(output)
        assert steps.run("a") == 256
        output, orders = steps.schedule()
        assert not orders.ask_packing and not steps.half._unnamed


def test_a_reset_before_the_workers_have_said_how_their_bytes_lie(make_steps: MakeSteps) -> None:
    """What the engine has from then on is its own."""
    prompt = make_prompt(175, 300)
    make_steps().cached(prompt)
    steps = make_steps(named=False)
    steps.half.reset_cache()
    steps.add("a", prompt, max_tokens=3)
    assert steps.run("a") == 0


def test_running_requests_can_be_made_to_start_over_with_an_empty_cache(make_steps: MakeSteps) -> None:
    """As `pause_generation(mode="keep")` does. A request in the middle of a block holds nothing but its own blocks."""
    steps = make_steps()
    steps.add("a", make_prompt(74, 100), max_tokens=40)
    output, orders = steps.until_scheduled()
    steps.answer(output, Outcomes(saves={job.id: 1 for job in orders.saves}))
    assert orders.saves and not steps.half.saves.under_way
    assert steps.scheduler.reset_prefix_cache(reset_running_requests=True)
    output, orders = steps.until_scheduled()
    assert output.num_scheduled_tokens == {"a": 101}
    steps.answer(output, Outcomes(saves={job.id: 1 for job in orders.saves}))
    steps.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)


def test_a_long_step_among_short_ones_is_taken_for_what_it_is(make_steps: MakeSteps) -> None:
    """With asynchronous scheduling the next step is scheduled when one has not ended."""
    steps = make_steps(asynchronous=True)
    now_s = [100.0]
    steps.half._clock = lambda: now_s[0]
    steps.add("short", make_prompt(75, 4), max_tokens=9)
    short, _ = steps.until_scheduled()
    steps.add("long", make_prompt(76, 1000), max_tokens=9)
    long, _ = steps.until_scheduled()
    now_s[0] += 0.01
    steps.answer(short)
    after, _ = steps.schedule()
    now_s[0] += 2.0
    steps.answer(long)
    assert long.num_scheduled_tokens["long"] == 1000
    assert steps.half._cost.compute_s(1001) == pytest.approx(2.0)
    steps.answer(after)


def test_an_adapter_whose_files_cannot_be_seen_is_kept_to_its_engine(
    make_steps: MakeSteps, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    adapter = LoRARequest("style", 1, "somebody/style")
    first, second = make_steps(), make_steps()
    names = [steps.half._adapters.name(adapter) for steps in (first, first, second)]
    assert names[0] == names[1] != names[2] and all(name.startswith("lora=style#") for name in names)
    # A record comes once for each logger that has pytest's handler.
    assert len({record for record in caplog.records if "style is cannot be told" in record.getMessage()}) == 2


@pytest.mark.parametrize("failed", [False, True], ids=["it came", "it did not"])
def test_a_request_aborted_in_the_middle_of_its_load_leaves_nothing(make_steps: MakeSteps, failed: bool) -> None:
    """Its blocks stay its own until the copy into them has ended."""
    steps = make_steps()
    prompt = make_prompt(77, 128)
    steps.cached(prompt)
    steps.add("a", prompt + make_prompt(78, 50))
    pool = steps.scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    output, orders = steps.until_scheduled()
    (job,) = orders.loads
    steps.answer(output)
    steps.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert all(pool.blocks[block].ref_cnt == 1 for block in job.block_ids[0])
    output, _ = steps.schedule()
    outcome = Outcomes({"a": (1, LoadOutcome(0, 0.1, 2 * failed))})
    invalid = set(job.block_ids[0]) if failed else set()
    steps.answer(output, outcome, finished_recving={"a"}, invalid_block_ids=invalid)
    assert pool.get_num_free_blocks() == free and not steps.scheduler.requests
    half = steps.half
    assert not (half._loading or half._loaded or half._requests or half._hits or half.lookups._lookups)
    assert half.lookups._leases == 0


def test_latent_attention_is_opaque_blocks(make_steps: MakeSteps) -> None:
    """Half the bytes: one vector for keys and values. vLLM on a CPU computes such models from their start only."""
    steps = make_steps(kind=MLAAttentionSpec)
    assert [part.rule for part in steps.half._geometry.spec("m", b"").parts] == [None]
    assert steps.half._geometry.block_bytes == 64 * 4
    prompt = make_prompt(82, 300)
    for name, found in (("a", 0), ("b", 256)):
        assert steps.scheduler.reset_prefix_cache()
        steps.add(name, prompt)
        assert steps.run(name) == found


PLACEHOLDER = 3


def an_image(
    content: str, offset: int, length: int, name: str = "the name of all", *, shown: bool = True
) -> MultiModalFeatureSpec:
    pixels = torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)
    element = MultiModalFieldElem(pixels, MultiModalBatchedField())
    data = MultiModalKwargsItem({"pixel_values": element}) if shown else None
    return MultiModalFeatureSpec(data, "image", name, PlaceholderRange(offset, length), name)


def test_images_are_told_apart_by_what_is_in_them(make_steps: MakeSteps) -> None:
    """The prompts' token ids are equal. An image that prefixd has needs no vision encoder."""
    steps = make_steps()
    steps.take_images(1000)
    text, question = make_prompt(79, 100), make_prompt(80, 150)
    prompt = [*text, *[PLACEHOLDER] * 80, *question]  # the image ends in the third block of 64 tokens

    def ask(name: str, content: str) -> tuple[int, bool]:
        assert steps.scheduler.reset_prefix_cache()
        steps.add(name, prompt, images=[an_image(content, 100, 80, f"hash of {content}")])
        seen: list[str] = []
        schedule = steps.scheduler.schedule

        def noting() -> Any:
            output = schedule()
            seen.extend(output.scheduled_encoder_inputs)
            return output

        steps.scheduler.schedule = noting  # type: ignore[method-assign]
        try:
            loaded = steps.run(name)
        finally:
            steps.scheduler.schedule = schedule  # type: ignore[method-assign]
        return loaded, bool(seen)

    assert ask("cat", "a cat") == (0, True)
    assert ask("dog", "a dog") == (64, True), "what stands before the image, and no more"
    assert ask("cat again", "a cat") == (320, False)
    assert ask("dog again", "a dog") == (320, False)


def test_an_answer_behind_an_image_is_saved_under_the_image_too(make_steps: MakeSteps) -> None:
    """The image's last tokens share a block with the first of the answer."""
    steps = make_steps()
    steps.take_images(1000)
    prompt = [*make_prompt(81, 60), *[PLACEHOLDER] * 80]
    for content, found in (("a bird", 0), ("a fish", 0), ("a bird", 192), ("a fish", 192)):
        longer = [*prompt, *[7] * 60] if found else prompt
        assert steps.scheduler.reset_prefix_cache()
        steps.add(content, longer, max_tokens=60, images=[an_image(content, 60, 80, content)])
        assert steps.run(content) == found


@pytest.mark.parametrize("shown", [True, False])
def test_of_images_that_nobody_can_be_sure_of_only_what_is_before_them_is_saved(
    make_steps: MakeSteps, shown: bool
) -> None:
    """Two images came under one name, or the scheduler was not shown what the image is."""
    steps = make_steps()
    steps.take_images(1000)
    prompt = [*make_prompt(83 + shown, 100), *[PLACEHOLDER] * 80, *make_prompt(85 + shown, 150)]

    def ask(name: str, image: MultiModalFeatureSpec, tokens: list[int] = prompt) -> int:
        assert steps.scheduler.reset_prefix_cache()
        steps.add(name, tokens, images=[image])
        return steps.run(name)

    if shown:
        assert ask("a cat", an_image("a cat", 100, 80)) == 0
        longer = [*prompt, *make_prompt(87, 100)]
        for content, found in (("a dog", 64), ("a cat", 320), ("a dog", 64), ("a cat", 320)):
            assert ask(content, an_image(content, 100, 80), longer) == found, "what was saved before there were two"
        assert ask("by another name", an_image("a dog", 100, 80, "dog")) == 64
        assert ask("again", an_image("a dog", 100, 80, "dog"), longer) == 320
        return
    for name, found in (("first", 0), ("second", 64), ("third", 64)):
        assert ask(name, an_image("unseen", 100, 80, shown=False)) == found


def test_what_was_asked_before_another_image_came_under_the_name_is_not_saved_from_then_on(
    make_steps: MakeSteps,
) -> None:
    """vLLM may embed the other one first."""
    steps = make_steps()
    steps.take_images(1000)
    prompt = [*make_prompt(89, 100), *[PLACEHOLDER] * 80, *make_prompt(90, 150)]
    steps.add("cat", prompt, images=[an_image("a cat", 100, 80)])
    steps.add("dog", prompt, images=[an_image("a dog", 100, 80)])
    steps.run("cat")
    steps.run("dog")
    assert steps.scheduler.reset_prefix_cache()
    steps.add("again", prompt, images=[an_image("a cat", 100, 80)])
    assert steps.run("again") == 64


def test_media_that_come_in_pieces_are_not_shown_and_nothing_is_sure_then(make_steps: MakeSteps) -> None:
    steps = make_steps()
    steps.take_images(1000)
    prompt = [*make_prompt(91, 100), *[PLACEHOLDER] * 80, *make_prompt(92, 150)]
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, detokenize=False)
    session = Request("session", make_prompt(93, 100), sampling, None, block_hasher=steps.hasher, resumable=True)
    steps.scheduler.add_request(session)
    steps.scheduler.finish_requests("session", RequestStatus.FINISHED_ABORTED)
    for name, found in (("first", 0), ("second", 64)):
        assert steps.scheduler.reset_prefix_cache()
        steps.add(name, prompt, images=[an_image("a cat", 100, 80)])
        assert steps.run(name) == found
