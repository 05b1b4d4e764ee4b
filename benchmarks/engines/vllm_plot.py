"""The figure of `benchmarks.vllm`, drawn from its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_COLOURS = {"vllm": "#bbbbbb", "prefixd": "#4477aa"}
_LABELS = {"vllm": "vLLM alone", "prefixd": "vLLM with prefixd"}


def draw(panels: Sequence[Any], result: dict[str, Any]) -> None:
    """Three panels: waiting for the first token, tokens computed, requests a second."""
    waits, tokens, rates = panels
    _draw_waits(waits, result["runs"])
    _draw_tokens(tokens, result["runs"])
    _draw_rates(rates, result)


def _draw_waits(axes: Any, runs: list[dict[str, Any]]) -> None:
    for number, run in enumerate(runs):
        places = [stage + (number - 0.5) * 0.36 for stage in range(len(run["stages"]))]
        boxes = axes.boxplot(
            [stage["ttft_s"] for stage in run["stages"]],
            positions=places,
            widths=0.3,
            whis=(5, 95),
            showfliers=False,
            patch_artist=True,
            medianprops={"color": "black"},
        )
        for box in boxes["boxes"]:
            box.set_facecolor(_COLOURS[run["name"]])
    _name_stages(axes, runs[0])
    axes.set_ylim(bottom=0)
    axes.set_ylabel("seconds")
    axes.set_title("Time to the first token\n(median, quartiles, 5% to 95%)", fontsize=10)


def _draw_tokens(axes: Any, runs: list[dict[str, Any]]) -> None:
    for number, run in enumerate(runs):
        places = [stage + (number - 0.5) * 0.4 for stage in range(len(run["stages"]))]
        computed = [stage["prompt_tokens"]["computed"] / 1e3 for stage in run["stages"]]
        axes.bar(places, computed, 0.38, color=_COLOURS[run["name"]], label=_LABELS[run["name"]])
    asked = [stage["prompt_tokens"]["total"] / 1e3 for stage in runs[0]["stages"]]
    ends = ([stage + side for stage in range(len(asked))] for side in (-0.4, 0.4))
    axes.hlines(asked, *ends, color="black", label="asked")
    _name_stages(axes, runs[0])
    axes.set_ylabel("thousand tokens")
    axes.set_ylim(top=1.12 * max(asked))
    axes.set_title("Prompt tokens computed", fontsize=10)
    axes.legend(loc="upper left", frameon=False, fontsize=9)


def _draw_rates(axes: Any, result: dict[str, Any]) -> None:
    nothing = result["nothing_to_hit"]
    chat = [run["requests_per_s"] for run in result["runs"]]
    cold = [nothing["alone_requests_per_s"], nothing["prefixd_requests_per_s"]]
    for number, run in enumerate(result["runs"]):
        places = [group + (number - 0.5) * 0.4 for group in range(2)]
        bars = axes.bar(places, [chat[number], cold[number]], 0.38, color=_COLOURS[run["name"]])
        axes.bar_label(bars, fmt="%.2f", fontsize=9)
    axes.set_xticks(range(2), ["chat", f"nothing to hit\n({nothing['share']:.1%})"])
    axes.set_ylabel("requests / s")
    axes.margins(y=0.12)
    axes.set_title("Requests a second", fontsize=10)


def _name_stages(axes: Any, run: dict[str, Any]) -> None:
    axes.set_xticks(range(len(run["stages"])), [stage["name"].replace(" ", "\n") for stage in run["stages"]])
