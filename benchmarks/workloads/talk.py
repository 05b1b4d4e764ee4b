"""Holds conversations with a daemon, as their users would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from benchmarks.workloads.asking import Asked, ask, together
from benchmarks.workloads.conversations import Conversation
from benchmarks.workloads.seen_blocks import SeenBlocks
from prefixd.cli.demo.runner import Progress
from prefixd.client import AsyncClient
from prefixd.workloads.text_analysis import BLOCK_TOKENS, FIRST_TOKEN


async def talk(
    address: str, conversations: Sequence[Conversation], users: int, progress: Progress, name: str
) -> tuple[list[Asked], float]:
    """All turns, in the order of the conversations, and the seconds that they took together.

    `users` conversations are held at once; when one has ended, the next one begins. Raises ClientError.
    """
    results: list[list[Asked]] = [[] for _ in conversations]
    order = iter(range(len(conversations)))
    seen = SeenBlocks(BLOCK_TOKENS)
    async with AsyncClient(address, name="benchmark chat", memory="streamed") as client:
        progress.begin(f"{name}: loading the model", 0)
        await ask(client, [FIRST_TOKEN], answer_tokens=1)  # less than a block: nothing of it is cached
        progress.begin(f"{name}: {len(conversations)} conversations", sum(len(each.turns) for each in conversations))

        async def user(order: Iterator[int]) -> None:
            for number in order:
                await _converse(client, conversations[number], seen, results[number], progress)

        began = time.monotonic()
        await together([user(order) for _ in range(users)])
        elapsed_s = time.monotonic() - began
    return [asked for result in results for asked in result], elapsed_s


async def _converse(
    client: AsyncClient, conversation: Conversation, seen: SeenBlocks, results: list[Asked], progress: Progress
) -> None:
    said = list(conversation.system)
    for turn in conversation.turns:
        await asyncio.sleep(turn.think_s)
        said += turn.user
        possible = seen.prompt(said)
        asked = await ask(client, said, possible_tokens=possible, answer=turn.answer, answer_tokens=turn.answer_tokens)
        seen.answered(said, asked.output)
        said += asked.output
        results.append(asked)
        progress.advance()
