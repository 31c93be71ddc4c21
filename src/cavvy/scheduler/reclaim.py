"""Chooses the running jobs that give their GPUs back, so that a project whose quota others have
borrowed gets it. The module does no I/O.

As in Kueue (https://kueue.sigs.k8s.io/docs/concepts/preemption/), only jobs of projects that hold
more than their own quota are chosen, and of them as few as suffice.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from datetime import datetime

from cavvy.domain.authorization import list_line
from cavvy.domain.shares import QueueRow
from cavvy.domain.values import Struct
from cavvy.scheduler.shares import ShareBook, ShareRule

_SLACK = 1e-9  # sums of fractions of GPUs are not exact in floating point


class Borrower(Struct, frozen=True, kw_only=True):
    """A running job that may give its gang back. `saves` means that the job saves checkpoints,
    `since` is when its work began."""

    gang: str
    project: str
    size: float
    since: datetime
    saves: bool


def choose_borrowers(
    row: QueueRow,
    running: Sequence[Borrower],
    book: ShareBook,
    suffices: Callable[[Collection[str]], bool],
    latest: datetime,
) -> Sequence[Borrower]:
    """Return the jobs that must end so that the waiting job `row` can start within its project's
    quota, or nothing if no choice suffices. `suffices` returns whether the job could start if these
    gangs had ended. Jobs whose work began after `latest` keep their gangs.

    Jobs that save checkpoints are chosen before others, then jobs of projects that have used most
    for their weight, then those that have run for the shortest time.
    """
    quotas = _Quotas(book)
    if not quotas.is_entitled(row) or suffices(()):
        return ()
    owner = quotas.find_owner(row.project)
    candidates = [
        each
        for each in running
        if each.since <= latest and quotas.find_owner(each.project) != owner
    ]
    candidates.sort(
        key=lambda each: (not each.saves, -quotas.rank(each.project), latest - each.since)
    )
    usable = quotas.drop_lenders(candidates)
    if not usable or not suffices([each.gang for each in usable]):
        return ()
    least = bisect_left(
        range(1, len(usable) + 1),
        True,
        key=lambda count: suffices([each.gang for each in usable[:count]]),
    )
    return _drop_needless(usable[: least + 1], suffices)


def _drop_needless(
    chosen: Sequence[Borrower], suffices: Callable[[Collection[str]], bool]
) -> Sequence[Borrower]:
    kept = list(chosen)
    for each in chosen[:-1]:  # without the last, the others do not suffice
        fewer = [one for one in kept if one is not each]
        if suffices([one.gang for one in fewer]):
            kept = fewer
    return kept


class _Quotas:
    """What is held below each project that has a quota."""

    def __init__(self, book: ShareBook) -> None:
        self._book = book
        self._held: dict[str, float] = {}
        for each in book.held:
            owner = self.find_owner(each.project)
            if owner is not None:
                self._held[owner] = self._held.get(owner, 0.0) + each.gpus + each.idle

    def find_owner(self, project: str) -> str | None:
        """Return the nearest project, upwards from this one, that has a quota."""
        line = list_line(project, self._book.parents)
        rules = ((name, self._book.rules.get(name)) for name in line)
        return next((name for name, rule in rules if rule and rule.quota is not None), None)

    def is_entitled(self, row: QueueRow) -> bool:
        owner = self.find_owner(row.project)
        return owner is not None and self._left(owner) >= row.size - _SLACK

    def rank(self, project: str) -> float:
        """Return what the project has used for its weight."""
        weight = self._book.rules.get(project, ShareRule()).weight
        return self._book.used_h.get(project, 0.0) / max(weight, _SLACK)

    def drop_lenders(self, candidates: Sequence[Borrower]) -> Sequence[Borrower]:
        """Return the candidates, in their order, as long as their projects hold more than their
        quota."""
        found = []
        left = dict(self._held)
        for each in candidates:
            owner = self.find_owner(each.project)
            if owner is not None:
                if left.get(owner, 0.0) <= self._quota_of(owner) + _SLACK:
                    continue
                left[owner] -= each.size
            found.append(each)
        return found

    def _left(self, owner: str) -> float:
        return self._quota_of(owner) - self._held.get(owner, 0.0)

    def _quota_of(self, owner: str) -> float:
        return self._book.rules[owner].quota or 0.0
