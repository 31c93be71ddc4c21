"""Predicts how long gangs hold their nodes, from past gangs. The module does no I/O.

Like the templates of Smith, Taylor and Foster ("Using Run-Time Predictions to Estimate Queue Wait
Times", 1999), past gangs of jobs with the same name count most, then those of the same user, then
those of all. Gangs that still run count as well, by the estimator of Kaplan and Meier (1958):
without them, short jobs would count too much, as they end first. Each of `REPLICAS` predictions is
made from another sample of the past gangs (Efron's bootstrap), because a few of them say little.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING

from cavvy.domain.values import Struct

if TYPE_CHECKING:
    from random import Random

REPLICAS = 10
# Past gangs that count, of each group and of all, the newest first. They begin with the same moment
# whether they have ended or not, as otherwise too many long ones or too many short ones counted.
_MOST_OF_GROUP, _MOST = 100, 500
_TRUST = 1  # a group of this many ended gangs counts as much as all wider groups together


class GangKind(Struct, frozen=True):
    """The job's name without the number at its end, its user and its project."""

    project: str
    user: str
    name: str


class PastGang(Struct, frozen=True):
    """How long a gang held its nodes, or has held them if it has not `ended`."""

    kind: GangKind
    seconds: float
    ended: bool = True


class PlannedGang(Struct, frozen=True, kw_only=True):
    """A gang whose end is to be predicted. `age_s` is how long it has held its nodes; `most_s` is
    the longest time that it may hold them, by the task's time limit."""

    kind: GangKind
    age_s: float = 0.0
    most_s: float = inf


class RunTimes:
    """The distributions of how long gangs hold their nodes. `past` contains gangs that have ended
    and gangs that run, sorted by the time of submission, the newest first."""

    def __init__(self, past: Iterable[PastGang], random: "Random") -> None:
        groups: defaultdict[tuple[str, ...], list[PastGang]] = defaultdict(list)
        for gang in past:
            for key in _keys_of(gang.kind):
                if len(groups[key]) < (_MOST_OF_GROUP if key else _MOST):
                    groups[key].append(gang)
        self._groups: Mapping[tuple[str, ...], Sequence[PastGang]] = groups
        self._random = random
        self._curves: dict[tuple[tuple[str, ...], int], _Curve] = {}

    def draw(self, gang: PlannedGang, replica: int) -> float:
        """Return for how many seconds from now the gang may hold its nodes, or infinity if nothing
        is known about gangs like it."""
        draw, age_s = self._random.random, gang.age_s
        for key in _keys_of(gang.kind):
            if (key, replica) not in self._curves:
                self._curves[key, replica] = self._resample(self._groups.get(key, ()))
            curve = self._curves[key, replica]
            if key and draw() * (curve.ended + _TRUST) >= curve.ended:
                continue
            seconds = curve.draw(age_s, 1.0 - draw())
            if seconds is not None:
                return max(0.0, min(seconds, gang.most_s) - gang.age_s)
            age_s = max(age_s, curve.longest_s)
        if gang.most_s < inf and not self._curves[(), replica].ended:
            # users ask for more than they need: any part of it is as likely
            return draw() * max(0.0, gang.most_s - gang.age_s)
        if not self._curves[(), replica].ended:
            return inf
        # It runs longer than all that have ended. As in a Pareto distribution with the index 1,
        # half of such gangs run for more than twice the time.
        return max(0.0, min(age_s / (1.0 - draw()), gang.most_s) - gang.age_s)

    def _resample(self, group: Sequence[PastGang]) -> "_Curve":
        return _Curve(self._random.choices(group, k=len(group)) if group else ())


def _keys_of(kind: GangKind) -> Sequence[tuple[str, ...]]:
    return ((kind.project, kind.name), (kind.project, kind.user, ""), ())


class _Curve:
    """The part of gangs that hold their nodes for longer than each time."""

    __slots__ = ("_gone", "_times", "ended", "longest_s")

    def __init__(self, gangs: Sequence[PastGang]) -> None:
        self._times: list[float] = []
        self._gone: list[float] = []  # the part of gangs that have ended by each of the times
        left, among = 1.0, len(gangs)
        for gang in sorted(gangs, key=lambda each: (each.seconds, not each.ended)):
            if gang.ended:
                left *= 1 - 1 / among
                self._times.append(gang.seconds)
                self._gone.append(1 - left)
            among -= 1
        self.ended = len(self._times)
        self.longest_s = self._times[-1] if self._times else 0.0

    def draw(self, age_s: float, part: float) -> float | None:
        """Return after how many seconds the gang ends if `part` of the gangs that reach its age
        hold their nodes for longer. Return None if it runs longer than all that have ended."""
        place = bisect_right(self._times, age_s)
        if place == len(self._times):
            return None
        alive = 1 - (self._gone[place - 1] if place else 0.0)
        target = 1 - alive * part
        at = bisect_left(self._gone, target - 1e-9, place)
        return self._times[at] if at < len(self._times) else None


def find_kind(project: str, user: str, name: str) -> GangKind:
    """Return the kind of a job. Jobs whose names differ only in the number at the end, such as
    train-2 and train-3, are of the same kind."""
    return GangKind(project, user, name.rstrip("0123456789").rstrip("-") or name)
