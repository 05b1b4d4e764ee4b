"""Text to token ids, within limits, and token ids of a growing output back to text, with the model's own tokenizer."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from prefixd.base.errors import ConfigError, InvalidArgumentError, UnsupportedError
from prefixd.process.child import run_module
from prefixd.serving.text.chat_template import Chat, ChatTemplate
from prefixd.serving.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TokenIds: TypeAlias = npt.NDArray[np.uint32]

_PIECE_CHARACTERS = 64 << 10
_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_NO_TOKENIZER = re.compile(r".*config\.json|.*\.safetensors|.*\.safetensors\.index\.json")
"""Names of files without a tokenizer. `tokenizer_config.json` matches, too, but `_FILES` are looked for first."""
_SAVE = "save it there with save_pretrained"
_SLACK = 2  # times the limit, because a text that is cut into pieces has a few more tokens than the whole
_LONGEST_CHARACTER = 4  # bytes in UTF-8, and a token has at least one
_PENDING = 2 * _LONGEST_CHARACTER
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TooManyTokensError(Exception):
    """A text has too many tokens; the rest of it was not counted.

    Args:
        tokens: number counted so far.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__(f"more than {tokens} tokens")
        self.tokens = tokens


class Stopped(Exception):
    """The token ids are not wanted any more."""


class TextCodec:
    """A model directory's tokenizer. Several threads may use it at once.

    Raises:
        ConfigError: the directory has none, or not a fast one.
    """

    def __init__(self, model: Path) -> None:
        # A batch of one text does not need the library's own threads, and starting them may fail.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        backend, splits_special, chat = _load(model)
        # Set once: calling the Python tokenizer sets them at each call, which fails while another thread encodes.
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = splits_special
        self._backend = backend
        self._special = {token for token, added in backend.get_added_tokens_decoder().items() if added.special}
        self.longest_token = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        """Characters of the longest token: a text of more than n times as many characters has more than n tokens."""
        self.chat_template = None if chat["source"] is None else ChatTemplate(**chat)
        """None: the model has none."""
        self.token_bytes = TokenBytes(backend, backend.get_added_tokens_decoder().keys())

    def encode(self, text: str, most: int, stop: threading.Event) -> TokenIds:
        """Token ids of a prompt, with the special tokens that the model's tokenizer adds.

        Other threads run meanwhile: the tokenizer releases the GIL. Time and memory are bounded by `most`, not by the
        text: a long text is first counted in pieces, until there are too many tokens.

        Args:
            text: the prompt.
            most: tokens that the caller can use. A few more may be returned; many more are not computed.
            stop: set by another thread when the result is not wanted any more.

        Raises:
            TooManyTokensError: the text has more than about twice `most` tokens.
            Stopped: `stop` was set.
        """
        return self._encode(text, most, stop, add_special=True)

    def encode_chat(self, chat: Chat, most: int, stop: threading.Event) -> TokenIds:
        """Token ids of a chat, whose special tokens the model's template writes. Raises as `encode`, and
        InvalidArgumentError if the model has no template, or the template refuses the chat."""
        if self.chat_template is None:
            raise InvalidArgumentError(
                "the model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); use "
                "/v1/completions, or save the template beside the model and restart the daemon"
            )
        return self._encode(self.chat_template.render(chat), most, stop, add_special=False)

    def _encode(self, text: str, most: int, stop: threading.Event, *, add_special: bool) -> TokenIds:
        enough = _SLACK * most  # bytes have at most as many tokens
        if len(text) > enough or len(text.encode(errors="surrogatepass")) > enough:
            self._count(text, enough, stop)
        if stop.is_set():
            raise Stopped
        return np.array(self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids, np.uint32)

    def texts(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        """The text of each sequence of ids, with special tokens: for people, since characters may be cut in two."""
        return list(self._backend.decode_batch(list(map(list, sequences)), skip_special_tokens=False))

    def token_text(self, token: int) -> str:
        """The text of one token; that of a part of a character has a replacement character."""
        return str(self._backend.decode([token], skip_special_tokens=False))

    def stream(self) -> TextStream:
        """A decoder for one request's output."""
        return TextStream(self._backend, self._special)

    def _count(self, text: str, enough: int, stop: threading.Event) -> None:
        piece = min(_PIECE_CHARACTERS, max(enough, 16 * self.longest_token))
        tokens = 0
        for start in range(0, len(text), piece):
            if stop.is_set():
                raise Stopped
            batch = self._backend.encode_batch_fast([text[start : start + piece]], add_special_tokens=False)
            tokens += len(batch[0])
            if tokens > enough:
                raise TooManyTokensError(tokens)


class TextStream:
    """Decodes one output as its tokens come.

    The text of a token depends on those before it: the first one of a text loses its space, bytes join into characters.
    So each time the last tokens that became text are decoded twice: alone, and with those that came since.

    ```
        ids:   ... [context][pending] token
        text:      |<-out->|<- new ->|       new = decode(context + pending) without decode(context)
    ```

    A text that ends in a replacement character may be half a character, and waits. Bytes that are no UTF-8 at all would
    wait for ever, and cost more with each token: of more than `_PENDING` tokens all but the last few become text
    as they are.

    Args:
        tokenizer: the model's.
        special: ids of tokens that have no text, such as the end of a turn.
    """

    def __init__(self, tokenizer: Tokenizer, special: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._context: list[int] = []
        self._pending: list[int] = []
        self._out = ""  # the text of the context alone

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that became complete with these tokens."""
        return "".join(map(self._step, token_ids))

    def end(self) -> str:
        """The text of the tokens that still waited for others: none will come, so half a character is shown as such."""
        return self._flush(len(self._pending), self._decode(self._context + self._pending))

    def _step(self, token: int) -> str:
        if token in self._special:
            return ""
        self._pending.append(token)
        text = self._decode(self._context + self._pending)
        if len(text) > len(self._out) and not text.endswith(_UNFINISHED):
            return self._flush(len(self._pending), text)
        if len(self._pending) < _PENDING:
            return ""
        ready = len(self._pending) - _LONGEST_CHARACTER
        return self._flush(ready, self._decode(self._context + self._pending[:ready]))

    def _flush(self, count: int, text: str) -> str:
        """Makes the first `count` pending tokens the context; `text` is that of the old context and of them."""
        new = text[len(self._out) :]
        self._context, self._pending = self._pending[:count], self._pending[count:]
        self._out = self._decode(self._context)
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True) if token_ids else ""


def _load(model: Path) -> tuple[Tokenizer, bool, dict[str, Any]]:
    """The model's tokenizer, whether it splits special tokens that are in a text, and its chat template with what that
    needs."""
    named = any((model / name).is_file() for name in _FILES)
    missing = f"the tokenizer in {str(model)!r} is not there: there is none of {', '.join(_FILES)}; {_SAVE}"
    if not named and _is_model_alone(model):
        raise ConfigError(missing)  # without transformers, which takes more than a second of CPU time
    try:
        loaded = run_module("prefixd.serving.text.load_tokenizer", os.fspath(model))
    except OSError as error:
        raise ConfigError(
            f"the tokenizer in {str(model)!r} cannot be loaded: no process for it ({error.strerror}); "
            "give the daemon more processes and descriptors, and restart it"
        ) from error
    answer: dict[str, Any]
    if loaded.returncode:
        answer = {"error": f"transformers ended with status {loaded.returncode}, see the lines above"}
    else:
        answer = json.loads(loaded.stdout)
    if "error" in answer:
        why = f"cannot be loaded: {answer['error'][:300]}"
        raise ConfigError(f"the tokenizer in {str(model)!r} {why}; {_SAVE}" if named else missing)
    if answer["tokenizer"] is None:
        raise ConfigError(f"the tokenizer in {str(model)!r} has no fast form; save tokenizer.json beside the model")
    from tokenizers import Tokenizer  # a cache without a model has none

    return Tokenizer.from_str(answer["tokenizer"]), answer["splits_special"], answer["chat"]


def _is_model_alone(model: Path) -> bool:
    """Whether no file of a directory can be a tokenizer's."""
    try:
        return all(map(_NO_TOKENIZER.fullmatch, os.listdir(model)))
    except OSError:
        return False


def need_codec(codec: TextCodec | None) -> TextCodec:
    """The codec; UnsupportedError when the model came without one."""
    if codec is None:
        raise UnsupportedError("the model has no tokenizer; send token_ids instead of text")
    return codec
