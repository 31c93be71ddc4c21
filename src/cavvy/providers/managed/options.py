"""Refuses options with which a managed service would start, delay or repeat runs without an order
from Cavvy.
"""

import json
from collections.abc import Sequence

from cavvy.domain.tasks import Objection, TaskSpec

_MANY = (
    "Cavvy starts many runs as separate jobs, each with its own log, checkpoints and bill; submit "
    "each run with `cavvy run -d --param NAME=VALUE`, or copy the template `hpo-sweep`, which "
    "also stops runs early"
)
_START = "write `schedule: {at: TIME}` or `schedule: {cron: LINE}` in the task, for every provider"
_REASONS = {
    **dict.fromkeys(("array", "array_size", "array_properties", "arrayProperties"), _MANY),
    **dict.fromkeys(("sweep", "study", "tuner", "tuning", "hyperparameter_tuning"), _MANY),
    **dict.fromkeys(("schedule", "schedule_expression"), _START),
    "retry": "only the control plane restarts jobs; write `retry` in the task",
}


def object_to_options(provider: str, task: TaskSpec) -> Sequence[Objection]:
    """Return the objections to the task's options for this provider."""
    names = {
        name
        for each in task.resources.options
        if each.provider == provider
        for name in json.loads(each.values)
    }
    return [
        Objection(f"resources.options.{provider}.{name}", _REASONS[name])
        for name in sorted(names & _REASONS.keys())
    ]
