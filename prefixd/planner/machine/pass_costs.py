"""Costs of the model's passes: published peaks times the share that is reached, or what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prefixd.planner.machine.hardware import Hardware
from prefixd.planner.planned_models import PlannedModel


class ComputeCosts(Protocol):
    """Costs of a pass of the model."""

    def pass_s(self, parts: Sequence[tuple[int, int]], begun: int = 0, /) -> float:
        """Seconds of one pass.

        Args:
            parts: (computed tokens, tokens before them) of each request in the pass.
            begun: how many of these requests are in a pass for the first time.
        """

    def assumptions(self) -> list[str]:
        """The assumptions, a line each."""


class PeakCosts:
    """Costs by the roofline model: a pass takes as long as its operations or its bytes, whichever is longer.

    Operations: 2 for each weight and token, and those of attention. Bytes: all weights once, and the keys and values of
    each request once.

    Args:
        hardware: the machine.
        model: the model.
    """

    def __init__(self, hardware: Hardware, model: PlannedModel) -> None:
        self._pass_s = hardware.pass_s
        self._flops_per_s = hardware.flops_per_s * hardware.flops_reached
        self._bytes_per_s = hardware.memory_bytes_per_s * hardware.memory_reached
        self._token_flops = 2.0 * model.active_parameters
        self._attention = model.attention
        self._weight_bytes = model.weight_bytes
        self._hardware, self._model = hardware, model

    def pass_s(self, parts: Sequence[tuple[int, int]], begun: int = 0, /) -> float:
        """As in `ComputeCosts`; the constant part of a pass covers the beginning of requests."""
        del begun
        flops, moved = self._token_flops * sum(count for count, _ in parts), self._weight_bytes
        for window, token_flops, token_bytes in self._attention:
            for count, before in parts:
                seen = before + 0.5 * count
                reach = float(before + count)
                if window is not None:
                    seen, reach = min(seen, window), min(reach, float(window + count))
                flops += token_flops * count * seen
                moved += token_bytes * reach
        return self._pass_s + max(flops / self._flops_per_s, moved / self._bytes_per_s)

    def assumptions(self) -> list[str]:
        """The assumptions, a line each."""
        model, lines = self._model, self._hardware.assumptions()
        lines.insert(
            0,
            f"{model.name}: {model.parameters / 1e9:g} billion parameters, {model.token_bytes / 1024:g} KiB of keys "
            f"and values a token ({model.source})",
        )
        if model.weight_bytes > self._hardware.memory_bytes:
            lines.append(
                f"the weights, {model.weight_bytes / 1e9:.0f} GB, are more than the {self._hardware.name}'s "
                f"{self._hardware.memory_bytes / 1e9:.0f} GB: the plan is of a machine that does not exist"
            )
        return lines


class MeasuredCosts:
    """Costs that are linear in the measured figures. Arguments as in `Calibration`."""

    def __init__(
        self, pass_s: float, token_s: float, decoded_s: float, attended_s: float, begun_s: float, *, where: str
    ) -> None:
        self._pass_s = pass_s
        self._token_s = token_s
        self._decoded_s = decoded_s
        self._attended_s = attended_s
        self._begun_s = begun_s
        self._where = where

    def pass_s(self, parts: Sequence[tuple[int, int]], begun: int = 0, /) -> float:
        """Seconds of one pass; arguments as in `ComputeCosts`."""
        total = self._pass_s + begun * self._begun_s
        for count, before in parts:
            total += count * (self._token_s if count > 1 else self._decoded_s)
            total += self._attended_s * count * (before + 0.5 * count)
        return total

    def assumptions(self) -> list[str]:
        """The assumptions, a line each."""
        return [
            f"measured, {self._where}: {_figure(1e3 * self._pass_s)} ms a pass, {_figure(1e6 * self._token_s)} us a "
            f"token of a prompt, {_figure(1e6 * self._decoded_s)} us a token decoded, "
            f"{_figure(1e9 * self._attended_s)} ns for each token attended to, "
            f"{_figure(1e3 * self._begun_s)} ms to begin a request"
        ]


def _figure(value: float) -> str:
    """Three digits, never as a power of ten: 1203.2 is "1,203"."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
