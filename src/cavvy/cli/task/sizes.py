"""Measures inputs in buckets, so that a plan includes the time and the price of the download."""

import os
from datetime import UTC, datetime

from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace

_PATIENCE_S = 10.0  # maximum seconds for all inputs together


def with_sizes(task: TaskSpec) -> tuple[TaskSpec, tuple[str, ...]]:
    """Return the task with the sizes of its inputs, and a warning for each input of unknown size.

    Buckets are listed with the access keys in the environment. All listings together take at most
    _PATIENCE_S seconds.
    """
    unsized = [
        each.source for each in task.inputs if each.size_mib is None and "://" in each.source
    ]
    if not unsized:
        return task, ()
    from cavvy.store.objects.locations import merge_keys
    from cavvy.store.objects.sizes import find_sizes

    answers = find_sizes(
        unsized, merge_keys(os.environ, {}), lambda: datetime.now(UTC), _PATIENCE_S
    )
    inputs, warnings = [], []
    for each in task.inputs:
        answer = answers.get(each.source) if each.size_mib is None else None
        if answer is None:
            inputs.append(each)
        elif isinstance(answer, int):
            inputs.append(replace(each, size_mib=answer))
        else:
            inputs.append(each)
            warnings.append(
                f"the size of {each.source} is unknown ({answer}), so the plan does not "
                "include its copy; state `size` in the task"
            )
    return replace(task, inputs=tuple(inputs)), tuple(warnings)
