"""How many GPUs were in use over time, from the attempts that had some."""

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from cavvy.domain.jobs import Attempt


def count_gpus(
    attempts: Iterable[Attempt], begin: datetime, step: timedelta, count: int, now: datetime
) -> Mapping[str, list[float]]:
    """Return the mean number of GPUs in use in each of `count` steps from `begin` on, by their
    kind, the most used kind first. The part of the last step that lies ahead counts nothing: its
    mean is that of the time until now.
    """
    found: dict[str, list[float]] = {}
    for each in attempts:
        offer = each.offer
        gpus = offer.accelerator_count * offer.accelerator_part * each.nodes
        if not offer.accelerator or not gpus:
            continue
        since = ((each.launched_at or each.created_at) - begin) / step
        until = ((each.ended_at or now) - begin) / step
        means = found.setdefault(offer.accelerator, [0.0] * count)
        for number in range(max(0, int(since)), min(count, int(until) + 1)):
            covered = min(until, number + 1) - max(since, number)
            means[number] += gpus * max(0.0, covered)
    last = min(1.0, (now - begin) / step - (count - 1))
    if 0 < last < 1:
        for means in found.values():
            means[-1] /= last
    known = {kind: means for kind, means in found.items() if any(means)}
    return dict(sorted(known.items(), key=lambda each: (-sum(each[1]), each[0])))
