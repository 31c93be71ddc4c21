"""How much each parameter of runs explains of their results.

The measure is epsilon squared (Kelley 1935, "An unbiased correlation ratio measure"): the share of
the variance of a result that lies between groups of equal parameters, without the share that chance
alone would give. It asks for no shape of the relation: a learning rate that is best in the middle
counts as one that is best at its end. Its interval is that of a bootstrap (Efron 1979).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

LEAST_RUNS = 5  # below which nothing is said
MOST_GROUPS = 5
LARGEST = 1e100  # a number that can be squared; parameters beyond it are texts
_PER_GROUP = 3  # runs, so that there is a variance within
_SAMPLES = 200
_LOW, _HIGH = 0.05, 0.95  # of the interval


class Choices(Protocol):
    """Random numbers, such as `random.Random`."""

    def choices(self, population: Sequence[int], *, k: int) -> list[int]: ...


class Importance(NamedTuple):
    """The share of the variance that a parameter explains, from 0 to 1, and its interval: 90 %."""

    name: str
    share: float
    low: float
    high: float


def rank_params(
    runs: Sequence[tuple[Mapping[str, str], float]], random: Choices
) -> Sequence[Importance]:
    """Return the importance of each parameter that differs between runs, the highest first. `runs`
    are their parameters and results."""
    if len(runs) < LEAST_RUNS:
        return []
    names = {name for params, _ in runs for name in params}
    results = [result for _, result in runs]
    found = []
    for name in names:
        groups = group_values([params.get(name, "") for params, _ in runs])
        if not 1 < len(set(groups)) < len(runs):
            continue
        samples = []
        for _ in range(_SAMPLES):
            taken = random.choices(range(len(runs)), k=len(runs))
            samples.append(explain([groups[at] for at in taken], [results[at] for at in taken]))
        samples.sort()
        low, high = (samples[int(part * (_SAMPLES - 1))] for part in (_LOW, _HIGH))
        found.append(Importance(name, explain(groups, results), low, high))
    return sorted(found, key=lambda each: (-each.share, each.name))


def group_values(values: Sequence[str]) -> list[int]:
    """Return the group of each value: equal values are one, and numbers that are all different are
    cut into a few groups of equal size."""
    distinct = sorted(set(values))
    most = max(2, min(MOST_GROUPS, len(values) // _PER_GROUP))
    numbers = [read_number(each) for each in distinct]
    if len(distinct) <= most or any(each is None for each in numbers):
        return [distinct.index(each) for each in values]
    order = sorted(values, key=lambda each: read_number(each) or 0.0)
    first: dict[str, int] = {}
    for at, each in enumerate(order):
        first.setdefault(each, at * most // len(order))
    return [first[each] for each in values]


def explain(groups: Sequence[int], results: Sequence[float]) -> float:
    """Return the share of the variance of results that lies between groups: epsilon squared."""
    largest = max(map(abs, results), default=0.0)
    if largest > LARGEST:  # its square may be no number; the share does not depend on the unit
        results = [each / largest for each in results]
    by_group: defaultdict[int, list[float]] = defaultdict(list)
    for group, result in zip(groups, results, strict=True):
        by_group[group].append(result)
    count, kinds = len(results), len(by_group)
    mean = sum(results) / count
    total = sum((each - mean) ** 2 for each in results)
    within = sum(
        sum((each - sum(own) / len(own)) ** 2 for each in own) for own in by_group.values()
    )
    if total <= 0 or count <= kinds or kinds < 2:
        return 0.0
    between = total - within - (kinds - 1) * within / (count - kinds)
    return min(1.0, max(0.0, between / total))


def read_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) <= LARGEST else None
