"""Chooses the running jobs that give their GPUs back, so that a project whose quota others have
borrowed gets it. The module does no I/O.

As in Kueue (https://kueue.sigs.k8s.io/docs/concepts/preemption/), only jobs of projects that hold
more than their own quota are chosen, and of them as few as suffice. A quota may count the GPUs of
all products, those with one name, and dollars an hour; a job must be within all that count it.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime

from cavvy.domain.authorization import list_line
from cavvy.domain.shares import GPUS, GangShare, QueueRow
from cavvy.domain.values import Struct
from cavvy.scheduler.shares import SLACK, Amounts, ShareBook, ShareRule, list_amounts, say_part

NOTHING = GangShare()  # if no quota counts what depends on offers


class Borrower(Struct, frozen=True, kw_only=True):
    """A running job that may give its gang back. `saves` means that the job saves checkpoints,
    `since` is when its work began."""

    gang: str
    project: str
    size: float
    since: datetime
    saves: bool
    share: GangShare = NOTHING


class QuotaReturn(Struct, frozen=True, kw_only=True):
    """The jobs that must give their gangs back, so that a job can start within its quota. The work
    of the last of them began at `since`."""

    borrowers: Sequence[Borrower]
    since: datetime


class QuotaClaim(Struct, frozen=True, kw_only=True):
    """A waiting job that may be within its project's quota, and the jobs that run. `suffices`
    returns whether the job could start if these gangs had ended. `share` is what it would hold."""

    row: QueueRow
    running: Sequence[Borrower]
    book: ShareBook
    suffices: Callable[[Collection[str]], bool]
    share: GangShare = NOTHING


def choose_borrowers(claim: QuotaClaim, latest: datetime) -> Sequence[Borrower]:
    """Return the jobs that must end so that the waiting job can start within its project's quota,
    or nothing if no choice suffices. Jobs whose work began after `latest` keep their gangs.

    Jobs that save checkpoints are chosen before others, then jobs of projects that have used most
    for their weight, then those that have run for the shortest time.
    """
    quotas, suffices = ShareQuotas(claim.book), claim.suffices
    if not quotas.entitles(claim.row, claim.share) or suffices(()):
        return ()
    usable = _list_usable(claim, quotas, latest)
    if not usable or not suffices([each.gang for each in usable]):
        return ()
    least = bisect_left(
        range(1, len(usable) + 1),
        True,
        key=lambda count: suffices([each.gang for each in usable[:count]]),
    )
    return _drop_needless(usable[: least + 1], suffices)


def find_return(claim: QuotaClaim, latest: datetime) -> QuotaReturn | None:
    """Return which jobs have borrowed what the waiting job needs of its quota, if those whose work
    began up to `latest` do not suffice. Of the possible choices, the one is returned that may be
    made first. The result is None if the job is not within its quota, or if no choice suffices."""
    begins = sorted({each.since for each in claim.running if each.since > latest})
    if not begins or not choose_borrowers(claim, begins[-1]):
        return None
    least = bisect_left(
        begins,
        True,
        key=lambda latest: len(choose_borrowers(claim, latest)) > 0,
    )
    chosen = choose_borrowers(claim, begins[least])
    return QuotaReturn(borrowers=chosen, since=begins[least])


class QuotaLoan(Struct, frozen=True, kw_only=True):
    """What a project holds of another project's quota: `amount` of what the quota counts."""

    lender: str
    borrower: str
    name: str
    amount: float


def list_loans(book: ShareBook) -> Sequence[QuotaLoan]:
    """Return who has borrowed what projects do not use of their quotas. What a project holds above
    its own quota, or without a quota, is borrowed, the most from the project that uses least of its
    quota.
    """
    quotas = ShareQuotas(book)
    loans = []
    for name in quotas.names:
        lenders, borrowers = quotas.balance(name)
        while lenders and borrowers:
            lender, left = lenders.pop()
            borrower, wanted = borrowers.pop()
            amount = min(left, wanted)
            loan = QuotaLoan(lender=lender, borrower=borrower, name=name, amount=amount)
            loans.append(loan)
            lenders += [(lender, left - amount)] if left - amount > SLACK else []
            borrowers += [(borrower, wanted - amount)] if wanted - amount > SLACK else []
    return loans


def _list_usable(claim: QuotaClaim, quotas: "ShareQuotas", latest: datetime) -> Sequence[Borrower]:
    row = claim.row
    own = quotas.list_counted(row.project, claim.share, row.size).keys()
    candidates = [
        each
        for each in claim.running
        if each.since <= latest
        and each.project != row.project
        and own.isdisjoint(quotas.list_counted(each.project, each.share, each.size))
    ]
    candidates.sort(
        key=lambda each: (not each.saves, -quotas.rank(each.project), latest - each.since)
    )
    return quotas.drop_lenders(candidates)


def _drop_needless(
    chosen: Sequence[Borrower], suffices: Callable[[Collection[str]], bool]
) -> Sequence[Borrower]:
    kept = list(chosen)
    for each in chosen[:-1]:  # without the last, the others do not suffice
        fewer = [one for one in kept if one is not each]
        if suffices([one.gang for one in fewer]):
            kept = fewer
    return kept


class ShareQuotas:
    """What is held of each quota. Of the quotas above a project that count the same, the nearest
    counts its jobs. The key of a quota is its project and what it counts."""

    def __init__(self, book: ShareBook) -> None:
        self._book = book
        self._quotas = {
            (owner, name): quota
            for owner, rule in book.rules.items()
            for name, quota in rule.all_quotas.items()
        }
        self.names = sorted({name for _, name in self._quotas})
        self._counted: dict[tuple[str, GangShare, float], Mapping[tuple[str, str], float]] = {}
        self._held: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._unowned: defaultdict[tuple[str, str], float] = defaultdict(float)  # without a quota
        for each in book.held:
            self._add(each.project, {GPUS: each.gpus + each.idle})
        on_offers = [name for name in self.names if name != GPUS]
        for gang in book.gangs:
            self._add(gang.project, list_amounts(on_offers, gang.share))

    def list_counted(
        self, project: str, share: GangShare, size: float
    ) -> Mapping[tuple[str, str], float]:
        """Return the quotas that count a gang of the project, and what they count of it."""
        gang = project, share, size
        if gang not in self._counted:
            amounts = list_amounts(self.names, share, size)
            self._counted[gang] = self._find_counting(project, amounts)
        return self._counted[gang]

    def entitles(self, row: QueueRow, share: GangShare) -> bool:
        """Return whether the job is within its quotas if it holds this."""
        counted = self.list_counted(row.project, share, row.size)
        return len(counted) > 0 and all(
            self._held[key] + amount <= self._quotas[key] + SLACK for key, amount in counted.items()
        )

    def explain(self, row: QueueRow, share: GangShare) -> str:
        """Return which quota the job would exceed if it holds this, or ""."""
        for (owner, name), amount in self.list_counted(row.project, share, row.size).items():
            held, quota = self._held[owner, name], self._quotas[owner, name]
            if held + amount > quota + SLACK:
                return (
                    f"above the quota of project {owner}, which holds {say_part(name, held, quota)}"
                )
        return ""

    def rank(self, project: str) -> float:
        """Return what the project has used for its weight."""
        weight = self._book.rules.get(project, ShareRule()).weight
        return self._book.used_h.get(project, 0.0) / max(weight, SLACK)

    def drop_lenders(self, candidates: Sequence[Borrower]) -> Sequence[Borrower]:
        """Return the candidates, in their order, as long as their projects hold more than one of
        the quotas that count them."""
        found = []
        left = defaultdict(float, self._held)
        for each in candidates:
            counted = self.list_counted(each.project, each.share, each.size)
            if counted and all(left[key] <= self._quotas[key] + SLACK for key in counted):
                continue
            for key, amount in counted.items():
                left[key] -= amount
            found.append(each)
        return found

    def count_spare(self, project: str, share: GangShare, size: float) -> float | None:
        """Return how many gangs like this the project holds above its quotas: as in `drop_lenders`,
        above one of them suffices. The result is None if no quota counts them."""
        counted = self.list_counted(project, share, size)
        over = [(self._held[key] - self._quotas[key]) / each for key, each in counted.items()]
        return max(0.0, *over) if over else None

    def balance(self, name: str) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
        """Return the projects that do not use all of their quotas that count this, and those that
        hold more than theirs, each with the amount, which ascends."""
        quotas = [(owner, quota) for (owner, what), quota in self._quotas.items() if what == name]
        beyond = [(owner, self._held[owner, name] - quota) for owner, quota in quotas]
        lenders = [(owner, -amount) for owner, amount in beyond if amount < -SLACK]
        borrowers = [each for each in beyond if each[1] > SLACK]
        borrowers += [
            (owner, left) for (owner, what), left in self._unowned.items() if what == name
        ]
        return sorted(lenders, key=_by_amount), sorted(borrowers, key=_by_amount)

    def _add(self, project: str, amounts: Amounts) -> None:
        counted = self._find_counting(project, amounts)
        for key, amount in counted.items():
            self._held[key] += amount
        for name in amounts.keys() - {name for _, name in counted}:
            if amounts[name]:
                self._unowned[project, name] += amounts[name]

    def _find_counting(self, project: str, amounts: Amounts) -> Mapping[tuple[str, str], float]:
        line = list_line(project, self._book.parents)
        return {
            (owner, name): amount
            for name, amount in amounts.items()
            if amount
            and (owner := next((each for each in line if (each, name) in self._quotas), None))
        }


def _by_amount(part: tuple[str, float]) -> tuple[float, str]:
    return part[1], part[0]
