"""Text to token ids and back: bounded in time and memory, beside the event loop, and the same text as at once."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from prefixd.base.errors import ConfigError, ExhaustedError, UnavailableError
from prefixd.serving.text import tokenization
from prefixd.serving.text.tokenization import Stopped, TextCodec, TextStream, TokenIds, TooManyTokensError
from prefixd.serving.text.tokenizer_threads import TokenizerThreads
from prefixd_swap import OutOfMemoryError
from tests.waiting import until

MOST = 2048


@pytest.fixture(scope="module")
def codec(model_directory: Path) -> TextCodec:
    return TextCodec(model_directory)


@pytest.fixture
def threads() -> Iterator[TokenizerThreads]:
    made = TokenizerThreads(most_texts=4, most_characters=100_000)
    yield made
    made.close()


def encode(codec: TextCodec, text: str, most: int = MOST) -> TokenIds:
    return codec.encode(text, most, threading.Event())


def is_missing(model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        TextCodec(model)
    assert str(caught.value).startswith(f"the tokenizer in {str(model)!r} is not there: there is none of")
    assert "\n" not in str(caught.value)


def test_no_process_looks_for_a_tokenizer_where_only_a_model_is(
    model_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model_directory / name, tmp_path)
    monkeypatch.setattr(tokenization, "run_module", pytest.fail)
    is_missing(tmp_path)


@pytest.mark.slow
def test_a_tokenizer_that_is_missing_or_broken_is_one_line(model_directory: Path, tmp_path: Path) -> None:
    shutil.copy(model_directory / "config.json", tmp_path)
    (tmp_path / "README.md").touch()  # may be anything
    is_missing(tmp_path)
    for path in model_directory.glob("tokenizer*"):
        shutil.copy(path, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_attention_heads": 3}))
    with pytest.raises(ConfigError, match=r"cannot be loaded: .*attention heads \(3\)") as caught:
        TextCodec(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_tokenizer_is_loaded_without_torch_in_the_daemon(model_directory: Path) -> None:
    script = (
        "import sys; from pathlib import Path; import prefixd.server.daemon;"
        "from prefixd.serving.text.tokenization import *;"
        "TextCodec(Path(sys.argv[1])); print({'torch', 'transformers'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", script, str(model_directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n" and done.stderr == ""


def test_a_tokenizer_that_no_process_can_load_is_named(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(ConfigError, match="no process for it"):
        TextCodec(model_directory)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, stdout=b""))
    with pytest.raises(ConfigError, match="cannot be loaded: transformers ended with status 1"):
        TextCodec(model_directory)


# -- the codec --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["a", "To be, or not to be: \u00e9\u4e2d\U0001f600", "x" * 5000, "\0\n\t " * 700])
@pytest.mark.slow
def test_token_ids_are_those_of_the_models_tokenizer(codec: TextCodec, model_directory: Path, text: str) -> None:
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(model_directory)(text)["input_ids"]
    found = encode(codec, text, 1 << 20)
    assert found.dtype == np.uint32 and found.tolist() == expected
    if len(expected) <= MOST:
        assert encode(codec, text).tolist() == expected


@pytest.mark.slow
def test_a_text_of_megabytes_is_refused_after_as_many_tokens_as_count(codec: TextCodec) -> None:
    """15 MiB of text took 25 s and 3.2 GiB. Now the work is that of the limit, whatever the text."""
    small, large = "words and words " * 1000, "words and words " * (1 << 20)

    def cost(text: str) -> tuple[float, int]:
        began_s = time.thread_time()
        with pytest.raises(TooManyTokensError) as caught:
            encode(codec, text)
        return time.thread_time() - began_s, caught.value.tokens

    few_s, tokens = min(cost(small) for _ in range(3))
    many_s, same = min(cost(large) for _ in range(3))
    assert tokens == same == 2 * MOST + 1 or 2 * MOST < tokens == same <= 4 * MOST + 16
    assert many_s < 5 * few_s + 0.05, "but for a copy of the text"


@pytest.mark.slow
def test_counting_ends_when_nobody_wants_it(codec: TextCodec) -> None:
    stop = threading.Event()
    stop.set()
    for text in ("short", "long " * 10_000):
        with pytest.raises(Stopped):
            codec.encode(text, MOST, stop)


@pytest.mark.slow
def test_the_longest_token_bounds_a_text(codec: TextCodec) -> None:
    assert codec.longest_token == 1, "the small model has single bytes only"
    assert len(encode(codec, "a" * 100)) * codec.longest_token >= 100


# -- its threads ------------------------------------------------------------------------------------------------------


class Gate:
    """A codec that tokenizes when it is let, and says in which threads."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun: list[str] = []
        self.threads: set[str] = set()

    def encode(self, text: str, most: int, stop: threading.Event) -> TokenIds:
        self.begun.append(text)
        self.threads.add(threading.current_thread().name)
        while not self.open.wait(0.001):
            if stop.is_set():
                raise Stopped
        return np.array([len(text)], np.uint32)


LONG = "l" * 20_000


async def begun(gate: Gate, count: int) -> None:
    await until(lambda: len(gate.begun) >= count)


@pytest.mark.slow
async def test_a_short_text_does_not_wait_behind_a_long_one(threads: TokenizerThreads, codec: TextCodec) -> None:
    gate = Gate()
    long = asyncio.create_task(threads.encode(gate, LONG, MOST))  # type: ignore[arg-type]
    await begun(gate, 1)
    assert (await threads.encode(codec, "short", MOST)).tolist() == encode(codec, "short").tolist()
    gate.open.set()
    assert (await long).tolist() == [len(LONG)]
    assert threading.current_thread().name not in gate.threads


async def test_too_many_texts_and_too_many_characters_are_refused(threads: TokenizerThreads) -> None:
    gate = Gate()
    waiting = [asyncio.create_task(threads.encode(gate, "w", MOST)) for _ in range(4)]  # type: ignore[arg-type]
    await begun(gate, 1)
    with pytest.raises(
        ExhaustedError, match=r"4 prompts with 4 characters wait .* 4 with 100000 are the limit; .*later"
    ):
        await threads.encode(gate, "w", MOST)  # type: ignore[arg-type]
    gate.open.set()
    await asyncio.gather(*waiting)
    gate.open.clear()
    huge = asyncio.create_task(threads.encode(gate, "h" * 200_000, MOST))  # type: ignore[arg-type]
    await begun(gate, 5)  # alone it may be longer than all together
    with pytest.raises(ExhaustedError, match="1 prompts with 200000 characters"):
        await threads.encode(gate, "w", MOST)  # type: ignore[arg-type]
    gate.open.set()
    await huge
    assert (await threads.encode(gate, "w", MOST)).tolist() == [1]  # type: ignore[arg-type]


async def test_who_hangs_up_is_not_tokenized_and_gives_its_place_back(threads: TokenizerThreads) -> None:
    gate = Gate()
    tasks = [asyncio.create_task(threads.encode(gate, name, MOST)) for name in "abcd"]  # type: ignore[arg-type]
    await begun(gate, 1)
    for task in reversed(tasks):  # those that wait first: when the first one ends, its thread looks for the next
        task.cancel()
    assert all(isinstance(end, asyncio.CancelledError) for end in await asyncio.gather(*tasks, return_exceptions=True))
    again = asyncio.create_task(threads.encode(gate, "again", MOST))  # type: ignore[arg-type]
    await begun(gate, 2)
    assert gate.begun == ["a", "again"], "what waited was never looked at, what ran has stopped"
    gate.open.set()
    await again


async def test_closing_ends_what_runs_and_what_waits(threads: TokenizerThreads) -> None:
    gate = Gate()
    tasks = [asyncio.create_task(threads.encode(gate, name, MOST)) for name in ("run", "wait")]  # type: ignore[arg-type]
    await begun(gate, 1)
    threads.close()
    for end in await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60):
        assert isinstance(end, UnavailableError) and "is ending" in str(end)
    with pytest.raises(UnavailableError):
        await threads.encode(gate, "late", MOST)  # type: ignore[arg-type]


@pytest.mark.slow
async def test_a_tenant_takes_neither_all_places_nor_the_thread(codec: TextCodec) -> None:
    threads, gate = TokenizerThreads(most_texts=8, most_characters=100_000, tenants=lambda: 2), Gate()
    flood = [asyncio.create_task(threads.encode(gate, f"a{n}", MOST, "a")) for n in range(6)]  # type: ignore[arg-type]
    await begun(gate, 1)
    with pytest.raises(ExhaustedError, match=r"6 prompts with 12 characters wait .*, 6 of them the tenant's"):
        await threads.encode(gate, "a", MOST, "a")  # type: ignore[arg-type]
    late = [asyncio.create_task(threads.encode(gate, f"b{n}", MOST, "b")) for n in range(2)]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    flood[5].cancel()
    gate.open.set()
    await asyncio.gather(*flood[:5], *late)
    assert gate.begun[:4] == ["a0", "b0", "a1", "b1"], "in turn"
    assert gate.begun[4:] == ["a2", "a3", "a4"]
    threads.close()


async def test_closing_ends_those_that_wait_for_their_tenants_turn_at_once() -> None:
    class Deaf(Gate):
        def encode(self, text: str, most: int, stop: threading.Event) -> TokenIds:
            return super().encode(text, most, threading.Event())

    threads, gate = TokenizerThreads(), Deaf()
    runs, *waiting = (asyncio.create_task(threads.encode(gate, "w", MOST, name)) for name in "aabb")  # type: ignore[arg-type]
    await begun(gate, 1)
    threads.close()
    ends = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
    assert all(isinstance(end, UnavailableError) for end in ends), ends
    gate.open.set()
    await runs


@pytest.mark.slow
async def test_the_loop_runs_while_a_text_is_tokenized(threads: TokenizerThreads, codec: TextCodec) -> None:
    text, turns = "some words, " * 80_000, 0
    task = asyncio.create_task(threads.encode(codec, text, 1 << 20))
    began_s = time.thread_time()
    while not task.done():
        turns += 1
        await asyncio.sleep(0.001)
    assert turns > 3 and len(await task) == len(text)
    assert (time.thread_time() - began_s) / turns < 0.005


def test_threads_that_cannot_be_had_are_said(no_more_threads: Callable[[], AbstractContextManager[list[str]]]) -> None:
    with no_more_threads(), pytest.raises(OutOfMemoryError, match="ulimit -u"):
        TokenizerThreads()


# -- back to text -----------------------------------------------------------------------------------------------------


def byte_level() -> Tokenizer:
    """A token for each byte, and some for several of them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("\u0120", "the"),
        ("\u00e4", "\u00b8"),
        ("\u00e4\u00b8", "\u0143"),
        ("\u00f0", "\u0141"),
    ]
    for pair in merges:
        vocab["".join(pair)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """Pieces with the mark of a space, and bytes for the rest."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "a",
        "b",
        "\u2581a",
        "\u2581b",
        "ab",
        "\u00e9",
    ]
    tokenizer = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def streamed(tokenizer: Tokenizer, ids: list[int], cut: random.Random | None = None) -> str:
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    stream, text, at = TextStream(tokenizer, special), "", 0
    while at < len(ids):
        count = cut.randrange(1, 4) if cut else 1
        text += stream.feed(ids[at : at + count])
        at += count
    return text + stream.end()


@pytest.mark.parametrize("seed", range(20))
def test_a_streamed_text_is_the_text(seed: int) -> None:
    dice = random.Random(seed)
    words = [
        "the",
        " the",
        "caf\u00e9",
        "\u4e2d\u6587",
        "\U0001f600",
        "\n",
        "  ",
        "a",
        " b",
        "<|end|>",
        "z\u0301",
        "\u2581",
    ]
    text = "".join(dice.choices(words, k=60)) + "."
    tokenizer = byte_level()
    assert streamed(tokenizer, tokenizer.encode(text).ids, dice) == text.replace("<|end|>", "")


@pytest.mark.parametrize("seed", range(20))
def test_streamed_pieces_are_the_text_at_once(seed: int) -> None:
    dice, tokenizer = random.Random(seed), sentence_pieces()
    ids: list[int] = []
    for _ in range(40):
        if dice.random() < 0.4:
            ids += [1 + byte for byte in dice.choice(["\u00e9", "\u4e2d", "\U0001f600", "z"]).encode()]
        else:
            ids.append(dice.randrange(257, 264))
    ids.append(258)
    assert streamed(tokenizer, ids, dice) == tokenizer.decode(ids)


def test_half_a_character_waits_and_is_never_shown() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("\U0001f600!").ids
    stream = TextStream(tokenizer, set())
    assert [stream.feed([token]) for token in ids][-2:] == ["\U0001f600", "!"]
    assert all("\ufffd" not in stream.feed([token]) for token in ids)


@pytest.mark.parametrize("seed", range(20))
def test_the_end_has_what_still_waited(seed: int) -> None:
    """Cut anywhere, in the middle of a character too, the pieces and the end are the text of the tokens."""
    dice, tokenizer = random.Random(seed), byte_level()
    ids = tokenizer.encode("a\u4e2d\U0001f600 caf\u00e9 the").ids
    cut = ids[: dice.randrange(len(ids) + 1)]
    assert streamed(tokenizer, cut, dice) == tokenizer.decode(cut)


def test_the_end_says_nothing_twice() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer, set())
    assert stream.feed(tokenizer.encode("ok").ids) == "ok"
    assert [stream.end(), stream.end()] == ["", ""]
    first, *_ = tokenizer.encode("\U0001f600").ids
    assert [stream.feed([first]), stream.end(), stream.end()] == ["", "\ufffd", ""]


@pytest.mark.parametrize("make", [byte_level, sentence_pieces])
def test_bytes_that_are_no_text_come_out_and_cost_the_same_to_the_end(make: Callable[[], Tokenizer]) -> None:
    """What is not UTF-8 was kept and decoded anew with every token: 20,000 such tokens held the loop for minutes."""
    tokenizer = make()
    bad = next(token for token in range(tokenizer.get_vocab_size()) if tokenizer.decode([token]) == "\ufffd")
    stream = TextStream(tokenizer, set())
    shown = 0
    costs = []
    for _ in range(10):
        began_s = time.thread_time()
        shown += len(stream.feed([bad] * 1000))
        costs.append(time.thread_time() - began_s)
    assert shown >= 9_900
    assert min(costs[5:]) < 3 * min(costs[:5])


@pytest.mark.parametrize("seed", range(30))
def test_text_after_bytes_that_are_none_is_whole(seed: int) -> None:
    """Wherever a run of bad bytes is given up, the characters behind it are right."""
    dice, tokenizer = random.Random(seed), byte_level()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bad = [token for token in range(len(alphabet)) if tokenizer.decode([token]) == "\ufffd"]
    ids = [*(dice.choice(bad) for _ in range(dice.randrange(30))), *tokenizer.encode("x\u4e2d\U0001f600 end").ids]
    assert streamed(tokenizer, ids).endswith("x\u4e2d\U0001f600 end")


@pytest.mark.parametrize("bad", range(1, 12))
def test_a_character_right_behind_bad_bytes_is_whole(bad: int) -> None:
    tokenizer = byte_level()
    ff = next(t for t in range(256) if tokenizer.decode([t]) == "\ufffd" and tokenizer.id_to_token(t) == "\u00ff")
    ids = [*([ff] * bad), *tokenizer.encode("\U0001f600!").ids]
    assert streamed(tokenizer, ids).endswith("\U0001f600!")


def test_tokens_without_text_cost_nothing() -> None:
    tokenizer = byte_level()
    end = tokenizer.token_to_id("<|end|>")
    stream = TextStream(tokenizer, {end})
    assert stream.feed([end] * 100_000) == ""
    assert stream.feed(tokenizer.encode("ok").ids) == "ok"
