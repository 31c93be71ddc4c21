"""The live line below the log of a followed job: name, progress, metrics and time left."""

from time import monotonic
from typing import TYPE_CHECKING

from cavvy.cli.view import formatting

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

    from cavvy.client.wire import JobDetail

_LONGEST = 40  # maximum width of the bar itself, in characters
_SHORTEST = 6  # minimum width in characters; a narrower bar is not drawn
_NAME = 24
_ENDED = {"done": "✓", "failed": "✗", "stopped": "✗"}


class ProgressBar:
    """The live line, as an object that `rich` can render. The line fills the width of the
    terminal."""

    def __init__(self, job: "JobDetail") -> None:
        from rich.spinner import Spinner

        self._spinner = Spinner("dots")
        self._name = job.name if len(job.name) <= _NAME else job.name[: _NAME - 1] + "…"
        self.show(job)

    def show(self, job: "JobDetail") -> None:
        """Update the line from the job's current state."""
        progress = next((n.progress for a in job.attempts[-1:] for n in a.nodes if n.progress), {})
        total, done = progress.get("total"), progress.get("done")
        self._part: float | None = None
        if isinstance(total, int | float) and isinstance(done, int | float) and total > 0:
            self._part = min(1.0, max(0.0, done / total))
        self._text = _text(job, progress)
        self._phase = job.phase

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        room = options.max_width - 1
        color = formatting.COLORS.get(self._phase, "")
        mark = _ENDED.get(self._phase) or str(self._spinner.render(monotonic()))
        mark = "*" if options.ascii_only else mark
        line = Text.assemble(
            (mark, color), " ", (self._name, "bold"), no_wrap=True, overflow="ellipsis"
        )
        if self._phase not in ("running", "done") or self._part is None:
            line.append(f" {self._phase}", style=color)
        figures = Text(f"  {self._text}" if self._text else "")
        width = min(_LONGEST, room - line.cell_len - figures.cell_len - 2)
        if self._part is not None and width >= _SHORTEST:
            line.append("  ")
            line.append_text(_drawn(self._part, width, console, options))
        line.append_text(figures)
        line.truncate(room, overflow="ellipsis")
        yield line


def _drawn(part: float, width: int, console: "Console", options: "ConsoleOptions") -> "Text":
    from rich.text import Text

    full = round(part * width)
    done, rest = ("#", "-") if options.ascii_only else ("━", "━")
    if console.no_color and not options.ascii_only:
        rest = "─"
    return Text.assemble((done * full, "green"), (rest * (width - full), "bright_black"))


def _text(job: "JobDetail", progress: dict[str, float | str]) -> str:
    if job.phase == "queued":
        place = f"position {job.queue_position} in the queue" if job.queue_position else ""
        return "; ".join(filter(None, (place, job.reason)))
    if job.phase in formatting.ENDED:  # The summary below the line gives the reason.
        return formatting.show_progress(
            {name: value for name, value in progress.items() if name != "left_s"}
        )
    return formatting.show_progress(progress) or job.reason
