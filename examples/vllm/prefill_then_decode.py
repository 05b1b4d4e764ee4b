"""One completion by two vLLM servers: the first computes the prompt, the second all tokens of the answer.

    python prefill_then_decode.py --prefill http://localhost:8100 --decode http://localhost:8200 "Once upon a time"

A proxy does the same for many requests. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from typing import Any


def ask(server: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """The answer of a server to a POST of `body`, or to a GET."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return dict(json.load(answer))


def complete(prefill: str, decode: str, body: dict[str, Any]) -> dict[str, Any]:
    """The completion of `body`, which is that of a POST to /v1/completions."""
    # The answer says where the prompt's KV is. NIXL keeps it there until the second server has taken it.
    first = ask(
        prefill,
        "/v1/completions",
        {
            **body,
            "max_tokens": 1,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        },
    )
    return ask(decode, "/v1/completions", {**body, "kv_transfer_params": first["kv_transfer_params"]})


def main() -> None:
    """Prints the completion of the prompt on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefill", default="http://localhost:8100")
    parser.add_argument("--decode", default="http://localhost:8200")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("prompt")
    arguments = parser.parse_args()
    model = ask(arguments.prefill, "/v1/models")["data"][0]["id"]
    body = {"model": model, "prompt": arguments.prompt, "max_tokens": arguments.max_tokens, "temperature": 0}
    print(complete(arguments.prefill, arguments.decode, body)["choices"][0]["text"])


if __name__ == "__main__":
    main()
