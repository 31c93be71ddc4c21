"""Decides where work belongs: rented machines of a provider, own machines, edge devices or
serverless replicas.

An option that breaks a requirement is excluded. The others get a score from 0 to 1 for each
criterion, and the weighted mean of the scores decides. If only one is left, the runner-up is the
best option that is possible without a requirement; without any, there is no answer. Scores are
ratios of facts:

* cost: the lowest cost of a month / the option's cost of a month
* data: the option's cost / the same with the cost of moving data to it and results out of it
* burst: the share of the peak that the option gives without machines bought for it
* predictability: the share of the use that is known in advance, for options with a commitment;
  1 without one
* latency: the shortest possible round trip to the users / that of the option
* skills: the share of the skills that the option needs and that are at hand
* preemption: 1 / (1 + the share of work that preemptions repeat)
* deadline: the share of the time until the deadline that is left when the work is done; 1 without a
  deadline

Weights are those of the user; by default, cost counts as much as all others together.
"""

from collections.abc import Mapping, Sequence
from datetime import date
from enum import StrEnum

from cavvy.domain.facts import Fact
from cavvy.domain.values import Struct, replace

CRITERIA: Mapping[str, float] = {
    "cost": 7.0,
    "data": 1.0,
    "burst": 1.0,
    "predictability": 1.0,
    "latency": 1.0,
    "skills": 1.0,
    "preemption": 1.0,
    "deadline": 1.0,
}
# the day on which Cavvy's own assumptions about places were last revised
ASSUMED_ON = date(2026, 11, 28)


class OptionKind(StrEnum):
    """The kinds of places."""

    CLOUD = "cloud"
    OWN = "own machines"
    EDGE = "edge"
    SERVERLESS = "serverless"


# skills that an option needs; a word of the user's file
SKILLS: Mapping[OptionKind, tuple[str, ...]] = {
    OptionKind.CLOUD: ("cloud",),
    OptionKind.OWN: ("hardware", "datacenter", "linux"),
    OptionKind.EDGE: ("hardware", "linux"),
    OptionKind.SERVERLESS: (),
}
# Round trips in milliseconds: assumed orders, no source; a region of the users' country, of their
# area, elsewhere. A device beside the users needs no network.
ROUND_TRIPS = {"site": 1.0, "country": 15.0, "area": 40.0, "elsewhere": 150.0}


class PlaceOption(Struct, frozen=True, kw_only=True):
    """One place. `monthly` is the cost of a month in US dollars, and `moves` the cost of a month of
    moving data. `commits` says whether it must be paid for when it is idle. `elastic` is the share
    of the peak that it gives. `finish` is the time in hours until the work is done.

    `excluded` are the requirements that the place breaks, and `impossible` is what it can never do
    or what is not known of it, both as texts.
    """

    kind: OptionKind
    name: str
    monthly: Fact
    moves: Fact
    round_trip: Fact
    repeated: Fact
    commits: bool
    elastic: float
    finish: Fact
    excluded: tuple[str, ...] = ()
    impossible: tuple[str, ...] = ()

    @property
    def refusals(self) -> tuple[str, ...]:
        return self.impossible + self.excluded


class WorkNeeds(Struct, frozen=True, kw_only=True):
    """What the work is like. `predictable` is the share of its use that is known in advance.
    `deadline` is the time in hours within which it must be done, or None."""

    predictable: Fact
    peak: Fact
    deadline: Fact | None = None
    skills: frozenset[str]
    skills_source: Fact


class ScoredPoint(Struct, frozen=True, kw_only=True):
    """The score of an option for one criterion, and the fact that it comes from."""

    criterion: str
    score: float
    fact: Fact


class RankedPlace(Struct, frozen=True, kw_only=True):
    option: PlaceOption
    score: float
    points: Sequence[ScoredPoint]


class TurningPoint(Struct, frozen=True, kw_only=True):
    """A change that makes another place the answer: another weight of a criterion, another cost of
    a month, or a requirement that is lifted (`now` 1, `at` 0)."""

    what: str
    now: float
    at: float
    unit: str


class PlaceDecision(Struct, frozen=True, kw_only=True):
    """The ranked options, best first, and those that are not possible. `runner_up` is the second,
    or, if there is none, the best option that is possible without the requirements `lifted`."""

    ranked: Sequence[RankedPlace]
    runner_up: RankedPlace | None
    lifted: tuple[str, ...]
    excluded: Sequence[PlaceOption]
    turning: Sequence[TurningPoint]

    @property
    def answer(self) -> RankedPlace | None:
        """The best option; None if there is nothing to compare it with."""
        return self.ranked[0] if self.runner_up else None


def decide_place(
    options: Sequence[PlaceOption], needs: WorkNeeds, weights: Mapping[str, float]
) -> PlaceDecision:
    """Rank the options. Weights that are missing are 0; at least one must be above 0."""
    excluded = [each for each in options if each.refusals]
    possible = [each for each in options if not each.refusals]
    ranked = _rank(possible, needs, weights)
    joined = _find_joined(possible, excluded, needs, weights) if ranked else []
    turning = _find_turning(ranked[:2], ranked, needs, weights) if len(ranked) > 1 else []
    lifted: tuple[str, ...] = ()
    runner_up = ranked[1] if len(ranked) > 1 else None
    if joined:
        other = next(each for each in joined if each.option.excluded)
        if other is joined[0]:
            turning.insert(0, _lift(other))
        if runner_up is None:
            runner_up, lifted = other, other.option.excluded
            if other is not joined[0]:
                turning += _find_turning([joined[0], other], joined, needs, weights)
    return PlaceDecision(
        ranked=ranked, runner_up=runner_up, lifted=lifted, excluded=excluded, turning=turning
    )


def _rank(
    options: Sequence[PlaceOption], needs: WorkNeeds, weights: Mapping[str, float]
) -> list[RankedPlace]:
    lowest = min((each.monthly.value + each.moves.value for each in options), default=0.0)
    total = sum(weights.values())
    ranked = []
    for each in options:
        points = _score(each, needs, lowest)
        score = sum(weights.get(point.criterion, 0.0) * point.score for point in points) / total
        ranked.append(RankedPlace(option=each, score=score, points=points))
    return sorted(
        ranked, key=lambda each: (-each.score, each.option.monthly.value, each.option.name)
    )


def _find_joined(
    possible: Sequence[PlaceOption],
    excluded: Sequence[PlaceOption],
    needs: WorkNeeds,
    weights: Mapping[str, float],
) -> list[RankedPlace]:
    """Return the possible options ranked together with the best of those that only requirements
    exclude: among those that break the fewest. Return [] if there is none."""
    liftable = [each for each in excluded if not each.impossible]
    if not liftable:
        return []
    fewest = min(len(each.excluded) for each in liftable)
    near = [each for each in liftable if len(each.excluded) == fewest]
    best = next(e for e in _rank([*possible, *near], needs, weights) if e.option.excluded)
    return _rank([*possible, best.option], needs, weights)


def _lift(place: RankedPlace) -> TurningPoint:
    what = f"requirement without which {place.option.name} wins: {'; '.join(place.option.excluded)}"
    return TurningPoint(what=what, now=1.0, at=0.0, unit="required")


def _score(option: PlaceOption, needs: WorkNeeds, lowest: float) -> list[ScoredPoint]:
    cost = option.monthly.value + option.moves.value
    needed = SKILLS[option.kind]
    known = sum(skill in needs.skills for skill in needed)
    fastest = ROUND_TRIPS["site"]
    scores = {
        "cost": (lowest / cost if cost else 1.0, option.monthly),
        "data": (option.monthly.value / cost if cost else 1.0, option.moves),
        "burst": (min(1.0, option.elastic), needs.peak),
        "predictability": (needs.predictable.value if option.commits else 1.0, needs.predictable),
        "latency": (fastest / option.round_trip.value, option.round_trip),
        "skills": (known / len(needed) if needed else 1.0, needs.skills_source),
        "preemption": (1 / (1 + option.repeated.value), option.repeated),
        "deadline": (_share_left(option, needs), option.finish),
    }
    return [
        ScoredPoint(criterion=name, score=score, fact=fact)
        for name, (score, fact) in scores.items()
    ]


def _share_left(option: PlaceOption, needs: WorkNeeds) -> float:
    if needs.deadline is None or not needs.deadline.value:
        return 1.0
    return max(0.0, 1 - option.finish.value / needs.deadline.value)


def _find_turning(
    pair: Sequence[RankedPlace],
    ranked: Sequence[RankedPlace],
    needs: WorkNeeds,
    weights: Mapping[str, float],
) -> list[TurningPoint]:
    """Return the changes, one at a time, at which the runner-up and the answer, which are `pair`,
    have equal scores. The scores are linear in a weight w: the difference is 0 at w - D / d, where
    D is the sum of weight x difference, and d the difference for this criterion.
    """
    first, second = pair
    differences = {
        one.criterion: one.score - other.score
        for one, other in zip(first.points, second.points, strict=True)
    }
    sum_of_all = sum(weights.get(name, 0.0) * each for name, each in differences.items())
    found = []
    for name, difference in differences.items():
        weight = weights.get(name, 0.0)
        if abs(difference) > 1e-9 and (at := weight - sum_of_all / difference) >= 0:
            found.append(TurningPoint(what=f"weight of {name}", now=weight, at=at, unit=""))
    found.sort(key=lambda each: abs(each.at - each.now))
    return [*_find_costs(pair, ranked, needs, weights), *found]


def _find_costs(
    pair: Sequence[RankedPlace],
    ranked: Sequence[RankedPlace],
    needs: WorkNeeds,
    weights: Mapping[str, float],
) -> list[TurningPoint]:
    """Return the cost of a month of the runner-up at which it wins, found by halving."""
    options = [each.option for each in ranked]
    first, second = (each.option for each in pair)
    now = second.monthly.value

    def wins(value: float) -> bool:
        changed = replace(second, monthly=replace(second.monthly, value=value))
        others = [each for each in options if each is not second]
        lowest = min(e.monthly.value + e.moves.value for e in [*others, changed])
        scores = [
            sum(
                weights.get(point.criterion, 0.0) * point.score
                for point in _score(e, needs, lowest)
            )
            for e in (changed, first)
        ]
        return scores[0] >= scores[1]

    if not now or not wins(0.0):
        return []
    low, high = 0.0, now
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if wins(middle) else (low, middle)
    return [TurningPoint(what=f"cost of {second.name}", now=now, at=low, unit="USD a month")]
