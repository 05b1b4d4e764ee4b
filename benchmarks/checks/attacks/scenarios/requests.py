"""Attacks with requests to the daemon's model: prompts, sampling, searches, the queue, other tenants' requests."""

from __future__ import annotations

import asyncio
import io
import random
import struct
import zlib
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping
from contextlib import aclosing, suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import grpc

from benchmarks.checks.attacks.attacker import Given, Mallory
from benchmarks.checks.attacks.scenario import Scenario
from benchmarks.checks.attacks.scene import Scene, ask
from benchmarks.engines import hybrid_models
from benchmarks.workloads.asking import generated_tokens
from prefixd.client import AsyncClient, BeamSearch, ClientError, FinishReason, Sampling, Tokens
from prefixd.serving.models.embedded_model import VOCAB_SIZE
from prefixd.v1 import inference_pb2 as pb

_EXPECTED = {"OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED", "PERMISSION_DENIED"}
_BY_GRPC = {"CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE"}
"""The caller gave up, or gRPC refuses more calls because too many wait."""


class _Flood(Scenario):
    """Sends `at_once` hostile requests at a time, as long as the attack lasts."""

    at_once: ClassVar[int]

    async def attack(self, mallory: Mallory) -> Given:
        client = await mallory.client()
        ended: Counter[str] = Counter()

        async def repeat(number: int) -> None:
            rng = random.Random(number)
            while mallory.going:
                status = await _status_of(self.send_one(client, rng))
                ended[status] += 1
                if status != "OK":
                    await asyncio.sleep(0.02)

        tasks = [asyncio.create_task(repeat(number)) for number in range(self.at_once)]
        await asyncio.sleep(0.5)
        await mallory.hold()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return {"statuses": dict(ended)}

    async def send_one(self, client: AsyncClient, rng: random.Random) -> None:
        raise NotImplementedError

    def judge_after(self, scene: Scene, found: Given) -> Iterable[str]:
        if unexpected := set(found.get("statuses", ())) - _EXPECTED - _BY_GRPC:
            yield f"the daemon answers {', '.join(sorted(unexpected))}"


class HugeText(_Flood):
    """Sends 15 MiB of text, which the daemon must refuse before it tokenizes the text."""

    name = "huge text"
    closed_by = "tests/serving/text/test_tokenization.py"
    at_once = 4
    text = "ab" * (15 << 19)

    async def send_one(self, client: AsyncClient, rng: random.Random) -> None:
        await _drain(client, self.text)


class Beams(_Flood):
    """Asks for the widest beam searches, and for the most sequences."""

    name = "beams"
    at_once = 3

    async def send_one(self, client: AsyncClient, rng: random.Random) -> None:
        prompt = [rng.randrange(256) for _ in range(64)]
        if rng.random() < 0.5:
            search = Sampling(beam_search=BeamSearch(width=16), max_tokens=64, ignore_eos=True)
            await _drain(client, prompt, search, n=16)
        else:
            drawn = Sampling(temperature=1.0, max_tokens=64, ignore_eos=True)
            await _drain(client, prompt, drawn, best_of=32, n=1)


class StopStrings(_Flood):
    """Sends 16 stop strings of 256 characters that nearly match at every position."""

    name = "stop strings"
    closed_by = "tests/serving/generation/test_stop_strings.py"
    at_once = 3

    async def send_one(self, client: AsyncClient, rng: random.Random) -> None:
        letter = chr(rng.randrange(0x20, 0x7F))
        stop = [letter * (255 - index) + chr(0x21 + index) for index in range(16)]
        prompt = (letter * 64).encode()
        await _drain(client, list(prompt), Sampling(stop=stop, max_tokens=128, ignore_eos=True))


class StopTokens(_Flood):
    """Sends four million stop tokens in a request."""

    name = "stop tokens"
    closed_by = "tests/server/services/test_bad_input.py"
    at_once = 4

    async def send_one(self, client: AsyncClient, rng: random.Random) -> None:
        connection = client.connection
        async with aclosing(connection.stream(connection.inference.Generate, _many_stops(), 30.0)) as answers:
            async for _ in answers:
                pass


@cache
def _many_stops() -> pb.GenerateRequest:
    sampling = pb.SamplingParams(stop_token_ids=[1] * 4_000_000, max_tokens=2)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=bytes(64)), sampling=sampling)


class QueueFlood(_Flood):
    """Sends more requests than the queue takes."""

    name = "queue flood"
    at_once = 512

    async def send_one(self, client: AsyncClient, rng: random.Random) -> None:
        prompt = [rng.randrange(256) for _ in range(20)]
        await _drain(client, prompt, Sampling(max_tokens=256, ignore_eos=True))


class PriorityFlood(_Flood):
    """Sends requests with the highest priority, to run before those of all other tenants."""

    name = "priority flood"
    at_once = 64

    async def send_one(self, client: AsyncClient, rng: random.Random) -> None:
        prompt = [rng.randrange(256) for _ in range(200)]
        await _drain(client, prompt, Sampling(max_tokens=128, ignore_eos=True), priority=-(1 << 31))


class SamplingExtremes(Scenario):
    """Sends the smallest and largest temperatures: the model's output must still decide the token."""

    name = "sampling extremes"
    closed_by = "tests/worker/decoding/test_token_choice.py"

    async def attack(self, mallory: Mallory) -> Given:
        """Compares answers at tiny temperatures with a greedy answer, and records answers at huge ones."""
        client = await mallory.client()
        prompt = list(b"the quick brown fox")
        greedy = await generated_tokens(client, prompt, Sampling(max_tokens=8, ignore_eos=True))
        cold = [
            await generated_tokens(client, prompt, Sampling(temperature=heat, seed=1, max_tokens=8, ignore_eos=True))
            for heat in (5e-324, 1e-300, 1e-45, 1e-6)
        ]
        hot = [
            await generated_tokens(client, prompt, Sampling(temperature=heat, seed=1, max_tokens=8, ignore_eos=True))
            for heat in (1e30, 1e39, 1e308)
        ]
        await mallory.hold(greedy=greedy, cold=cold, hot=hot)
        return {}

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        if any(tokens != facts["greedy"] for tokens in facts.get("cold", ())):
            yield "a temperature close to 0 does not give the likeliest tokens"
        if any(set(tokens) == {VOCAB_SIZE - 1} for tokens in facts.get("hot", ())):
            yield "a huge temperature always gives the vocabulary's last token"


class HeldBackText(Scenario):
    """Makes output that ends in half a character or in the beginning of a stop string: its text must come at the
    end."""

    name = "text held back"
    closed_by = "tests/serving/generation/test_stop_strings.py"

    async def attack(self, mallory: Mallory) -> None:
        """Forces half a character, and asks with a stop string that begins with the answer's last character."""
        client = await mallory.client()
        half = await _text(client, list(b"prompt"), Sampling(forced_tokens=list(b"abc\xe2\x82"), ignore_eos=True))
        whole = await _text(client, list(b"prompt"), Sampling(max_tokens=8, ignore_eos=True))
        until = Sampling(max_tokens=8, ignore_eos=True, stop=[whole[-1:] + "\n\n"])
        stopped = await _text(client, list(b"prompt"), until)
        await mallory.hold(half=half, whole=whole, stopped=stopped)

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        if "whole" in facts and not (facts["half"].startswith("abc") and len(facts["half"]) > 3):
            yield f"the text of half a character is missing: {facts['half']!r}"
        if "whole" in facts and facts["stopped"] != facts["whole"]:
            yield f"text that might have become a stop string is missing: {facts['stopped']!r} of {facts['whole']!r}"


class OthersRequests(Scenario):
    """Cancels another tenant's requests by their ids, and uses ids that the other tenant is about to use."""

    name = "others' requests"
    ids = tuple(f"alice-{number}" for number in range(8))

    async def attack(self, mallory: Mallory) -> Given:
        """Cancels without a pause, and runs requests of its own with the next ids."""
        client = await mallory.client()
        cancelled = 0
        owned = [
            asyncio.create_task(
                _status_of(_drain(client, [1], Sampling(max_tokens=4000, ignore_eos=True), request_id=name))
            )
            for name in self.ids[4:]
        ]
        await asyncio.sleep(0.3)
        mallory.in_place()
        while mallory.going:
            for name in self.ids[:4]:
                with suppress(ClientError):
                    cancelled += await client.cancel(name)
            await asyncio.sleep(0.005)
        for task in owned:
            task.cancel()
        await asyncio.gather(*owned, return_exceptions=True)
        return {"cancelled": cancelled}

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        with scene.client() as client:
            ended: Counter[str] = Counter()
            for name in self.ids:
                try:
                    _, finished = ask(client, [2, 3], request_id=name, max_tokens=24)
                    ended[finished.reason.value] += 1
                except ClientError as error:
                    ended[type(error).__name__] += 1
            del ended[FinishReason.LENGTH.value]
            if ended:
                yield f"requests of another tenant ended in another way than they should: {dict(ended)}"


class Images(_Flood):
    """Sends images that unpack to huge data, claim huge sizes, are many, or are not images."""

    name = "images"
    closed_by = "tests/serving/images/test_image_reader.py"
    at_once = 6

    def daemon_settings(self, folder: Path) -> Mapping[str, object]:
        from transformers.utils import logging

        logging.disable_progress_bar()
        model = hybrid_models.save("vision", folder / "vision")
        return {"worker.embedded": False, "worker.model": model, "worker.block_tokens": 16}

    async def send_one(self, client: AsyncClient, rng: random.Random) -> None:
        kind = rng.randrange(6)
        match kind:
            case 0:  # 4.2 billion pixels
                images = [_png(65_000, 65_000, 1)]
            case 1:  # data that unpacks to much more than the one pixel of the image
                images = [_png(1, 1, 8 << 20)]
            case 2:
                images = [rng.randbytes(7 << 20)]
            case 3:
                images = [_png(16, 16, 16)] * 500
            case 4:
                images = [_png(64, 64, 64)[:-20]]
            case _:  # the most images of the largest size
                images = [_png(4096, 4096, 4096)] * 16
        prompt = [*range(1, 20), *[hybrid_models.IMAGE_TOKEN] * min(len(images), 16)]
        await _drain(client, prompt, Sampling(max_tokens=2), images=images)


class Scans(Images):
    """Sends JPEGs of 16 million pixels with up to thousands of scans that change nothing. Each scan costs a pass over
    all pixels. Some callers leave before the answer."""

    name = "JPEG scans"
    closed_by = "tests/images/test_image_files.py"

    async def send_one(self, client: AsyncClient, rng: random.Random) -> None:
        images = [_scanned(rng.choice((50, 50, 3000)))]
        prompt = [*range(1, 20), hybrid_models.IMAGE_TOKEN]
        async with asyncio.timeout(rng.choice((0.5, 30.0))):
            await _drain(client, prompt, Sampling(max_tokens=2), images=images)


@cache
def _scanned(scans: int) -> bytes:
    """Returns a grey progressive JPEG of 4096 x 4096 with `scans` additional scans."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("L", (4096, 4096), 90).save(file, "JPEG", progressive=True)
    plain = file.getvalue()
    table = b"\xff\xc4" + bytes([0, 20, 0x10, 1, *[0] * 15, 0xE0])  # one code, for 16,384 blocks without a change
    scan = b"\xff\xda" + bytes([0, 8, 1, 1, 0, 1, 63, 0]) + bytes(32)
    return plain[:-2] + table + scan * scans + plain[-2:]


@cache
def _png(width: int, height: int, rows: int) -> bytes:
    """Returns a grey image with `width` and `height` in its header and `rows` lines of data."""
    line = bytes(1 + width)
    packer = zlib.compressobj(9)
    data = b"".join(packer.compress(line) for _ in range(rows)) + packer.flush()
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )


async def _drain(client: AsyncClient, prompt: Any, sampling: Sampling = Sampling(), **how: Any) -> None:
    async with aclosing(client.generate(prompt, sampling=sampling, timeout_s=30.0, **how)) as events:
        async for _ in events:
            pass


async def _text(client: AsyncClient, prompt: list[int], sampling: Sampling) -> str:
    text = ""
    async with aclosing(client.generate(prompt, sampling=sampling)) as events:
        async for event in events:
            text += event.text if isinstance(event, Tokens) else ""
    return text


async def _status_of(call: Awaitable[None]) -> str:
    try:
        await call
    except ClientError as error:
        cause = error.__cause__
        return cause.code().name if isinstance(cause, grpc.aio.AioRpcError) else type(error).__name__
    return "OK"
