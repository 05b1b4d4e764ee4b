"""Plants of six kinds on a daemon with two tenants and without a disk."""

from __future__ import annotations

from contextlib import ExitStack

from benchmarks.checks.planted_causes.plants import BLOCKS, PROMPT_TOKENS, Plants, ask, running
from benchmarks.checks.tenancy.house import House, tenanted_daemon
from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import Client
from prefixd.v1 import admin_pb2

_TIER_BYTES = 16 << 20
_BLOCK_BYTES = 256 << 10
_SETTINGS: dict[str, object] = {
    "worker.embedded": True,
    "worker.threads": 1,
    "worker.max_running": 2,
    "gpu.device": "cpu",
    "gpu.bytes": _TIER_BYTES,
    "cpu.bytes": _TIER_BYTES,
    "disk.bytes": 0,
}
_FILL_TOKENS = 400
_LONG_TOKENS = 24
"""Of a request that keeps a place: many times as long as computing a plant's prompt."""


def plant_in_memory(plants: Plants, each: int) -> None:
    """Plants `each` causes of each kind."""
    with tenanted_daemon(_SETTINGS, {"a": {}, "b": {}}) as (daemon, house), ExitStack() as stack:
        operator = stack.enter_context(Client(daemon.address))
        a, b = (stack.enter_context(_client(daemon, house, name)) for name in ("a", "b"))
        ask(operator, plants.prompt())  # waits for the model
        prompts = [plants.prompt() for _ in range(each)]
        for prompt in prompts:
            plants.plant(a, operator, "never_seen", prompt)
        _plant_differences(plants, a, operator, prompts)
        for prompt in prompts:
            plants.plant(
                a,
                operator,
                "other_namespace",
                prompt,
                lambda info: list(info.missing.other_differs) == ["salt"] and info.missing.other_tenant == "a",
                salt=b"another",
            )
        for number in range(each):
            _plant_operator(plants, a, operator, b"%d" % number)
        for _ in range(each):
            with running(a, plants.prompt(), _LONG_TOKENS), running(b, plants.prompt(), _LONG_TOKENS):
                plants.plant(a, operator, "no_place", plants.prompt())
        _plant_evictions(plants, a, b, operator, each)


def _client(daemon: DaemonProcess, house: House, tenant: str) -> Client:
    assert daemon.tcp is not None, "its settings have server.tcp"
    return Client(daemon.tcp, token=house.token(tenant), name=tenant)


def _plant_differences(plants: Plants, a: Client, operator: Client, prompts: list[list[int]]) -> None:
    for prompt in prompts:
        changed, place = plants.changed(prompt)
        wanted = admin_pb2.TokenDifference(token=place, expected_id=prompt[place], actual_id=changed[place])

        def is_wanted(info: admin_pb2.RequestInfo, wanted: admin_pb2.TokenDifference = wanted) -> bool:
            found = info.missing.difference
            same = (found.token, found.expected_id, found.actual_id)
            return same == (wanted.token, wanted.expected_id, wanted.actual_id)

        plants.plant(a, operator, "differs", changed, is_wanted)


def _plant_operator(plants: Plants, a: Client, operator: Client, salt: bytes) -> None:
    """Caches a prompt in a namespace of its own, and evicts that."""
    prompt = plants.prompt()
    ask(a, prompt, salt=salt)
    newest = operator.prefixes(limit=1).prefixes[0]
    operator.evict(namespace_id=newest.namespace_id)
    plants.plant(a, operator, "evicted_by_operator", prompt, salt=salt)


def _plant_evictions(plants: Plants, a: Client, b: Client, operator: Client, each: int) -> None:
    """Caches prompts of a; b then fills both tiers, twice as much as they hold."""
    prompts = [plants.prompt() for _ in range(each)]
    for prompt in prompts:
        ask(a, prompt)
    for _ in range(2 * 2 * _TIER_BYTES // (_BLOCK_BYTES * (_FILL_TOKENS // 16))):
        ask(b, plants.prompt(_FILL_TOKENS))
    for prompt in prompts:
        plants.plant(
            a,
            operator,
            "evicted",
            prompt,
            lambda info: (
                [each.tenant for each in info.missing.evictions][:1] == ["b"] and not info.missing.found_blocks
            ),
        )


assert PROMPT_TOKENS // 16 == BLOCKS
