"""Tells listeners which prompts are asked for, stored and answered: for estimates and for recording a trace.

Listeners are called on the event loop, in the middle of a call, and only note what they are told. What they raise is
logged: an estimate must not fail a call, nor end a worker's dispatcher.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec

from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.namespaces import Namespace

log = logging.getLogger(__name__)

Told = ParamSpec("Told")


@dataclass(slots=True)
class Lookup:
    """What was asked for of a prompt, as the hit rates count it.

    Attributes:
        tokens: that were asked for.
        blocks: the full blocks up to their end, from the prompt's first on.
        found: how many of these are cached.
        first_block: the first block that was asked for; the engine has those before it.
    """

    tokens: int
    blocks: int
    found: int
    first_block: int = 0


Asked = Callable[[Namespace, BlockChain, Lookup], None]
"""(namespace, chain, lookup): a prompt was asked for."""
Stored = Callable[[Namespace, BlockChain], None]
"""(namespace, chain): its blocks are being stored, the generated ones included."""
Answered = Callable[[Namespace, BlockChain, int, int, float], None]
"""(namespace, chain, prompt tokens, output tokens, arrival in seconds): a request of the daemon's own worker ended."""


class PromptListeners:
    """The listeners of one daemon; each prompt counts once, as in the hit rates."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.looked_up: list[Asked] = []
        """As `asked`, but only for engines' look-ups: their requests' ends are not known here."""
        self.stored: list[Stored] = []
        self.answered: list[Answered] = []
        self.token_s: float | None = None
        """Seconds that an engine takes to compute a token of a prompt, as it said last."""

    def tell_looked_up(self, namespace: Namespace, chain: BlockChain, lookup: Lookup) -> None:
        """An engine looked up a prompt."""
        _tell(self.looked_up, namespace, chain, lookup)
        self.tell_asked(namespace, chain, lookup)

    def tell_asked(self, namespace: Namespace, chain: BlockChain, lookup: Lookup) -> None:
        """A prompt was asked for, for the first time."""
        _tell(self.asked, namespace, chain, lookup)

    def tell_stored(self, namespace: Namespace, chain: BlockChain) -> None:
        """Blocks of a prompt, or of a prompt and its answer, are being stored."""
        _tell(self.stored, namespace, chain)

    def tell_answered(
        self, namespace: Namespace, chain: BlockChain, prompt_tokens: int, output_tokens: int, arrival_s: float
    ) -> None:
        """The daemon's own worker has answered a request; `chain` has both."""
        _tell(self.answered, namespace, chain, prompt_tokens, output_tokens, arrival_s)
        self.tell_stored(namespace, chain)


def _tell(listeners: Sequence[Callable[Told, None]], *what: Told.args, **how: Told.kwargs) -> None:
    for listener in listeners:
        try:
            listener(*what, **how)
        except Exception:
            log.exception("a prompt could not be noted for estimates or a trace")
