"""What prefixd has, in the KV events that the engine itself publishes, by the engine's own hashes of blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq
from vllm.distributed import kv_events as theirs

from benchmarks.engines.vllm_engine import EngineProcess, EngineRequest
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from tests.vllm.served import (
    BLOCK_TOKENS,
    DAEMON,
    VLLM_BLOCK_TOKENS,
    NewRequests,
    StartEngine,
    run,
    tokens_of,
)
from tests.waiting import WAIT_S


class Stream:
    """A subscriber that believes what it is told, and is strict about it.

    It asks for batches once more (`replay_endpoint`): what an engine says first is said before it is subscribed.
    """

    def __init__(self, folder: Path, name: str) -> None:
        endpoint, replay = (f"ipc://{folder}/{name}-{what}" for what in ("events", "replay"))
        self.config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
        self.config["replay_endpoint"] = replay
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(replay)
        self._next = 0
        self._decoder = msgspec.msgpack.Decoder(theirs.KVEventBatch)
        self.hashes: dict[tuple[Any, ...], Any] = {}  # of a prompt up to a block's end, with what is extra in its first
        self.prompts: dict[Any, tuple[Any, ...]] = {}
        self.has: dict[str | None, set[Any]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def read(self) -> None:
        """What has been said."""
        self._socket.send_multipart((b"", self._next.to_bytes(8, "big")))
        while True:
            assert self._socket.poll(WAIT_S * 1000)
            _, _, number, payload = self._socket.recv_multipart()
            if number == theirs.ZmqEventPublisher.END_SEQ:
                return
            assert int.from_bytes(number, "big") == self._next
            self._next += 1
            for event in self._decoder.decode(payload).events:
                self._take(event)

    def _take(self, event: Any) -> None:
        match event:
            case theirs.AllBlocksCleared():
                for blocks in self.has.values():
                    blocks.clear()
            case theirs.BlockRemoved():
                assert event.medium == "GPU" or self.has[event.medium] >= set(event.block_hashes)
                self.has[event.medium] -= set(event.block_hashes)
            case theirs.BlockStored():
                assert event.block_size == VLLM_BLOCK_TOKENS and event.group_idx == 0
                before = event.parent_block_hash
                prompt = self.prompts[before] if before is not None else (event.extra_keys[0],)
                for place, key in enumerate(event.block_hashes):
                    prompt = (*prompt, *event.token_ids[place * event.block_size : (place + 1) * event.block_size])
                    assert self.hashes.setdefault(prompt, key) == key and self.prompts.setdefault(key, prompt) == prompt
                    assert event.medium == "GPU" or key not in self.has[event.medium], "told twice"
                    self.has[event.medium].add(key)

    def knows(self, medium: str, *prompts: Sequence[int]) -> bool:
        """Whether it believes that exactly the blocks of these prompts are there."""
        expected = {
            (None, *prompt[:end])
            for prompt in prompts
            for end in range(VLLM_BLOCK_TOKENS, len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS + 1, VLLM_BLOCK_TOKENS)
        }
        return {self.prompts[key] for key in self.has[medium]} == expected


def saved(engine: EngineProcess, request: EngineRequest) -> list[int]:
    """Runs it; its tokens but the last, which is sampled and not computed."""
    (answer,) = tokens_of(engine.generate([request]))
    engine.wait_until_idle()
    return [*request.prompt, *answer[:-1]]


def test_the_stream_of_an_engine(
    folder: Path, llama: Path, make_engine: StartEngine, new_requests: NewRequests
) -> None:
    """Stored, written to disk, removed, and gone with the daemon; what is there from before is told at the start."""
    (one,) = new_requests(500)

    def until(condition: Callable[[], bool]) -> None:
        """An engine without requests tells nothing."""
        end_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end_s, {medium: len(blocks) for medium, blocks in stream.has.items()}
            run(engine, new_requests(10, max_tokens=2), forget=False)
            stream.read()

    with DaemonProcess({**DAEMON, "cache.write_back": "false"}) as daemon, Client(daemon.address) as client:
        with Stream(folder, "a") as stream, make_engine(llama, daemon, kv_events_config=stream.config) as engine:
            first = saved(engine, one)
            until(lambda: stream.knows("CPU", first))
            assert stream.has["CPU"] <= stream.has["GPU"], "by the same hashes"
            client.flush()
            parted = saved(engine, EngineRequest([*first[:352], *reversed(first[:160])], 1))  # inside the sixth block
            until(lambda: stream.knows("CPU", first, parted) and stream.knows("STORAGE", first))
        with Stream(folder, "b") as stream, make_engine(llama, daemon, kv_events_config=stream.config) as engine:
            until(lambda: stream.knows("CPU", first, parted) and stream.knows("STORAGE", first))
            run(engine, [EngineRequest(one.prompt, 1, salt="s")], forget=False)
            salted = (("s",), *first[:448])
            until(lambda: salted in {stream.prompts[key] for key in stream.has["CPU"]})
            client.evict(all=True)
            until(lambda: not stream.has["CPU"] and not stream.has["STORAGE"])
            again = saved(engine, EngineRequest(one.prompt, 1))
            until(lambda: stream.knows("CPU", again))
            client.flush()
            daemon.stop()
            until(lambda: not stream.has["CPU"] and not stream.has["STORAGE"])
            daemon.start()
            until(lambda: stream.knows("STORAGE", again))
