"""Shows a followed job: with a live line on a terminal, as plain lines otherwise.

Follows how a program redraws its last lines, such as progress bars, as a terminal would.
"""

import re
import sys
from codecs import getincrementaldecoder
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import click

from cavvy.cli.view import formatting
from cavvy.cli.view.formatting import JobStory, show_clock, wait_line
from cavvy.cli.view.job_output import EscapeFilter
from cavvy.cli.view.setup_line import SetupLine, say_left_out

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

    from cavvy.cli.view.setup_line import FailedSetup
    from cavvy.client.wire import EventView, JobDetail


_QUIET_LOOKS = 4  # looks at a queued job after which its position is said
# maximum bytes of an unfinished line that is held back; a longer line is printed at once
_LONGEST = 1 << 20
_LONGEST_TEXT = 40  # maximum width of the bar itself, in characters
_SHORTEST = 6  # minimum width in characters; a narrower bar is not drawn
_NAME = 24
_SETUP_SAID_S = 30.0  # seconds after which a pipe is told again what a setup does
_QUIET_S = 120  # seconds without output after which the line says so
_USES = {"cpu_percent": "cpu", "gpu_percent": "gpu"}
_PROGRESS = 'CAVVY_PROGRESS {"'  # the start of a line whose values the bar shows
_ENDED = {"done": "✓", "failed": "✗", "stopped": "✗"}
_SHOWN = 4096  # maximum characters of an unfinished line that are shown
_DEEPEST = 16  # maximum lines above the cursor that a program can redraw
_LONGEST_SEQUENCE = 256  # characters; escape sequences that are longer are text
_COLOR = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROL = re.compile(
    r"(\n|\r|\x08+"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"  # colors, moves of the cursor
    r"|\x1b\][^\x07\x1b\n]*(?:\x07|\x1b\\)"  # titles, links
    r"|\x1b[ -/]*[0-Z\\-~])"
)
_INCOMPLETE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b\n]*\x1b?|[ -/]*)\Z")
_INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[[0-9;:]*m)")


class FollowScreen(Protocol):
    """Displays a followed job."""

    def log(self, rank: int, data: bytes) -> None:
        """Show more of the log of one rank."""

    def event(self, event: "EventView") -> None:
        """Show one event of the job."""

    def job(self, job: "JobDetail") -> None:
        """Show the job's current state."""

    def setup(self, line: bytes, lines: int) -> None:
        """Note the last line of a setup that runs, and how many lines all setups have written that
        have ended."""

    def failed_setup(self, failed: "FailedSetup") -> None:
        """Show the last lines of a setup that failed."""


@contextmanager
def open_screen(job: "JobDetail") -> Iterator[FollowScreen]:
    """Open a live screen on a terminal, or a plain screen in a pipe or on a terminal without cursor
    control.
    """
    import os

    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        plain = _Plain(several=job_ranks(job) > 1)
        yield plain
        plain.flush()
        return
    live = _LiveView(job)
    with live.live:
        yield live
        live.flush()


def job_ranks(job: "JobDetail") -> int:
    """Return the number of nodes of a job's gang."""
    from msgspec.json import decode

    return int(decode(job.task).get("nodes", 1))


class _LineJoiner:
    """Joins chunks of the logs of several ranks into whole lines."""

    def __init__(self) -> None:
        self._rest: dict[int, bytes] = {}

    def take(self, rank: int, data: bytes) -> list[bytes]:
        """Add a chunk. Returns the lines that are complete now, without newlines."""
        *lines, rest = (self._rest.get(rank, b"") + data).split(b"\n")
        if len(rest) > _LONGEST:
            lines, rest = [*lines, rest], b""
        self._rest[rank] = rest
        return lines

    def left(self) -> list[tuple[int, bytes]]:
        """Return the unfinished last line of each rank."""
        return [(rank, rest) for rank, rest in self._rest.items() if rest]


def _with_rank(rank: int, lines: list[bytes]) -> bytes:
    return b"".join(b"[%d] %b\n" % (rank, line) for line in lines)


class _Plain:
    """Writes the log to standard output and the events to standard error. If the job has several
    ranks, each line begins with its rank.
    """

    def __init__(self, several: bool) -> None:
        self._lines = _LineJoiner() if several else None
        self._filters: dict[int, EscapeFilter] = {}  # by rank
        self._story = JobStory(several)
        self._told = ""  # the last reason of a wait, or the text of the last event
        self._seen = ""  # a reason of a wait that is told if it is still there at the next look
        self._looks = 0  # how often the job was queued without a reason
        self._setup = SetupLine()
        self._said_at = 0.0  # when the setup was said last

    def log(self, rank: int, data: bytes) -> None:
        if sys.stdout.isatty():
            data = self._filters.setdefault(rank, EscapeFilter()).take(data)
        out = sys.stdout.buffer
        out.write(data if self._lines is None else _with_rank(rank, self._lines.take(rank, data)))
        out.flush()

    def flush(self) -> None:
        for rank, line in self._lines.left() if self._lines else ():
            sys.stdout.buffer.write(_with_rank(rank, [line]))

    def event(self, event: "EventView") -> None:
        self._told, self._seen = event.text, ""
        for step in self._story.tell(event):
            click.echo(f"[cavvy {show_clock(step.at)}] {self._story.text(step)}", err=True)

    def job(self, job: "JobDetail") -> None:
        """Say why a queued job waits, when the wait begins and when its reason changes. A job far
        back in the queue has only a position, which is said once. Progress is only on the live
        screen.
        """
        self._setup.learn(job)
        if self._setup.done:
            self._tell(self._setup.take_done())
        elif self._setup.open and monotonic() - self._said_at >= _SETUP_SAID_S:
            if self._said_at:
                self._tell(self._setup.text())
            self._said_at = monotonic()
        if job.phase != "queued" or not self._told:  # the first reason is the first event's text
            return
        reason = job.reason
        if reason in ("", self._told):
            self._looks += 1
            if self._looks != _QUIET_LOOKS or not job.queue_position:
                return
            reason = f"position {job.queue_position} in the queue"
        elif reason != self._seen:
            self._seen = reason  # the event that tells it may be on its way, behind others
            return
        else:
            self._told, self._looks = reason, _QUIET_LOOKS
        self._tell(wait_line(reason))

    def setup(self, line: bytes, lines: int) -> None:
        self._setup.wrote(line, lines)

    def failed_setup(self, failed: "FailedSetup") -> None:
        if failed.more:
            self._tell(say_left_out(failed, self._setup.name))
        self.log(failed.rank, failed.data)

    def _tell(self, text: str) -> None:
        click.echo(f"[cavvy {show_clock(datetime.now(UTC))}] {text}", err=True)


def _open_console() -> "Console":
    """Open the terminal for rich. If COLUMNS or LINES is 0, the terminal's own size counts, because
    rich would print nothing."""
    import os
    import shutil

    from rich.console import Console

    size = shutil.get_terminal_size()
    return Console(
        highlight=False,
        soft_wrap=True,
        width=None if os.environ.get("COLUMNS", "1").strip("0") else size.columns,
        height=None if os.environ.get("LINES", "1").strip("0") else size.lines,
    )


class _LiveView:
    """Prints the log and the events above the live lines. These show the log's unfinished lines,
    such as progress bars, and below them the phase, the progress and the task's metrics.
    """

    def __init__(self, job: "JobDetail") -> None:
        from rich.live import Live

        self._console = _open_console()
        self._below = _Below(job)
        self.live = Live(self._below, console=self._console, refresh_per_second=8)
        self._ranks: dict[int, RedrawnLines] = {}
        self._several = job_ranks(job) > 1
        self._story = JobStory(self._several)

    def log(self, rank: int, data: bytes) -> None:
        self._below.bar.heard()
        finished = self._ranks.setdefault(rank, RedrawnLines()).take(data)
        self._below.unfinished = [
            self._texts(each, lines.unfinished()) for each, lines in sorted(self._ranks.items())
        ]
        self._print(self._texts(rank, finished))

    def flush(self) -> None:
        unfinished, self._below.unfinished = self._below.unfinished, []
        self._ranks = {}
        for texts in unfinished:
            self._print(texts)

    def _print(self, texts: "list[Text]") -> None:
        from rich.text import Text

        if texts:
            self._console.print(Text("\n").join(texts))

    def _texts(self, rank: int, lines: list[str]) -> "list[Text]":
        from rich.ansi import AnsiDecoder

        before = f"[{rank}] " if self._several else ""
        decoder = AnsiDecoder()
        told = (_plain(line) for line in lines if not line.startswith(_PROGRESS))
        return [decoder.decode_line(before + line) for line in told]

    def event(self, event: "EventView") -> None:
        from rich.text import Text

        for step in self._story.tell(event):
            self._console.print(
                Text(f"{show_clock(step.at)}  {self._story.text(step)}", style="cyan")
            )

    def job(self, job: "JobDetail") -> None:
        self._below.bar.show(job)
        if self._below.bar.setup.done:
            self._tell(self._below.bar.setup.take_done())

    def setup(self, line: bytes, lines: int) -> None:
        self._below.bar.setup.wrote(line, lines)

    def failed_setup(self, failed: "FailedSetup") -> None:
        if failed.more:
            self._tell(say_left_out(failed, self._below.bar.setup.name))
        self.log(failed.rank, failed.data)

    def _tell(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(f"{show_clock(datetime.now(UTC))}  {text}", style="cyan"))


def _plain(line: str) -> str:
    """Return a line without the escape sequences that `AnsiDecoder` passes on."""
    return EscapeFilter().take(line.encode(errors="replace"), final=True).decode()


class _Below:
    """The live lines, as an object that `rich` can render."""

    def __init__(self, job: "JobDetail") -> None:
        self.bar = ProgressBar(job)
        self.unfinished: list[list[Text]] = []  # lines of each rank

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        # Lines that do not fit in half of the terminal are left out: the lines of the last ranks,
        # and all lines of a rank except the last.
        room = max(1, console.height // 2)
        ranks = self.unfinished
        if sum(map(len, ranks)) > room:
            most = max(1, room // len(ranks))
            ranks = [texts[-most:] for texts in ranks]
        for text in [text for texts in ranks for text in texts][:room]:
            line = text.copy()
            line.no_wrap, line.overflow = True, "crop"
            line.truncate(options.max_width - 1, overflow="crop")
            yield line
        yield self.bar


class ProgressBar:
    """The live line, as an object that `rich` can render. The line fills the width of the
    terminal."""

    def __init__(self, job: "JobDetail") -> None:
        from rich.spinner import Spinner

        self._spinner = Spinner("dots")
        self._quiet_since = monotonic()
        self.setup = SetupLine()
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
        self.setup.learn(job)
        self._phase = job.phase
        self._since, self._spent = job.since, job.spent_micros
        self._use = _use_text(job)
        self._quiet_since = (
            max(self._quiet_since, monotonic()) if self._phase != "running" else (self._quiet_since)
        )

    def heard(self) -> None:
        """The task has written something."""
        self._quiet_since = monotonic()

    def _figures(self) -> str:
        """Return the texts of the line: how long and for how much money the phase lasts, and what a
        task that says nothing does."""
        if self.setup.open:
            return self.setup.figures(formatting.show_money(self._spent) if self._spent else "")
        parts = [self._text] if self._text else []
        if self._phase not in formatting.ENDED:
            lasted = max(0.0, (datetime.now(UTC) - self._since).total_seconds())
            clock = [formatting.show_seconds(int(lasted))]
            clock += [formatting.show_money(self._spent)] if self._spent else []
            quiet = monotonic() - self._quiet_since
            if self._phase == "running":
                clock += [self._use] if self._use else []
                if quiet >= _QUIET_S:
                    length = formatting.show_seconds(int(quiet) // 60 * 60)
                    clock.append(f"no output for {length}")
            tells = self._part is not None or self._phase != "running"
            parts = [*parts, *clock] if tells else [*clock, *parts]
        return "  ".join(parts)

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
            line.append(f" {'setup' if self.setup.open else self._phase}", style=color)
        text = self._figures()
        if self._part is not None and room - line.cell_len - len(text) - 4 < _SHORTEST:
            text = self._text  # the bar says more than the time
        figures = Text(f"  {text}" if text else "")
        width = min(_LONGEST_TEXT, room - line.cell_len - figures.cell_len - 2)
        if self._part is not None and width >= _SHORTEST:
            line.append("  ")
            line.append_text(_drawn(self._part, width, console, options))
        line.append_text(figures)
        line.truncate(room, overflow="ellipsis")
        yield line


def _use_text(job: "JobDetail") -> str:
    """Return the use of CPUs and GPUs on the busiest node, such as "cpu 97 %, gpu 0 %"."""
    nodes = [node.telemetry for attempt in job.attempts[-1:] for node in attempt.nodes]
    parts = []
    for name, title in _USES.items():
        if values := [each[name] for each in nodes if name in each]:
            parts.append(f"{title} {max(values):.0f} %")
    return ", ".join(parts)


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


class RedrawnLines:
    """The last lines of a program's output. A line is finished when at least as many lines are
    below it as the program has moved the cursor up so far.

    Text after a carriage return replaces the whole line, because progress bars are written so.
    """

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._incomplete = ""  # the beginning of an escape sequence
        self._lines = [""]
        self._at = 0  # the line in which the cursor is
        self._replaced = 0  # how many of the line's last characters the next text replaces
        self._colors = ""  # escape sequences before this text
        self._depth = 0  # how many lines the program has moved the cursor up so far

    def take(self, data: bytes) -> list[str]:
        """Add output. Returns the lines that are finished now. They contain no control characters
        and no escape sequences except colors.
        """
        text = self._incomplete + self._decoder.decode(data)
        rest = _INCOMPLETE.search(text, max(0, len(text) - _LONGEST_SEQUENCE))
        self._incomplete = rest[0] if rest else ""
        for index, piece in enumerate(_CONTROL.split(text[: rest.start()] if rest else text)):
            if index % 2:
                self._control(piece)
            elif piece:
                self._write(piece)
        return self._finish()

    def unfinished(self) -> list[str]:
        """Return the unfinished lines, without the empty lines at their end."""
        lines = [_visible(line[:_SHOWN]) for line in self._lines]
        while lines and not _COLOR.sub("", lines[-1]).strip():
            lines.pop()
        return lines

    def _finish(self) -> list[str]:
        count = max(0, self._at - self._depth)
        if len(self._lines[self._at]) > _LONGEST:
            count = self._at + 1
        finished = [_visible(line) for line in self._lines[:count]]
        self._lines = self._lines[count:] or [""]
        self._at = max(0, self._at - count)
        self._replaced = min(self._replaced, len(self._lines[self._at]))
        return finished

    def _write(self, text: str) -> None:
        kept = _cut(self._lines[self._at], self._replaced)
        self._lines[self._at] = kept + self._colors + text
        self._replaced, self._colors = 0, ""

    def _control(self, piece: str) -> None:
        line, end = self._lines[self._at], piece[-1]
        if piece == "\n":
            self._move(1, new=True)
        elif piece == "\r":
            self._replaced = len(line)
        elif end == "\x08":
            self._replaced = min(len(line), self._replaced + len(piece))
        elif _COLOR.fullmatch(piece):
            if self._replaced:
                self._colors += piece
            else:
                self._lines[self._at] += piece
        elif piece.startswith("\x1b[") and end in "ABEF":
            count = int(piece[2:-1]) if piece[2:-1].isdecimal() else 1
            self._move(count if end in "BE" else -count)
        elif piece == "\x1b[2K" or (piece in ("\x1b[K", "\x1b[0K") and self._replaced):
            kept = "" if piece == "\x1b[2K" else _cut(line, self._replaced)
            self._lines[self._at], self._replaced = kept, 0

    def _move(self, count: int, *, new: bool = False) -> None:
        """Move the cursor by `count` lines. If `new`, a line is added below the last one."""
        self._lines[self._at] += self._colors
        self._colors = ""
        if count < 0:
            up = min(-count, _DEEPEST)
            self._depth = max(self._depth, up)
            self._lines[:0] = [""] * (up - self._at)  # these lines were finished before
            self._at = max(0, self._at - up)
        else:
            if new and self._at == len(self._lines) - 1:
                self._lines.append("")
            self._at = min(len(self._lines) - 1, self._at + count)
        self._replaced = len(self._lines[self._at])


def _cut(line: str, count: int) -> str:
    """Return the line without its last `count` characters. If characters are kept, colors do not
    count."""
    if count >= len(line):
        return ""
    parts = re.split(f"({_COLOR.pattern})", line)
    for index in range(len(parts) - 1, -1, -2):
        cut = min(count, len(parts[index]))
        parts[index] = parts[index][: len(parts[index]) - cut]
        count -= cut
    return "".join(parts)


def _visible(line: str) -> str:
    return _INVISIBLE.sub("", line)
