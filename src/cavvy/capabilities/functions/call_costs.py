"""What calls cost: their shares of the bills of jobs. Everything here is pure."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from cavvy.domain.events import Charge, ChargeKind


class JobBill(NamedTuple):
    """The bill of a job so far in micro-dollars: of its node, and of all. `billed_us` is
    the time that the node was billed for, in microseconds."""

    node_micros: int
    all_micros: int
    billed_us: int

    def price(self, share_us: int) -> int:
        """Return what this share of the job's time costs, in micro-dollars: at the mean price of
        the node so far, rounded down, so that calls never cost more than their job."""
        if self.billed_us <= 0:
            return 0
        return self.node_micros * min(share_us, self.billed_us) // self.billed_us


class JobShares(NamedTuple):
    """How the bill of a job is divided, in micro-dollars: among the kept calls, among other calls,
    and the rest, in which no call ran (start, idle time, end)."""

    bill: int
    kept: int
    others: int
    rest: int


def add_up(charges: Iterable[Charge]) -> JobBill:
    """Return the bill that these charges of a job make."""
    node = every = billed_us = 0
    for each in charges:
        every += each.amount.micros
        if each.kind is ChargeKind.NODE:
            node += each.amount.micros
            billed_us += (each.until - each.since) // timedelta(microseconds=1)
    return JobBill(node, every, billed_us)


def divide(bill: JobBill, kept_us: int, shared_us: int) -> JobShares:
    """Divide a bill. The kept calls have a part of the time in which any calls ran (`shared_us`),
    which the broker tells from time to time, so that it may be a bit behind them."""
    kept = min(bill.price(kept_us), bill.all_micros)
    others = min(max(bill.price(shared_us) - kept, 0), bill.all_micros - kept)
    return JobShares(bill.all_micros, kept, others, bill.all_micros - kept - others)


def price_calls(
    calls: Sequence[tuple[str, str, int]], bills: Mapping[str, JobBill]
) -> dict[str, int]:
    """Return the cost of calls, each an ID with its job and its share in microseconds; without
    those whose job has no bill yet."""
    return {
        call: bills[job].price(share_us)
        for call, job, share_us in calls
        if job in bills and bills[job].billed_us > 0
    }
