"""Asks the storages about a task's buckets, so that a plan includes the price of copies, and the
time and the price of downloads. Refuses buckets outside the regions that the task allows.
"""

import os
from datetime import UTC, datetime

from cavvy.catalog import residency
from cavvy.cli.view.failure import CommandFailure
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace

_PATIENCE_S = 10.0  # maximum time in seconds for the queries of all buckets together
_SIZES_S = 10.0  # maximum seconds for all inputs together


def with_regions(
    task: TaskSpec, warnings: tuple[str, ...] = ()
) -> tuple[TaskSpec, tuple[str, ...]]:
    """Return the task with the regions of its inputs and outputs, queried from their storage
    services with the keys in the environment. Also return the warnings: those in `warnings`, and a
    warning about buckets whose region could not be found out. Raises CommandFailure if a bucket is
    outside the regions that the task allows.
    """
    urls = residency.list_unknown(task)
    if not urls:
        return task, warnings
    from cavvy.store.objects.locations import find_regions, merge_keys

    keys = merge_keys(os.environ, {})
    found = find_regions(urls, keys, lambda: datetime.now(UTC), _PATIENCE_S)
    for outside in residency.list_found_outside(task, found.regions):
        raise CommandFailure(str(outside), residency.OUTSIDE_HINT, exit_code=2)
    warning = residency.say_unplaced(
        task, {**found.problems, **residency.explain_unlocated(found.regions)}
    )
    return residency.fill_regions(task, found.regions), (
        *warnings,
        warning,
    ) if warning else warnings


def with_sizes(task: TaskSpec) -> tuple[TaskSpec, tuple[str, ...]]:
    """Return the task with the sizes of its inputs, and a warning for each input of unknown size.

    Buckets are listed with the access keys in the environment. All listings together take at most
    _SIZES_S seconds.
    """
    unsized = [
        each.source for each in task.inputs if each.size_mib is None and "://" in each.source
    ]
    if not unsized:
        return task, ()
    from cavvy.store.objects.locations import find_sizes, merge_keys

    answers = find_sizes(unsized, merge_keys(os.environ, {}), lambda: datetime.now(UTC), _SIZES_S)
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
