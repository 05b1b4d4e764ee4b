"""A conversation through OpenAI's client: each turn finds the turns before it in the cache.

    prefixd serve --embedded --http 127.0.0.1:8000
    python examples/openai_chat.py                   # --url http://127.0.0.1:8000/v1, --key TOKEN

Needs `pip install openai`. Prints, for each turn, the prompt's tokens and how many of them were cached.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from openai import APIError, OpenAI

QUESTIONS = ("Who keeps the archive of the harbour?", "What does it say of a ship?", "And who paid for it?")


def ask(client: OpenAI, model: str, messages: list[Any]) -> tuple[str, int, int]:
    """Streams one answer; returns it, the prompt's tokens, and how many of them were cached."""
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_completion_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, prompt_tokens, cached = "", 0, 0
    for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
        if chunk.usage is not None:
            prompt_tokens = chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            cached = (details.cached_tokens or 0) if details is not None else 0
    return text, prompt_tokens, cached


def main(arguments: Sequence[str] | None = None) -> int:
    """Has the conversation; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the users' port of a daemon")
    parser.add_argument("--key", default="none", help="a token of server.tokens")
    given = parser.parse_args(arguments)
    messages: list[Any] = []
    with OpenAI(base_url=given.url, api_key=given.key) as client:
        try:
            model = next(iter(client.models.list())).id
            for question in QUESTIONS:
                messages.append({"role": "user", "content": question})
                answer, prompt_tokens, cached = ask(client, model, messages)
                messages.append({"role": "assistant", "content": answer})
                print(f"{question:40} {prompt_tokens:5} prompt tokens, {cached:5} of them cached; {answer!r}")
        except (APIError, StopIteration) as error:
            print(f"{given.url} does not answer: {error or 'it has no model'}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
