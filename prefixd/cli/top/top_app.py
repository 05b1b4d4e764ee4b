"""The screen of `prefixd top`, in 80 columns and 24 lines or more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from prefixd.cli.failures import CommandFailed
from prefixd.cli.output.terminal import cleaned, shown
from prefixd.cli.top import panes
from prefixd.cli.top.daemon_watch import Snapshot


class TopApp(App[None]):
    """Shows what `answers` yields: the figures, or that the daemon does not answer.

    Args:
        answers: a daemon's answers; where it does not answer, the error.
        name: what the daemon is called on the screen while it does not answer.
    """

    CSS = """
    Screen { background: $background; }
    #head, #troubles, #tiers, #work, #tabs { height: auto; width: 100%; }
    #tiers, #work { margin-top: 1; }
    #tabs { margin-top: 1; background: $surface; }
    #pane { width: auto; height: auto; }
    VerticalScroll { height: 1fr; scrollbar-size: 0 0; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        *((name[0], f"pane('{name}')", name.capitalize()) for name in panes.PANES),
        ("p", "pause", "Pause"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, answers: AsyncIterator[Snapshot | CommandFailed]) -> None:
        super().__init__(ansi_color=True)  # the terminal's own colours
        self.animation_level = "none"
        self._answers = answers
        self._rates = panes.Rates()
        self._error: CommandFailed | None = None
        self._paused = False
        self._pane = next(iter(panes.PANES))

    def compose(self) -> ComposeResult:
        """Makes the widgets, from the top down."""
        for name in ("head", "troubles", "tiers", "work", "tabs"):
            yield Static(id=name)
        with VerticalScroll():
            yield Static(id="pane")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begins to ask."""
        self.query_one(VerticalScroll).focus()
        self._render_all()
        self.run_worker(self._follow(), exit_on_error=True)

    def on_resize(self) -> None:
        """Fits the bars to the new width, once the screen has it."""
        self.call_after_refresh(self._render_all)

    def action_pane(self, name: str) -> None:
        """Shows another table."""
        self._pane = name
        self.query_one(VerticalScroll).scroll_home(animate=False)
        self._render_all()

    def action_pause(self) -> None:
        """Keeps the figures as they are, or lets them go on."""
        self._paused = not self._paused
        self._render_all()

    async def _follow(self) -> None:
        async for answer in self._answers:
            if isinstance(answer, CommandFailed):
                self._error = answer
            else:
                self._error = None
                if not self._paused:
                    requests = None if answer.requests is None else [cleaned(each) for each in answer.requests]
                    self._rates.take(Snapshot(cleaned(answer.stats), answer.at_s, requests))
            self._render_all()

    def _render_all(self) -> None:
        snapshot, error = self._rates.now, self._error
        troubles = Text()
        if error is not None:
            troubles = Text(f"no daemon: {shown(str(error))}", style="bold red")
        elif snapshot is not None:
            troubles = panes.troubles(snapshot.stats)
        self._put("troubles", troubles)
        self._put("tabs", self._tabs())
        if snapshot is None:
            self._put("head", Text("prefixd: asks the daemon" if error is None else "prefixd", style="bold"))
            return
        stats = snapshot.stats
        first = panes.head(stats)
        if error is not None:
            first = Text("prefixd: the last figures, while the daemon does not answer", style="bold yellow")
        elif self._paused:
            first.append("  paused", style="bold yellow")
        self._put("head", first)
        self._put("tiers", panes.tiers(stats, self._rates, self.size.width))
        self._put("work", panes.work(stats))
        self._put("pane", panes.PANES[self._pane](snapshot))

    def _tabs(self) -> Text:
        names = ((f" {name} ", "reverse bold" if name == self._pane else "dim") for name in panes.PANES)
        return Text.assemble(*names)

    def _put(self, id: str, content: object) -> None:
        place = self.query_one(f"#{id}", Static)
        place.update(content)  # type: ignore[arg-type]  # rich's tables, which Static takes
        if id == "troubles":
            place.display = bool(content)
