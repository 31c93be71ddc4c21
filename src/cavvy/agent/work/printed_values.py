"""Reads the values that training programs print, such as `step 12 loss=0.71 acc=0.83`, so that they
become curves without a line changed.

A line counts if it names something that people plot (`loss`, `acc`, `lr`, …). What else stands in
such a line with a name, such as `mom=0.9`, counts once it has changed. So the lines of a program's
configuration, of web servers and of packages that are installed give nothing.

The step of a value is what the line says: `step`, `iter`, `[12]`, the place in an epoch (`Epoch 2
… 100/600`), else the epoch. Without any, values are counted.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from math import inf, isfinite
from typing import NamedTuple

from .loop_lines import LoopLine, make_pattern
from .plotted_words import ENDS, MARK, PLOTTED, WEAK, may_count, read_report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LONGEST_LINE = 4096  # bytes of a line that are looked at
LONGEST_NAME = 64
MOST_SHAPES = 256  # kinds of lines of which the last values are remembered
MOST_LOOP_LINES = 3  # kinds of lines that are tried first
_LONGEST_KEY = 4  # words of a name
_LONGEST_LEFT = 200  # characters before a number in which its name is looked for

# The counters of steps, those that count more finely first.
_STEPS = (
    *("global_step", "step", "total_timesteps", "timesteps", "timestep", "num_updates", "update"),
    *("iteration", "iterations", "iter", "iters", "itr", "it", "batch", "batches", "mini_batch"),
    *("minibatch", "#", "episode", "round", "generation", "up"),
)
_EPOCHS = ("epoch", "ep", "e")
_COUNTERS = frozenset((*_STEPS, *_EPOCHS))
# which part of the data a line is about, at its start or in a name
_PHASES = {
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("eval", "evaluation"), "eval"),
    **dict.fromkeys(("train", "training"), "train"),
}
_NAMED = frozenset((*_PHASES, "evaluate", "trn", "tst"))

_COLOURS = re.compile(r"\x1b\[[0-9;:?]*[A-Za-z]")
# Numbers that no word, version, time or date contains: `1,234` is one thousand, `5e-05`, `.5`.
_NUMBER = re.compile(
    r"(?<![\w.@])(?<!\d[-/,:])[-+]?(?:(?:\d{1,3}(?:,\d{3}){1,5}(?![\d,])|\d{1,40})(?:\.\d{1,40})?"
    r"|\.\d{1,40})(?:[eE][-+]?\d{1,3})?"
    # what is no number, after a name and `=` or `:`
    r"|(?:^|(?<=[=:\s'\"(\[]))[-+]?(?i:nan|inf|infinity)(?![\w.:=/-])"
)
_SPLIT = re.compile(f"({_NUMBER.pattern})")
_OF = re.compile(r"\s*/\s*(\d{1,15})")
# what may not follow a number: a unit, another part of a version, time or date
_PART = re.compile(r"[A-Za-z_µ@]|[-:.,/]\d|/\w|\s?(?:[kKMGT]i?B|ms|secs?|s)\b")
_BOUNDS = re.compile(r"[,;|\t{}\[\]()>]|\s{2,}|\s-\s|[=:]\s|[=:]$|:(?=[A-Za-z_])")
_WORD = re.compile(r"[A-Za-z_#][\w@/.+'%-]*\Z")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|#")
_PARTS_OF = re.compile(r"[-_/]")
_BARE = re.compile(r"[a-z]+(?=[\d@])")
_PHASE = re.compile(
    r"\W*(?:(?:epoch|step|iter[^\W\d]*)\W*\d+\W+)?(?:on (?:the )?)?"
    r"(train(?:ing)?|val(?:id(?:ation)?)?|dev|test(?:ing)?|eval(?:uation)?)\b[^=]*?[:\]|]",
    re.IGNORECASE,
)
# a rank, and a date and time, before the line itself
_STAMP = re.compile(
    r"\s*(?:\[?(?:rank ?|default)\d+\]?: ?)?"
    r"(?:[IWE]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+\] )?"  # of Abseil
    r"(?:[\[(]?(?:\d{4}[-/])?\d\d[-/]\d\d[T ]\d\d:\d\d(?::\d\d)?\S*\s+)?"
)
# What trackers print at the end repeats values that they were told.
_REPEATED = re.compile(r"(?:wandb|COMET [A-Z]+): ")
_EPOCH_OF = re.compile(r"\bepoch\s*\((\w+)\)", re.IGNORECASE)  # of MMEngine: `Epoch(train)`
_BOTH = re.compile(r"\[\s*(\d+)/\d+\]\s*\[\s*(\d+)/(\d+)\]")  # an epoch and a place in it
_NUMBERED_EPOCH = re.compile(r"\W*train\w*: *(\d{1,9}) \[", re.IGNORECASE)  # of timm
_BAR = re.compile(r"\d{1,3}%\|")
_WHOLE_BAR = re.compile(r"(\d{1,3}%\|)[^|]*(?=\|)")  # whose signs may be `#` and digits
# XGBoost, LightGBM; CatBoost; Keras-GAN
_INDEX = re.compile(r"\[(\d{1,15})\][\s:]|(\d{1,15})(?::\s|\s+\[(?=[A-Za-z]))")
# the frames of tables of rich, Lightning and others
_FRAMES = {
    **dict.fromkeys(map(ord, "│┃║"), "|"),
    **dict.fromkeys(map(ord, "┏┳┓┡╇┩├┼┤└┴┘┌┬┐┗┻┛┣╋┫╭╮╰╯╔╗╚╝╠╣╬╦╩╒╤╕╞╪╡╘╧╛"), "+"),
    **dict.fromkeys(map(ord, "─━═"), "-"),
}
_FRAMED = re.compile("[│┃║┏┡├└┌┗┣╭╰╔╚╠╒╞╘]")
# with single blanks: in runs of them, the parts of this pattern would take turns
_CELL = re.compile(r"\| ?([A-Za-z_][\w/ .-]*?) ?\| ?([-+]?[\d.]+(?:[eE][-+]?\d+)?)? ?\|\Z")
_RULE = re.compile(r"[-+=─━| ]{4,}\Z")
_FRACTION = re.compile(r"(?<![\w./:-])(\d{1,15})\s*/\s*(\d{1,15})(?![\w./:-]*[\w/-])")
_SHARE = re.compile(r"%\s?\($")  # before a fraction that tells how many a share is of
_COUNT = re.compile(
    r"\s*\)\s*[:=]"
)  # after a number that is part of a name: `Avg Reward (100): 3.2`
_COUNTED = re.compile(r"\s*\(\d{1,15}\s*\)$")
# a name and its number, with nothing else between two bounds
_ALONE = re.compile(r"[|,;\t] *[A-Za-z][\w/]*(?: [A-Za-z][\w/]*){0,2} +$")
_ALONE_END = re.compile(r"%?\s*(?:$|[|,;\t])")
# beside a step and an epoch, other numbers of a line are values, but not how long it took
_NO_VALUES = frozenset(
    ("time", "data", "eta", "mem", "memory", "elapsed", "remaining", "size", "seed", "rank", "gpu")
)


class PrintedValues:
    """Finds the values that a program prints. `feed` takes its output as it comes."""

    def __init__(self) -> None:
        self._rest = b""
        self.budget = 1000  # lines that are still read; the caller sets it from time to time
        self._epoch = 0.0  # which the last line that names one named
        self._steps = _StepCounter()
        # for each kind of line, the last values of names that are no well-known ones
        self._before: dict[tuple[str, ...], dict[str, float]] = {}
        self._shapes: dict[tuple[str | bool, ...], _LineShape] = {}
        self._repeated: set[tuple[str | bool, ...]] = set()  # shapes that were seen twice
        self._loop_lines: list[LoopLine] = []
        self._columns: Sequence[str] = ()  # of the table whose head was printed last
        self._cells: dict[str, float] | None = None  # of a table of names and values
        self._section = ""

    def feed(self, data: bytes) -> Iterator[tuple[float | None, dict[str, float]]]:
        """Yield the step and the values of each line of the output that has some. The step is None
        if the program names none."""
        data = self._rest + data
        if self._loop_lines and self.budget > 0 and data.endswith(b"\n"):
            found = self._read_loop_line(data[:-1])
            if found is not None:
                self._rest = b""
                self.budget -= 1
                if found[1]:
                    yield found
                return
        low = data.lower()
        if not self._columns and self._cells is None and not may_count(low) and b"|" not in low:
            self._rest = data[max(low.rfind(b"\n"), low.rfind(b"\r")) + 1 :][:LONGEST_LINE]
            return
        *lines, rest = data.replace(b"\r", b"\n").split(b"\n")
        self._rest = rest[:LONGEST_LINE]
        # a single line has what all of the data has
        is_known = len(lines) == 1 and not rest and may_count(low)
        for line in lines:
            yield from self._read(line[:LONGEST_LINE], is_known=is_known)

    def skip(self) -> None:
        """Leave out output: the line that it began, and the next one, which it ends."""
        self._rest = b"\0" * LONGEST_LINE

    def end(self) -> Iterator[tuple[float | None, dict[str, float]]]:
        """Yield what the last line has, which no end of line follows."""
        rest, self._rest = self._rest, b""
        yield from self._read(rest)

    def _read(
        self, raw: bytes, *, is_known: bool = False
    ) -> Iterator[tuple[float | None, dict[str, float]]]:
        if self.budget <= 0:
            return
        self.budget -= 1
        again = self._read_loop_line(raw)
        if again is None:
            yield from self._read_line(raw, is_known=is_known)
        elif again[1]:
            yield again

    def _read_line(
        self, raw: bytes, *, is_known: bool
    ) -> Iterator[tuple[float | None, dict[str, float]]]:
        line = raw.decode("utf-8", "replace")
        if line.startswith(MARK):
            yield from _read_json(line[len(MARK) - 1 :])
            return
        if "\x1b" in line:
            line = _COLOURS.sub("", line)
        if not line.isascii() and _FRAMED.search(line):
            line = line.translate(_FRAMES)
        stamp = _STAMP.match(line)
        if _REPEATED.match(line, stamp.end() if stamp else 0):
            return
        found: tuple[float | None, dict[str, float]] | None
        if line.lstrip().startswith("|") or (self._cells is not None and _RULE.match(line.strip())):
            found = self._read_cell(line.strip())
            if found is not None or self._cells is not None:
                if found is not None and found[1]:
                    yield found
                return
        if not is_known and not may_count(raw.lower()):
            found = self._read_row(line)
        else:
            found = self._read_pairs(line)
            if found is None and not self._read_head(line):
                found = self._read_row(line)
        if found is not None and found[1]:
            yield found

    # Lines of names and values

    def _read_loop_line(self, raw: bytes) -> tuple[float | None, dict[str, float]] | None:
        for each in self._loop_lines:
            found = each.read(raw)
            if found is not None:
                counters, values = found
                return self._step("", counters, {}), self._choose(values, each.plotted)
        return None

    def _note_loop_line(
        self, line: str, text: str, parts: Sequence[str], shape: _LineShape
    ) -> None:
        """Remember a line that came before, if its numbers alone tell its step and its values."""
        counters: dict[str, int] = {}
        values: dict[str, int] = {}
        for each in shape.pairs:
            if each.total or each.total_at:
                return
            if each.counter and (each.is_epoch or parts[2 * each.at + 1].isdigit()):
                counters.setdefault(each.counter, each.at)
            elif each.name and (each.is_sure or each.is_plotted):
                values.setdefault(each.name, each.at)
        if (
            counters.keys().isdisjoint(_STEPS)
            or not any(each.is_strong and each.name in values for each in shape.pairs)
            or line.lstrip().startswith("|")
            or _NUMBERED_EPOCH.match(text)
            or not line.endswith(text)
        ):
            return
        pattern = make_pattern(parts, _STAMP.pattern if line != text else "")
        if pattern is not None:
            made = LoopLine(pattern, counters, values, shape.plotted)
            self._loop_lines = [made, *self._loop_lines[: MOST_LOOP_LINES - 1]]

    def _read_pairs(self, line: str) -> tuple[float | None, dict[str, float]] | None:
        start = _STAMP.match(line)
        text = _tidy(line[start.end() :] if start else line)
        counters: dict[str, float] = {}
        totals: dict[str, float] = {}
        values: dict[str, float] = {}
        strong = weak = False
        parts = _SPLIT.split(text)
        numbers = parts[1::2]
        key = (*parts[::2], *map(str.isdigit, numbers))
        is_second = key in self._shapes and key not in self._repeated
        shape = self._find_shape(text, key)
        if is_second:
            self._repeated.add(key)
            self._note_loop_line(line, text, parts, shape)
        for pair in shape.pairs:
            value = _to_float(numbers[pair.at])
            if value is None:
                continue
            total = (_to_float(numbers[pair.total_at]) or 0.0) if pair.total_at else pair.total
            if pair.counter and isfinite(value) and (pair.is_epoch or value.is_integer()):
                counters.setdefault(pair.counter, value)
                if total:
                    totals.setdefault(pair.counter, total)
                continue
            if total:
                if not pair.is_plotted or total < value:
                    continue
                value /= total
            if not pair.is_sure and (not pair.is_plotted or not isfinite(value)):
                continue
            if pair.name and pair.name not in values:
                values[pair.name] = value
                strong = strong or pair.is_strong
                weak = weak or pair.is_plotted
        step = self._step(text, counters, totals, shape.phase)
        if not strong and not (weak and (counters or _INDEX.match(text))):
            if not (counters.keys() & _EPOCHS and counters.keys() & _STEPS):
                return None
            values = {name: each for name, each in values.items() if name not in _NO_VALUES}
        return step, self._choose(values, shape.plotted)

    def _find_shape(self, text: str, key: tuple[str | bool, ...]) -> _LineShape:
        """Return what the names in a line are. A loop prints lines that differ in their numbers
        only, so what stands between these, and which are whole, tells it."""
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes.clear()
                self._repeated.clear()
            shape = self._shapes[key] = _shape_of(text)
        return shape

    def _choose(self, values: dict[str, float], known: frozenset[str]) -> dict[str, float]:
        """Return the values of well-known names, and of others that have changed."""
        if values.keys() <= known:
            return values
        shape = tuple(values)
        before = self._before.get(shape)
        if before is None:
            if len(self._before) < MOST_SHAPES:
                self._before[shape] = dict(values)
            return {name: value for name, value in values.items() if name in known}
        found = {}
        for name, value in values.items():
            if name in known or name not in before:
                found[name] = value
            elif value != before[name]:
                del before[name]  # it is a curve from now on
                found[name] = value
        return found

    def _step(
        self, text: str, counters: dict[str, float], totals: dict[str, float], phase: str = ""
    ) -> float | None:
        epoch = next((counters[name] for name in _EPOCHS if name in counters), None)
        numbered = _NUMBERED_EPOCH.match(text)
        if epoch is None and numbered is not None:
            epoch = float(numbered[1])
        if epoch is not None:
            self._epoch = epoch
        fine = next((name for name in _STEPS if name in counters), "")
        if fine:
            whole = totals.get(fine, 0)
            if epoch is not None and whole:
                return self._steps.place(epoch, counters[fine], whole)
            return self._steps.count(counters[fine], epoch)
        both = _BOTH.search(text)
        if both:
            return self._steps.place(*(float(each) for each in both.groups()))
        index = _INDEX.match(text)
        if index:
            return self._steps.note(float(index[1] or index[2]))
        at = next(
            (
                (float(each[1]), float(each[2]))
                for each in _FRACTION.finditer(text)
                if not _ends_with_name(text[max(0, each.start() - _LONGEST_LEFT) : each.start()])
            ),
            None,
        )
        if at is not None and 0 <= at[0] <= at[1] and not (phase and epoch is None):
            return self._steps.place(self._epoch if epoch is None else epoch, *at)
        return self._steps.last if epoch is None else self._steps.note(epoch)

    # Tables

    def _read_head(self, line: str) -> bool:
        """Remember the columns of a line that is the head of a table; return whether it is one."""
        line = _BAR.split(line)[0]
        cells = [each for each in re.split(r"\s{2,}|\t|\s*\|\s*", line.strip()) if each]
        if len(cells) < 2:
            cells = line.replace(",", " ").split()
        names = [each.split() for each in cells]
        words = all(each[0].isalpha() or each == "#" for each in cells)
        counted = bool(names) and "_".join(names[0]).lower() in _COUNTERS
        if (
            len(cells) < (2 if counted else 3)
            or not words
            or not any(_is_plotted(*each) for each in names)
        ):
            return False
        self._columns = ["_".join(each).lower().strip("():") for each in names]
        return True

    def _read_row(self, line: str) -> tuple[float | None, dict[str, float]] | None:
        columns = self._columns
        if not columns:
            return None
        cells = line.replace("|", " ").split()
        if len(cells) == 1:
            cells = line.split(",")
        if len(cells) < len(columns):
            if cells and not _RULE.match(line.strip()) and not line[:1].isspace():
                self._columns = ()
            return None
        counters: dict[str, float] = {}
        values: dict[str, float] = {}
        for name, cell in zip(columns, cells):  # noqa: B905  # Python 3.8
            number = cell.rstrip(":%").split("/")[0]
            if _NUMBER.fullmatch(number):
                value = float(number.replace(",", ""))
                if name not in _COUNTERS:
                    values[name[:LONGEST_NAME]] = value
                elif isfinite(value):
                    counters[name] = value
        known = frozenset(name for name in values if _is_plotted(*name.split("_")))
        return (self._step("", counters, {}), self._choose(values, known)) if known else None

    def _read_cell(self, line: str) -> tuple[float | None, dict[str, float]] | None:
        """Read a line of a table of names and values between two rules, as Stable-Baselines3 prints
        it: the values count when the table ends."""
        if _RULE.match(line):
            cells, self._cells, self._section = self._cells, None, ""
            if not cells:
                return None
            counters = {
                _last_of(name): value
                for name, value in cells.items()
                if _last_of(name) in _COUNTERS
            }
            values = {
                name[:LONGEST_NAME]: value
                for name, value in cells.items()
                if _last_of(name) not in _COUNTERS and "time_elapsed" not in name
            }
            if not any(_is_plotted(*re.split(r"[ _/]", name)) for name in values):
                return None
            return self._step("", counters, {}), values
        cell = _CELL.match(" ".join(line.split()))
        if cell is None:
            return None
        if self._cells is None:
            self._cells = {}
        if cell[2] is None:
            self._section = cell[1].strip("/ ")
        elif len(self._cells) < 100:
            name = "_".join(cell[1].split())
            value = _to_float(cell[2])
            if value is not None:
                self._cells[f"{self._section}/{name}" if self._section else name] = value
        return None


class _StepCounter:
    """Makes steps that grow of steps that begin again in each epoch."""

    def __init__(self) -> None:
        self._epoch: float | None = None
        self._last = self._base = 0.0
        self.last: float | None = None  # the step of the line before, which one without has, too

    def note(self, step: float) -> float:
        self.last = step
        return step

    def place(self, epoch: float, at: float, whole: float) -> float:
        """Return the step of a place in an epoch of so many steps."""
        return self.note(float(int(epoch) * whole + at))

    def count(self, step: float, epoch: float | None) -> float:
        """Return the step that a line names, after those of epochs before if it begins again."""
        if epoch is not None:
            if self._epoch is not None and epoch > self._epoch and step <= self._last - self._base:
                self._base = self._last + 1 - step
            self._epoch = epoch
        self._last = self._base + step
        return self.note(self._last)


def _read_json(text: str) -> Iterator[tuple[float | None, dict[str, float]]]:
    """Yield what a program reports itself; nothing if it is no JSON."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return
    step, values = read_report(found) if isinstance(found, dict) else (None, {})
    if values:
        yield step, {name[:LONGEST_NAME]: value for name, value in values.items()}


class _NamedNumber(NamedTuple):
    """A number of a line that has a name."""

    at: int  # which of the line's numbers
    total: float  # what follows it after `/`, or 0
    total_at: int  # which of the line's numbers that is, or 0
    name: str
    counter: str  # what it counts, or ""
    is_epoch: bool
    is_plotted: bool
    is_strong: bool  # the name is enough
    is_sure: bool  # `=` or `:` joins both


class _LineShape(NamedTuple):
    """What is known of a line without the values of its numbers."""

    pairs: Sequence[_NamedNumber]
    plotted: frozenset[str]
    phase: str


def _tidy(text: str) -> str:
    """Return a line without what misleads: bars of signs, and the names of epochs in MMEngine."""
    if "(" in text:
        text = _EPOCH_OF.sub(r"\1 epoch", text)
    return _WHOLE_BAR.sub(r"\1", text) if "%|" in text else text


def _shape_of(text: str) -> _LineShape:
    """Return the names in a line."""
    phase, pairs, before = _phase_of(text), [], 0
    matches = [*_NUMBER.finditer(text)]
    starts = [each.start() for each in matches]
    for at, found in enumerate(matches):
        begin, end = max(before, found.start() - _LONGEST_LEFT), found.end()
        left = text[begin : found.start()]
        if left.endswith("(") and _COUNT.match(text, end) is not None:
            inner, _ = _read_key(left)
            if not inner or inner[-1].lower() not in _COUNTERS:
                continue
        before = end
        of = _OF.match(text, end)
        if of is not None:
            end = before = of.end()
        if _PART.match(text, end) is not None:
            continue
        (key, sure), is_alone = _read_key(left), False
        if not key and _ALONE_END.match(text, end) is not None:
            key = _read_name_alone(left if begin else f"|{left}")
            sure = is_alone = bool(key)
        if key and (sure or begin == 0 or left.strip()):
            total, total_at = float(of[1]) if of else 0.0, 0
            if of is not None and starts[at + 1 : at + 2] == [of.start(1)]:
                total_at = at + 1
            pair = _name_number(key, at, (total, total_at), phase, is_sure=sure)
            # `score board 1` counts beside others only
            pairs.append(pair._replace(is_strong=pair.is_strong and not is_alone))
    plotted = frozenset(each.name for each in pairs if each.is_plotted)
    return _LineShape(pairs, plotted, phase)


def _name_number(
    key: tuple[str, ...], at: int, total: tuple[float, int], phase: str, *, is_sure: bool
) -> _NamedNumber:
    last, is_plotted = key[-1].lower().rstrip("."), _is_plotted(*key)
    if last == "#" and len(key) > 1:  # `Epoch #3`, but not `output #0`
        last, is_plotted, is_sure = key[-2].lower(), False, False
    return _NamedNumber(
        at,
        *total,
        _name(key, phase),
        last if last in _COUNTERS else "",
        last in _EPOCHS,
        is_plotted,
        is_plotted and not _is_weak(*key),
        is_sure,
    )


@lru_cache(maxsize=2048)
def _read_key(left: str) -> tuple[tuple[str, ...], bool]:
    """Return the words of the name at the end of the text before a number, or none, and whether `=`
    or `:` joins them."""
    left = left.rstrip()
    if left.endswith(("[", "(", "'", '"')):
        left = left[:-1].rstrip()
    sure = left.endswith(("=", ":"))
    if sure:
        left = _COUNTED.sub("", left[:-1].rstrip())
    quoted = left.endswith(("'", '"'))
    name = left.rstrip("'\"") if quoted else left
    words = _BOUNDS.split(name)[-1].strip().lstrip("'\"-*•").split()[-_LONGEST_KEY:]
    key: list[str] = []
    for word in reversed(words):
        if not _WORD.match(word):
            break
        key.insert(0, word)
    if not key:
        return (), sure
    if not sure:
        if "." in key[-1].rstrip("."):
            return (), sure  # a file
        if not _is_plotted(key[-1]) and key[-1].lower().rstrip(".") not in _COUNTERS:
            return (), sure
    return tuple(key), sure


def _last_of(name: str) -> str:
    return name.rpartition("/")[2].lower()


def _read_name_alone(left: str) -> tuple[str, ...]:
    """Return the words of a name that stands between a bound and its number, or none: `| Grad`."""
    found = _ALONE.search(left)
    return tuple(found[0][1:].split()) if found is not None else ()


def _ends_with_name(text: str) -> bool:
    """Whether a text ends with the name of a value or with a share, so what follows is that value
    again."""
    if _SHARE.search(text):
        return True
    left = text.rstrip(" [(:=")
    return _is_plotted(re.split(r"[^\w@-]", left)[-1]) or left.lower().endswith(_EPOCHS[:2])


def _to_float(text: str) -> float | None:
    """Return a number, or None for what is none or too large for a float."""
    try:
        value = float(text)
    except ValueError:
        try:
            value = float(text.replace(",", ""))
        except ValueError:
            return None
    return None if abs(value) == inf and text[-1].isdigit() else value


@lru_cache(maxsize=2048)
def _is_plotted(*key: str) -> bool:
    """Whether the words of a name say that people plot it."""
    if len(key) > 1 and (key[-2].lower(), key[-1].lower()) == ("time", "cost"):
        return False
    for each in key:
        low = each.lower()
        if not PLOTTED.isdisjoint(_PARTS_OF.split(low)):  # `macro-f1`, `val_f1`
            return True
        bare = _BARE.match(low)  # `map` of `mAP50-95`, `acc` of `acc@1`
        if low in PLOTTED or (bare is not None and bare[0] in PLOTTED):
            return True
        for word in _WORDS.findall(each):
            word = word.lower()
            if word in PLOTTED or (len(word) < 24 and word.endswith(ENDS)):
                return True
    text = "_".join(key).lower()
    return "learning_rate" in text or "grad_norm" in text


@lru_cache(maxsize=2048)
def _is_weak(*key: str) -> bool:
    """Whether a name counts only beside others or with a step."""
    text = "_".join(key).lower()
    if text in WEAK or text.rpartition("_")[2] in ("error", "err", "scale"):
        return True
    # `initscore` and `start training from score` of LightGBM, but not `f1 score`
    return text.endswith("score") and not _is_plotted(*key[:-1])


def _phase_of(text: str) -> str:
    """Return which part of the data a line says at its start it is about, but for training."""
    found = _PHASE.match(text)
    phase = _PHASES[found[1].lower()] if found else ""
    return "" if phase == "train" else phase


@lru_cache(maxsize=2048)
def _name(key: tuple[str, ...], phase: str) -> str:
    """Return the name of a figure: lower case, with `_` between words."""
    words = [word.strip(".'%-").replace("'s", "").lower() for word in key]
    words = [word for word in words if word not in ("the", "a", "is", "of", "and", "at", "with")]
    name = "_".join(word for word in words if word)[:LONGEST_NAME]
    own = {part.lower() for word in words for part in _WORDS.findall(word)}
    return f"{phase}_{name}"[:LONGEST_NAME] if phase and not own & _NAMED else name
