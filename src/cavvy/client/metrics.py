"""The values that a job's program reports."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cavvy.client.wire import JobDetail


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
    }
)


def figures(progress: Mapping[str, float | str]) -> dict[str, float | str]:
    """Return the program's own metrics, without the values that describe the progress of the
    work.
    """
    return {
        name: value
        for name, value in progress.items()
        if name not in ("done", "total", "unit", "left_s", "complete")
    }


def last_figures(job: "JobDetail") -> dict[str, float | str]:
    """Return the metrics that the program last reported, in any attempt."""
    for attempt in reversed(job.attempts):
        for node in attempt.nodes:
            if node.progress:
                return figures(node.progress)
    return {}
