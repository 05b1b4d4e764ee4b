"""A second host that finds what the first one has computed: two daemons and a Valkey or Redis server.

    valkey-server --save "" &                        # or any Valkey or Redis
    python examples/second_host.py                   # --store valkey://127.0.0.1:6379

Starts a daemon, asks it a few questions about one long document, ends it and deletes its data, and asks a second
daemon, on an empty data directory, the same. The second one computes nothing of the document: its KV comes from the
store.
"""

from __future__ import annotations

import argparse
import secrets
import tempfile
import time
from pathlib import Path

from prefixd.cli.demo.daemon_process import DaemonFailed, DaemonProcess
from prefixd.client import Client, Finished, Sampling, Tier, Tokens

DOCUMENT = "The archive has a record of every ship that entered the harbour, what it carried and who paid. " * 10
WAIT_S = 60.0
QUESTIONS = ("Who keeps it?", "What does it say of a ship?", "Who paid?")


def ask_all(client: Client) -> tuple[list[list[int]], int]:
    """Asks every question; prints where the prompt's tokens came from, and returns how many the store had."""
    answers, from_store = [], 0
    for question in QUESTIONS:
        tokens: list[int] = []
        for event in client.generate(DOCUMENT + question, sampling=Sampling(max_tokens=8, ignore_eos=True)):
            if isinstance(event, Tokens):
                tokens += event.token_ids
            elif isinstance(event, Finished):
                from_store += event.hit_tokens[Tier.REMOTE]
                found = ", ".join(f"{count} from {tier.name}" for tier, count in event.hit_tokens.items() if count)
                print(
                    f"  {question:28} first token after {1000 * event.ttft_s:6.1f} ms; tokens found: {found or 'none'}"
                )
        answers.append(tokens)
    return answers, from_store


def main() -> None:
    """The example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="valkey://127.0.0.1:6379", help="URL of the store that both share")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prefixd-example-") as folder:
        secret = Path(folder) / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        # Loads even where this machine computes as fast: the example shows where the tokens come from.
        settings = {"worker.embedded": True, "scheduler.load": "always", "remote.url": options.store}
        settings["remote.secret_file"] = secret
        settings["remote.lookup_s"] = 10  # waits for the store's answer, however busy this machine is
        with DaemonProcess(settings) as first, Client(first.address) as client:
            print("the first host:")
            answers, _ = ask_all(client)
            wait_until_written(client)
        with DaemonProcess(settings) as second, Client(second.address) as client:
            print("the second host, which has never seen the document:")
            again, from_store = ask_all(client)
            print(f"same answers: {again == answers}; {from_store} tokens came from the store")


def wait_until_written(client: Client) -> None:
    """Until the store has what the host has computed; ends the example with the daemon's words if it cannot."""
    give_up = time.monotonic() + WAIT_S
    while client.stats().remote.written_bytes == 0 or not is_quiet(client):
        troubles = [f"{each.what}; {each.remedy}" for each in client.stats().troubles]
        if troubles or time.monotonic() > give_up:
            raise SystemExit(f"nothing reaches the store: {troubles[0] if troubles else f'not within {WAIT_S:g} s'}")
        time.sleep(0.5)


def is_quiet(client: Client) -> bool:
    """Whether nothing more is written to the store for a second."""
    before = client.stats().remote.shared_blocks
    time.sleep(1.0)
    return bool(client.stats().remote.shared_blocks == before)


if __name__ == "__main__":
    try:
        main()
    except DaemonFailed as error:
        raise SystemExit(str(error)) from None
