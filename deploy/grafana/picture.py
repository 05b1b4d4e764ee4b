"""Draws the dashboard from the answers of a real Prometheus that scrapes a busy daemon: docs/dashboard.png.

    python deploy/grafana/picture.py
    python deploy/grafana/picture.py --seconds 300 --file /tmp/dashboard.png

Grafana is not needed: matplotlib draws each panel of `prefixd.json` in its place, as a graph, bars or text. The daemon
and its users are those of `deploy/screenshots.py`. It needs Debian's package prometheus and playwright (`make
install-operator`).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from PIL import Image

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "deploy/grafana/prefixd.json"
RULES = ROOT / "deploy/prometheus/prefixd.rules.yaml"
_START_S = 60.0
_ROW, _WIDTH = 0.42, 0.72  # inches of a unit of the dashboard's grid
_STEPS = {"bytes": 1024.0, "Bps": 1024.0}
_NAMES = {1024.0: ("", " KiB", " MiB", " GiB", " TiB"), 1000.0: ("", " k", " M", " G", " T")}
_COLORS = ("#5794f2", "#73bf69", "#ff9830", "#f2495c", "#b877d9", "#fade2a", "#8ab8ff", "#96d98d")

Series = tuple[str, list[float], list[float]]
"""Name, times and values."""


class Prometheus:
    """The HTTP API of a server.

    Args:
        url: `http://127.0.0.1:9090`.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: str) -> Any:
        """Returns `data` of an answer. Raises urllib.error.HTTPError for a query that is no PromQL."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[Any]:
        """Returns the values of an expression now."""
        return list(self.ask("query", query=expression)["result"])


@contextmanager
def prometheus(program: str, folder: Path, target: str, token_file: Path | None = None) -> Iterator[Prometheus]:
    """Yields a server that scrapes an address every second and has the alert rules.

    Args:
        program: the path of `prometheus`.
        folder: for its data.
        target: `127.0.0.1:9470`.
        token_file: has the token that the daemon asks for.
    """
    job: dict[str, Any] = {"job_name": "prefixd", "static_configs": [{"targets": [target]}]}
    if token_file is not None:
        job["authorization"] = {"credentials_file": str(token_file)}
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [job],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # YAML has all of JSON
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
                "--enable-feature=exemplar-storage",
                "--log.format=json",
            ],
            stdout=output,
            stderr=output,
        )
    try:
        yield Prometheus(f"http://{_address(process, log)}")
    finally:
        process.terminate()
        process.wait(_START_S)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Returns the address of a server that answers queries: before it is ready it refuses them with 503."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        said = {line.get("msg"): line for line in lines}
        if "Server is ready to receive web requests." in said:
            return str(said["Listening on"]["address"])
        time.sleep(0.1)
    raise RuntimeError(f"prometheus is not ready:\n{log.read_text()}")


def fill_in(expression: str, interval: str) -> str:
    """Returns a query of the dashboard with all daemons, tenants and models."""
    expression = expression.replace("$__rate_interval", interval)
    return re.sub(r"\$(instance|tenant|model)\b", ".*", expression)


def draw(dashboard: Any, server: Prometheus, begin_s: float, end_s: float, file: Path) -> None:
    """Draws all panels of a dashboard, with what the server answers for a stretch of time."""
    panels = dashboard["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    plt.rcParams |= {"font.size": 7, "axes.titlesize": 8, "font.family": "DejaVu Sans"}
    figure = plt.figure(figsize=(24 * _WIDTH, rows * _ROW), facecolor="white")
    for panel in panels:
        at = panel["gridPos"]
        left, top = at["x"] / 24, 1 - at["y"] / rows
        if panel["type"] == "row":
            figure.text(0.004, top - 0.6 / rows, panel["title"], fontsize=10, fontweight="bold", va="center")
            continue
        box = (left + 0.036, top - (at["h"] - 0.7) / rows, at["w"] / 24 - 0.044, (at["h"] - 1.75) / rows)
        axes = figure.add_axes(box)
        axes.set_title(panel["title"], loc="left")
        series = [each for target in panel["targets"] for each in _answer(server, target, begin_s, end_s)]
        _draw_panel(axes, panel, series)
    figure.savefig(file, dpi=76)
    plt.close(figure)
    with Image.open(file) as picture:
        small = picture.convert("RGB").quantize(64)
    small.save(file, optimize=True)


def _answer(server: Prometheus, target: Any, begin_s: float, end_s: float) -> list[Series]:
    found = server.ask(
        "query_range",
        query=fill_in(target["expr"], "30s"),
        start=str(begin_s),
        end=str(end_s),
        step="5",
    )["result"]
    return [
        (
            re.sub(r"\{\{(\w+)\}\}", lambda match, each=each: each["metric"].get(match[1], ""), target["legendFormat"]),
            [float(at) - end_s for at, _ in each["values"]],
            [float(value) for _, value in each["values"]],
        )
        for each in found
    ]


def _draw_panel(axes: Axes, panel: Any, series: Sequence[Series]) -> None:
    unit = panel["fieldConfig"]["defaults"]["unit"]
    last = [(name, values[-1]) for name, _, values in series]
    if panel["type"] == "table":
        axes.text(0, 0.5, "\n".join(name for name, _ in last), va="center", fontsize=9)
        axes.set_axis_off()
        return
    if panel["type"] == "timeseries" and series:
        _draw_lines(axes, series, unit, stacked="stacking" in panel["fieldConfig"]["defaults"]["custom"])
        return
    if panel["type"] in ("bargauge", "piechart") and series:
        last.sort(key=lambda each: each[1])
        axes.barh(range(len(last)), [value for _, value in last], color=_COLORS[0])
        axes.set_yticks(range(len(last)), [""] * len(last))
        for at, (name, value) in enumerate(last):
            axes.text(0, at, f" {name}: {_with_unit(value, unit)}", va="center")
        axes.xaxis.set_major_formatter(lambda value, _: _with_unit(value, unit))
    else:
        text = "\n".join(f"{name} {_with_unit(value, unit)}".strip() for name, value in last) or "nothing"
        axes.text(0.5, 0.5, text, ha="center", va="center", fontsize=12 if len(last) < 3 else 8)
        axes.set_axis_off()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_lines(axes: Axes, series: Sequence[Series], unit: str, *, stacked: bool) -> None:
    times = sorted({at for _, each, _ in series for at in each})
    values = [dict(zip(at, each, strict=True)) for _, at, each in series]
    lines = [[each.get(at, 0.0 if stacked else float("nan")) for at in times] for each in values]
    names = [name for name, _, _ in series]
    if stacked:
        axes.stackplot(times, lines, labels=names, colors=_COLORS, alpha=0.75)
    else:
        for name, line, color in zip(names, lines, _COLORS * (1 + len(lines) // len(_COLORS)), strict=False):
            axes.plot(times, line, label=name, color=color, linewidth=1.2)
    axes.yaxis.set_major_formatter(lambda value, _: _with_unit(value, unit))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=6, framealpha=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _with_unit(value: float, unit: str) -> str:
    """Returns `62%`, `12 ms`, `3.4 MiB/s` or `1.2 k`."""
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "s":
        return f"{value * 1000:.3g} ms" if 0 < value < 1 else f"{value:,.3g} s"
    step = _STEPS.get(unit, 1000.0)
    names, power = _NAMES[step], 0
    while abs(value) >= step and power < len(names) - 1:
        value, power = value / step, power + 1
    return f"{value:.3g}{names[power]}" + {"Bps": "/s", "reqps": "/s"}.get(unit, "")


def main() -> None:
    """Draws the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=240.0, help="how long the daemon is used")
    parser.add_argument("--file", type=Path, default=ROOT / "docs/dashboard.png")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "deploy"))
    from screenshots import busy_daemon

    program = shutil.which("prometheus")
    if program is None:
        raise SystemExit("prometheus is not installed; install Debian's package prometheus")
    with tempfile.TemporaryDirectory() as made, busy_daemon(Path(made)) as daemon:
        folder = Path(made) / "prometheus"
        folder.mkdir()
        token = folder / "token"
        lines = [line.split() for line in (Path(made) / "tokens").read_text().splitlines()]
        token.write_text(next(words[2] for words in lines if words[1] == "admin"))
        with prometheus(program, folder, str(daemon.metrics).removeprefix("http://"), token) as server:
            begin_s = time.time()
            time.sleep(arguments.seconds)
            draw(json.loads(DASHBOARD.read_text()), server, begin_s, time.time(), arguments.file)


if __name__ == "__main__":
    main()
