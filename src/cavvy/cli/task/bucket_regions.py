"""Looks up the regions of a task's buckets, so that a plan includes the price of copies, and
refuses buckets outside the regions that the task allows.
"""

import os
from datetime import UTC, datetime

from cavvy.catalog.residency import (
    OUTSIDE_HINT,
    explain_unlocated,
    fill_regions,
    list_found_outside,
    list_unknown,
    say_unplaced,
)
from cavvy.cli.view.failure import CommandFailure
from cavvy.domain.tasks import TaskSpec

_PATIENCE_S = 10.0  # maximum time in seconds for the queries of all buckets together


def with_regions(
    task: TaskSpec, warnings: tuple[str, ...] = ()
) -> tuple[TaskSpec, tuple[str, ...]]:
    """Return the task with the regions of its inputs and outputs, queried from their storage
    services with the keys in the environment. Also return the warnings: those in `warnings`, and a
    warning about buckets whose region could not be found out. Raises CommandFailure if a bucket is
    outside the regions that the task allows.
    """
    urls = list_unknown(task)
    if not urls:
        return task, warnings
    from cavvy.store.objects.locations import merge_keys
    from cavvy.store.objects.regions import find_regions

    keys = merge_keys(os.environ, {})
    found = find_regions(urls, keys, lambda: datetime.now(UTC), _PATIENCE_S)
    for outside in list_found_outside(task, found.regions):
        raise CommandFailure(str(outside), OUTSIDE_HINT, exit_code=2)
    warning = say_unplaced(task, {**found.problems, **explain_unlocated(found.regions)})
    return fill_regions(task, found.regions), (*warnings, warning) if warning else warnings
