"""The values that a job's program reports."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from cavvy.domain.figures import GPU_FIGURES
from cavvy.domain.units import format_energy, format_grams

if TYPE_CHECKING:
    from cavvy.client.array_wire import ArrayDetail
    from cavvy.client.wire import EnergyView, JobDetail, SeriesView, UnsafeView


SPEED_SINCE = timedelta(minutes=30)  # the time whose speed tells when the work is done
_MOST_GRIDS = 3  # countries that are named
_LONGEST_S = 10 * 365 * 24 * 3600  # a longer forecast says nothing
# Names of telemetry values for the time since the work began, or since the GPUs were last used,
# which agents report in addition to the current use.
TOTALS = frozenset(
    {
        "cpu_mean_percent",
        "gpu_idle_s",
        "gpu_mean_percent",
        "gpu_memory_peak_mib",
        "measured_s",
        "checkpoints",
        "checkpoint_pause_s",
        "still_s",
    }
)


def find_use(telemetry: Mapping[str, float]) -> dict[str, float]:
    """Return the current use of the whole node."""
    return {
        name: value
        for name, value in telemetry.items()
        if name not in TOTALS and not name.startswith(tuple(f"{each}." for each in GPU_FIGURES))
    }


def figures(progress: Mapping[str, float | str]) -> dict[str, float | str]:
    """Return the program's own metrics, without the values that describe the progress of the
    work.
    """
    return {
        name: value
        for name, value in progress.items()
        if name not in ("done", "total", "unit", "left_s", "complete")
    }


def describe_energy(energy: "EnergyView") -> str:
    """Return an energy with its emissions, such as "1.2 kWh, 460 g of CO2 (grid of de, 2024)"."""
    text = format_energy(energy.joules)
    if not energy.grids:
        return f"{text} (the grid of its country is unknown)"
    years = " to ".join(map(str, sorted({min(energy.grids.values()), max(energy.grids.values())})))
    several = len(energy.grids) > _MOST_GRIDS
    places = f"{len(energy.grids)} countries" if several else " and ".join(energy.grids)
    rest = ""
    if energy.unplaced_j:
        rest = f"; without {format_energy(energy.unplaced_j)} in unknown countries"
    return f"{text}, {format_grams(energy.co2_g)} of CO2 (grid of {places}, {years}{rest})"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchProgress:
    """How far a batch is. `before` rows had results when the batch was submitted. `left_s` and
    `total_micros` are forecasts at the present speed and cost; None if nothing is known yet.
    """

    done: int
    total: int
    before: int
    rows_per_s: float
    spent_micros: int

    @property
    def left_s(self) -> float | None:
        left = self.total - self.done
        return left / self.rows_per_s if left < self.rows_per_s * _LONGEST_S else None

    @property
    def micros_per_million(self) -> int | None:
        """The cost of a million rows in micro-dollars, with all that was lost to preemptions, or
        None if nothing was billed yet."""
        own = self.done - self.before
        return round(self.spent_micros * 1_000_000 / own) if own > 0 < self.spent_micros else None

    @property
    def total_micros(self) -> int | None:
        rate = self.micros_per_million
        left = self.total - self.done
        if rate is None:
            return None if left else self.spent_micros
        return self.spent_micros + round(rate * left / 1_000_000)


def measure_batch(found: "ArrayDetail") -> BatchProgress | None:
    """Return the progress of a batch from what its jobs have reported, or None if the array is no
    batch or no job has begun. Jobs report the rows of the whole batch or, if they cannot see the
    results of others, their own part of it."""

    def read(progress: Mapping[str, float | str], name: str) -> float:
        value = progress.get(name)
        return value if isinstance(value, int | float) and 0 <= value < 1e15 else 0

    told = [job for job in found.jobs if read(job.progress, "batch_rows")]
    if not told:
        return None
    total = max(read(job.progress, "batch_rows") for job in told)
    done = [read(job.progress, "done") for job in told]
    before = [read(job.progress, "before_rows") for job in told]
    parts = any(read(job.progress, "total") < total for job in told)
    running = [job for job in told if job.phase == "running"]
    return BatchProgress(
        done=int(min(total, sum(done) if parts else max(done))),
        total=int(total),
        before=int(min(total, sum(before) if parts else max(before))),
        rows_per_s=sum(read(job.progress, "rows_per_s") for job in running),
        spent_micros=found.array.spent_micros,
    )


def find_progress(job: "JobDetail") -> "dict[str, float | str]":
    """Return what the first rank that reports progress last reported in the newest attempt."""
    own = next((attempt for attempt in job.attempts if attempt.number == job.attempt), None)
    reported = (node.progress for node in own.nodes) if own else ()
    return next((each for each in reported if each), {})


def find_unsafe(job: "JobDetail") -> "UnsafeView | None":
    """Return which files of the job may be lost, as its newest attempt has said or, as long as it
    has saved nothing, the one before; None for a job that is done."""
    for attempt in sorted(job.attempts, key=lambda each: each.number, reverse=True):
        if attempt.unsafe is not None and job.phase != "done":
            return attempt.unsafe
        if attempt.checkpoint_at is not None or attempt.number < job.attempt:
            return None
    return None


def find_share(progress: Mapping[str, float | str]) -> float | None:
    """Return the share of the work that is done, from 0 to 1, or None if the program does not
    report it.
    """
    fraction = progress.get("fraction")
    done, total = progress.get("done"), progress.get("total")
    if isinstance(done, int | float) and isinstance(total, int | float) and total > 0:
        fraction = done / total
    return min(max(fraction, 0.0), 1.0) if isinstance(fraction, int | float) else None


def estimate_left_s(
    progress: Mapping[str, float | str], done: "SeriesView | None", step_s: int
) -> float | None:
    """Return the seconds until the work is done, or None if they are unknown: what the program
    reports as `left_s`, or else what is left at the mean speed of the series of `done`, whose
    values are `step_s` seconds apart. The highest values count, which are those of the ends of the
    steps: work begins within a step.
    """
    told = progress.get("left_s")
    if isinstance(told, int | float):
        return max(told, 0.0) if told < _LONGEST_S else None
    now, total = progress.get("done"), progress.get("total")
    if done is None or not isinstance(now, int | float) or not isinstance(total, int | float):
        return None
    known = [(at, each) for at, each in enumerate(done.high) if each is not None]
    (first_at, first), (last_at, last) = (known or [(0, 0.0)])[0], (known or [(0, 0.0)])[-1]
    if last <= first or now > total:
        return None
    left = (total - now) * (last_at - first_at) * step_s / (last - first)
    return left if left < _LONGEST_S else None


def last_figures(job: "JobDetail") -> dict[str, float | str]:
    """Return the metrics that the program last reported, in any attempt."""
    for attempt in reversed(job.attempts):
        for node in attempt.nodes:
            if node.progress:
                return figures(node.progress)
    return {}
