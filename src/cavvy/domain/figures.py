"""What the node of a rank measured, and what its program reported, minute by minute."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from math import inf, nan
from statistics import median

from cavvy.domain.values import Struct

FIGURES_DAYS = 30  # for how many whole days figures are kept
MOST_NAMES = 48  # of one rank and minute; more are dropped
GPU_FIGURES = ("gpu_percent", "gpu_memory_mib", "gpu_power_w")


_LEAST_RANKS = 3  # whose median tells what is usual
_MOST_NAMED = 8  # ranks in a text
_STRAGGLES = 1.3  # times the median; ranks of equal machines differ by a few percent


def find_stragglers(progress: Mapping[int, Mapping[str, float | str]]) -> list[tuple[int, float]]:
    """Return the ranks that need much longer for a step than the median rank, with the ratio, from
    what each rank has reported. Ranks report the duration of a step as `step_ms`; at least three
    must have reported it.
    """
    told = {
        rank: float(value)
        for rank, values in progress.items()
        if isinstance(value := values.get("step_ms"), int | float) and 0 < value < inf
    }
    if len(told) < _LEAST_RANKS:
        return []
    usual = median(told.values())
    return [(rank, ms / usual) for rank, ms in sorted(told.items()) if ms >= _STRAGGLES * usual]


def describe_stragglers(found: Sequence[tuple[int, float]]) -> str:
    """Return the slow ranks and their ratios as a text."""
    shown = ", ".join(f"rank {rank} ({ratio:.1f} times)" for rank, ratio in found[:_MOST_NAMED])
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return f"steps take longer than the median: {shown}{more}"


class StepSeries(Struct, frozen=True):
    """Values that a program reported together: a row holds the step or None, how many milliseconds
    before the message it was reported, and a value for each name. Of rows that are `odd`, 1 means
    NaN, 2 infinity and 3 minus infinity.
    """

    names: list[str]
    rows: list[list[float | None]]
    process: int = 0  # which of the node's processes reported them
    odd: bool = False


class StepExample(Struct, frozen=True, kw_only=True):
    """What a program reported beside numbers, such as a picture: its name, kind (`image`, `audio`,
    `text`, `table` or `histogram`) and bytes, and how many milliseconds before the message.
    """

    name: str
    kind: str
    data: bytes
    step: float | None = None
    age_ms: float = 0.0
    process: int = 0


class StepValues(Struct, frozen=True, kw_only=True):
    """What the program of a rank reported of its steps, in the order in which it did."""

    attempt_id: str
    rank: int
    at: datetime  # when the message was sent
    number: int  # of the message; later ones have higher numbers
    series: Sequence[StepSeries]
    params: Mapping[str, str] = {}  # settings that the program reported
    examples: Sequence[StepExample] = ()


class FigureColumns(Struct, frozen=True, kw_only=True):
    """The lowest, mean and highest value of one figure in each minute of a block; NaN where the
    figure is unknown.
    """

    low: Sequence[float]
    mean: Sequence[float]
    high: Sequence[float]


class FigureBlock(Struct, frozen=True, kw_only=True):
    """The figures of one rank in some minutes of one day (UTC). `minutes` counts from 1970, in
    ascending order."""

    attempt_id: str
    rank: int
    minutes: Sequence[int]
    columns: Mapping[str, FigureColumns]


def list_gpus(telemetry: Mapping[str, float]) -> list[dict[str, float]]:
    """Return the values of each GPU of a rank that has several, in the order of the rank's GPUs.
    The agent reports them as `gpu_percent.0`, `gpu_memory_mib.0`, `gpu_power_w.0`, and so on.
    """
    found: dict[int, dict[str, float]] = {}
    for name, value in telemetry.items():
        key, _, number = name.partition(".")
        if key in GPU_FIGURES and number.isascii() and number.isdigit() and len(number) < 4:
            found.setdefault(int(number), {})[key] = value
    return [found.get(number, {}) for number in range(max(found, default=-1) + 1)]


def join_blocks(blocks: Sequence[FigureBlock]) -> FigureBlock:
    """Join blocks of one rank to one block. If several have the same minute, the last counts."""
    rows: dict[int, tuple[FigureBlock, int]] = {}
    for block in blocks:
        rows |= {minute: (block, at) for at, minute in enumerate(block.minutes)}
    picked = [rows[minute] for minute in sorted(rows)]
    names = sorted({name for block in blocks for name in block.columns})
    return FigureBlock(
        attempt_id=blocks[0].attempt_id,
        rank=blocks[0].rank,
        minutes=sorted(rows),
        columns={name: _join_columns(name, picked) for name in names},
    )


def _join_columns(name: str, picked: Sequence[tuple[FigureBlock, int]]) -> FigureColumns:
    low, mean, high = [], [], []
    for block, at in picked:
        found = block.columns.get(name)
        low.append(found.low[at] if found else nan)
        mean.append(found.mean[at] if found else nan)
        high.append(found.high[at] if found else nan)
    return FigureColumns(low=low, mean=mean, high=high)


# the lengths in minutes for which figures are summarized
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 180, 360, 720, 1440)


def choose_step(minutes: int, points: int) -> int:
    """Return the shortest step in minutes that divides a period into at most `points` parts, or a
    day."""
    return next((step for step in _STEPS if -(-minutes // step) < points), _STEPS[-1])


def summarize_blocks(
    blocks: Sequence[FigureBlock], start: int, step: int, count: int
) -> Mapping[str, FigureColumns]:
    """Summarize the blocks of one rank: for each of `count` steps from the minute `start` on, the
    lowest value, the mean of the minutes' means, and the highest value; NaN for steps without a
    value.
    """
    names = dict.fromkeys(name for block in blocks for name in block.columns)
    found = {}
    for name in names:
        low, high = [inf] * count, [-inf] * count
        total, known = [0.0] * count, [0] * count
        for block in blocks:
            if name not in block.columns:
                continue
            columns = block.columns[name]
            rows = zip(block.minutes, columns.low, columns.mean, columns.high, strict=True)
            for minute, least, mean, most in rows:
                at = (minute - start) // step
                if 0 <= at < count and mean == mean:  # not NaN
                    low[at], high[at] = min(low[at], least), max(high[at], most)
                    total[at] += mean
                    known[at] += 1
        found[name] = FigureColumns(
            low=[each if n else nan for each, n in zip(low, known, strict=True)],
            mean=[each / n if n else nan for each, n in zip(total, known, strict=True)],
            high=[each if n else nan for each, n in zip(high, known, strict=True)],
        )
    return found
