"""Decides where work belongs: rented machines of a provider, own machines, edge devices or
serverless replicas.

An option that breaks a requirement is excluded. The others get a score from 0 to 1 for each
criterion, and the weighted mean of the scores decides. Scores are ratios of facts:

* cost: the lowest cost of a month / the option's cost of a month
* data: the option's cost / the same with the cost of moving data to it and results out of it
* burst: the share of the peak that the option gives without machines bought for it
* predictability: the share of the use that is known in advance, for options with a commitment;
  1 without one
* latency: the shortest possible round trip to the users / that of the option
* skills: the share of the skills that the option needs and that are at hand
* preemption: 1 / (1 + the share of work that preemptions repeat)

Weights are those of the user; by default, cost counts as much as all others together.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

from cavvy.domain.facts import Fact
from cavvy.domain.values import Struct, replace

CRITERIA: Mapping[str, float] = {
    "cost": 6.0,
    "data": 1.0,
    "burst": 1.0,
    "predictability": 1.0,
    "latency": 1.0,
    "skills": 1.0,
    "preemption": 1.0,
}


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
    moving data. `excluded` are the requirements that the place breaks, as texts. `commits` says
    whether it must be paid for when it is idle. `elastic` is the share of the peak that it gives.
    """

    kind: OptionKind
    name: str
    monthly: Fact
    moves: Fact
    round_trip: Fact
    repeated: Fact
    commits: bool
    elastic: float
    excluded: tuple[str, ...] = ()


class WorkNeeds(Struct, frozen=True, kw_only=True):
    """What the work is like. `predictable` is the share of its use that is known in advance."""

    predictable: Fact
    peak: Fact
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
    """A change that makes the runner-up the answer: another weight of a criterion, or another cost
    of a month."""

    what: str
    now: float
    at: float
    unit: str


class PlaceDecision(Struct, frozen=True, kw_only=True):
    """The ranked options, best first, and those that break a requirement."""

    ranked: Sequence[RankedPlace]
    excluded: Sequence[PlaceOption]
    turning: Sequence[TurningPoint]

    @property
    def answer(self) -> RankedPlace | None:
        return self.ranked[0] if self.ranked else None

    @property
    def runner_up(self) -> RankedPlace | None:
        return self.ranked[1] if len(self.ranked) > 1 else None


def decide_place(
    options: Sequence[PlaceOption], needs: WorkNeeds, weights: Mapping[str, float]
) -> PlaceDecision:
    """Rank the options. Weights that are missing are 0; at least one must be above 0."""
    possible = [each for each in options if not each.excluded]
    lowest = min((each.monthly.value + each.moves.value for each in possible), default=0.0)
    total = sum(weights.values())
    ranked = []
    for each in possible:
        points = _score(each, needs, lowest)
        score = sum(weights.get(point.criterion, 0.0) * point.score for point in points) / total
        ranked.append(RankedPlace(option=each, score=score, points=points))
    ranked.sort(key=lambda each: (-each.score, each.option.monthly.value, each.option.name))
    return PlaceDecision(
        ranked=ranked,
        excluded=[each for each in options if each.excluded],
        turning=_find_turning(ranked, needs, weights) if len(ranked) > 1 else (),
    )


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
    }
    return [
        ScoredPoint(criterion=name, score=score, fact=fact)
        for name, (score, fact) in scores.items()
    ]


def _find_turning(
    ranked: Sequence[RankedPlace], needs: WorkNeeds, weights: Mapping[str, float]
) -> list[TurningPoint]:
    """Return the changes, one at a time, at which the runner-up and the answer have equal
    scores. The scores are linear in a weight w: the difference is 0 at w - D / d, where D is the
    sum of weight x difference, and d the difference for this criterion.
    """
    first, second = ranked[0], ranked[1]
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
    return [*_find_costs(ranked, needs, weights), *found]


def _find_costs(
    ranked: Sequence[RankedPlace], needs: WorkNeeds, weights: Mapping[str, float]
) -> list[TurningPoint]:
    """Return the cost of a month of the runner-up at which it wins, found by halving."""
    options = [each.option for each in ranked]
    second = options[1]
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
            for e in (changed, options[0])
        ]
        return scores[0] >= scores[1]

    if not now or not wins(0.0):
        return []
    low, high = 0.0, now
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if wins(middle) else (low, middle)
    return [TurningPoint(what=f"cost of {second.name}", now=now, at=low, unit="USD a month")]
