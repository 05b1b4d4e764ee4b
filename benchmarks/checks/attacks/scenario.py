"""What a scenario is: an attack, and how it is judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from benchmarks.checks.attacks.attacker import Given, Mallory
from benchmarks.checks.attacks.people import MIB
from benchmarks.checks.attacks.scene import Scene


class Scenario:
    """One attack. `attack` runs in the attacker's process, everything else in the harness.

    A judge yields what the attack has achieved, a line each; nothing when it has failed.
    """

    name: ClassVar[str]
    settings: ClassVar[Mapping[str, object]] = {}
    """Of the daemon; scenarios with the same ones share it."""
    as_other_user: ClassVar[bool] = False
    """It needs a user of this host who is not the daemon's: root's right to become one."""
    most_memory: ClassVar[int] = 768 * MIB
    """The most by which the daemon and its worker may grow: 16 messages of 16 MiB at a time, three times each."""
    closed_by: ClassVar[str] = ""
    """The test that shows the breach without its fix, where the fix is older than this harness."""

    refused_with: ClassVar[str] = ""
    """A part of what the daemon says when it refuses the attack as a whole, where that is what closes it: an attack
    that is ended by anything else has not taken place."""

    def prepare(self, scene: Scene) -> Given:
        return {}

    def daemon_settings(self, folder: Path) -> Mapping[str, object]:
        """`settings`, or what has to be made first, in a folder."""
        return self.settings

    async def attack(self, mallory: Mallory) -> Given | None:
        """Attacks until `mallory.going` is False; says `mallory.in_place` once the judge can look."""
        raise NotImplementedError

    def judge(self, scene: Scene, facts: Given) -> Iterable[str]:
        """While the attack is in place, by what the attacker has found out until now."""
        return ()

    def judge_after(self, scene: Scene, found: Given) -> Iterable[str]:
        """When the attacker has gone, by what it has found out since."""
        return ()
