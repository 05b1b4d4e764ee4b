"""Base of all scenarios: an attack, and the judge of its success."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from benchmarks.checks.attacks.attacker import Given, Mallory
from benchmarks.checks.attacks.people import MIB
from benchmarks.checks.attacks.scene import Scene


class Scenario:
    """One attack. `attack` runs in the attacker's process, everything else in the harness.

    A judge yields one line for each success of the attack; none if the attack has failed.
    """

    name: ClassVar[str]
    settings: ClassVar[Mapping[str, object]] = {}
    """Settings of the daemon. Scenarios with the same settings share a daemon."""
    as_other_user: ClassVar[bool] = False
    """True if the attacker must be another user than the daemon's; only root can make it one."""
    most_memory: ClassVar[int] = 768 * MIB
    """Most bytes by which daemon and worker may grow: 16 messages of 16 MiB at a time, each in memory three times."""
    closed_by: ClassVar[str] = ""
    """The test that shows the breach without its fix, if the fix is older than this harness."""

    refused_with: ClassVar[str] = ""
    """A part of the daemon's message, if the defence is that the daemon refuses the whole attack. An attack that ends
    with another error has not taken place."""

    def prepare(self, scene: Scene) -> Given:
        return {}

    def daemon_settings(self, folder: Path) -> Mapping[str, object]:
        """Returns the daemon's settings; may first make files in a folder."""
        return self.settings

    async def attack(self, mallory: Mallory) -> Given | None:
        """Attacks until `mallory.going` is False; calls `mallory.in_place` once the judge can check."""
        raise NotImplementedError

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        """Judges while the attack is in place, by the facts that the attacker has reported so far."""
        return ()

    def judge_after(self, scene: Scene, found: Given) -> Iterable[str]:
        """Judges after the attack, by the facts that the attacker has reported at its end."""
        return ()
