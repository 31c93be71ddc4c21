"""Measures inputs in buckets, so that a plan includes the time and the price of the download."""

import os
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from cavvy.domain.tasks import Task, Transfer

_BUCKETS = ("s3://", "gs://", "az://")
_PATIENCE_S = 10.0  # maximum seconds for all inputs together
_MOST_PAGES = 50  # maximum number of listing pages, of 1,000 objects each
_MIB = 1 << 20


def with_sizes(task: Task) -> tuple[Task, tuple[str, ...]]:
    """The task with the sizes of its inputs, and a warning for each input of unknown size.

    Buckets are listed with the access keys in the environment. All listings together take at most
    _PATIENCE_S seconds.
    """
    unsized = [each for each in task.inputs if each.size_mib is None and "://" in each.source]
    if not unsized:
        return task, ()
    from cavvy.store.objects.deadline import call_all

    answers = call_all({each.source: partial(_measure, each) for each in unsized}, _PATIENCE_S)
    inputs, warnings = [], []
    for each in task.inputs:
        if each.size_mib is not None or each.source not in answers:
            inputs.append(each)
            continue
        answer = answers[each.source]
        size = answer if isinstance(answer, int) else None
        inputs.append(replace(each, size_mib=size))
        if size is None:
            problem = "it cannot be listed from here" if answer is None else str(answer)
            warnings.append(
                f"the size of {each.source} is unknown ({problem}), so its copy is not planned; "
                "state `size`"
            )
    return replace(task, inputs=tuple(inputs)), tuple(warnings)


def _measure(transfer: Transfer) -> int | None:
    """The size of the objects at the URL in MiB; None if it is not in a bucket. Raises
    ObjectError.
    """
    from cavvy.store.objects.base import ObjectDenied, ObjectMissing
    from cavvy.store.objects.locations import merge_keys, open_place

    if not transfer.source.startswith(_BUCKETS):
        return None
    opened = open_place(transfer.source, merge_keys(os.environ, {}), lambda: datetime.now(UTC))
    place, key, total, after = opened.place, opened.key, 0, ""
    one = place.head(key) if key and not key.endswith("/") else None
    if one is not None and one.size is not None:
        return max(1, round(one.size / _MIB))
    prefix = key if key.endswith("/") or not key else f"{key}/"
    for _ in range(_MOST_PAGES):
        objects, after = place.list(prefix, after)
        total += sum(each.size or 0 for each in objects)
        if not after:
            break
    else:
        raise ObjectDenied(f"it has more than {_MOST_PAGES * 1000:,} objects")
    if not total:
        raise ObjectMissing("no object exists there")
    return max(1, round(total / _MIB))
