"""Compares the ledger with an independent recount over random histories.

    python scripts/drills/ledger.py --histories 1000
    python scripts/drills/ledger.py --histories 1000 --url postgresql+psycopg://user@host/empty

Each history is a job with attempts whose nodes are launched, polled, repriced, corrected, preempted
and closed, while the server crashes between writes, repeats them, and opens the database again.
The recount uses only what truly happened (starts, ends and prices), in exact fractions, and none of
the functions that make bills or entries. It compares every line, the sums by project, user and
month, and what discounts take off, before and after a restart. The exit code is 1 if one differs.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction

from cavvy.control.budgets import post_discounts
from cavvy.costs.discounts import parse_discounts
from cavvy.costs.metering import bill
from cavvy.domain.events import Charge, Event
from cavvy.domain.jobs import Attempt, JobRecord, attempt_id
from cavvy.domain.ledger import LedgerEntry
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, replace
from cavvy.store.base import AtomicWrite, LedgerFilter
from cavvy.store.sql import Store

_BEGAN = datetime(2026, 10, 30, tzinfo=UTC)
_HOUR_US = 3_600_000_000
_PERCENT = 7
_US = timedelta(microseconds=1)


class DrilledNode(Struct, frozen=True, kw_only=True):
    """What truly happened to a node: its start, its end, and its prices from their times on."""

    attempt: Attempt
    rank: int
    started: datetime
    ended: datetime
    prices: tuple[tuple[datetime, int], ...]
    minimum: timedelta

    def recount(self) -> int:
        """The cost in micro-dollars: each stretch at one price is rounded once, half up."""
        edges = [max(at, self.started) for at, _ in self.prices] + [self.ended]
        total = 0
        for (_, rate), since, until in zip(self.prices, edges[:-1], edges[1:], strict=True):
            total += _round(rate, until - since) if until > since else 0
        rest = self.started + self.minimum - self.ended
        return total + (_round(self.prices[-1][1], rest) if rest > timedelta(0) else 0)


def _round(rate: int, length: timedelta) -> int:
    return int(Fraction(rate * (length // _US), _HOUR_US) + Fraction(1, 2))


def _bill(node: DrilledNode, started: datetime, until: datetime, *, final: bool) -> list[Charge]:
    return bill(
        attempt=node.attempt,
        rank=node.rank,
        started=started,
        until=until,
        rates=[(at, HourlyRate(rate)) for at, rate in node.prices if at < until],
        minimum=node.minimum,
        final=final,
    )


class DrilledStore:
    """A store that can crash: the database is opened again, and the last write is repeated."""

    def __init__(self, url: str, dice: random.Random) -> None:
        self.url, self.dice, self.store = url, dice, Store(url)

    async def commit(self, changes: AtomicWrite) -> None:
        await self.store.commit(changes)
        if self.dice.random() < 0.2:  # the reply was lost, so the same bill is written again
            await self.store.commit(AtomicWrite(charges=changes.charges))
        if self.dice.random() < 0.02:
            await self.restart()

    async def restart(self) -> None:
        await self.store.close()
        self.store = Store(self.url)
        await self.store.open()


async def play_history(
    drilled: DrilledStore, dice: random.Random, number: int
) -> list[DrilledNode]:
    """Play one job's history. Returns what truly happened to its nodes."""
    job = JobRecord(
        id=f"job{number:05}",
        project=dice.choice(["default", "vision"]),
        name=f"job{number}",
        user=dice.choice(["ada", "bob"]),
        task=TaskSpec(name="t", run="true", tags={"team": dice.choice("xy")}),
        submitted_at=_BEGAN,
        since=_BEGAN,
    )
    event = Event(project=job.project, job_id=job.id, at=_BEGAN, kind="queued", text="submitted")
    await drilled.store.submit(job, event)
    found: list[DrilledNode] = []
    at = _BEGAN + timedelta(seconds=dice.randrange(86400))
    for attempt_number in range(1, dice.randint(1, 3) + 1):  # each but the last was preempted
        attempt = _make_attempt(dice, job, attempt_number, at)
        await drilled.store.commit(AtomicWrite(attempts=[attempt]))
        for rank in range(attempt.nodes):
            node = _make_node(dice, attempt, rank, at)
            await _play_node(drilled, dice, node)
            found.append(node)
        at = max(each.ended for each in found) + timedelta(seconds=dice.randrange(600))
    return found


def _make_attempt(dice: random.Random, job: JobRecord, number: int, at: datetime) -> Attempt:
    offer = Offer(
        provider=dice.choice(["aws", "gcp"]),
        region="here",
        instance_type="big",
        accelerator="H100",
        accelerator_count=8,
        purchase=dice.choice([*Purchase]),
        rate=HourlyRate(dice.randrange(1, 10**8)),
    )
    return Attempt(
        id=attempt_id(job.id, number),
        job_id=job.id,
        project=job.project,
        number=number,
        gang=f"{job.id}-{number}",
        nodes=dice.randint(1, 2),
        offer=offer,
        created_at=at,
        since=at,
    )


def _make_node(dice: random.Random, attempt: Attempt, rank: int, at: datetime) -> DrilledNode:
    started = at + timedelta(microseconds=dice.randrange(10**8))
    ended = started + timedelta(microseconds=dice.randrange(1, 3 * 86400 * 10**6))
    changes = sorted(started + (ended - started) * dice.random() for _ in range(dice.randint(0, 3)))
    prices = [(started, attempt.offer.rate.micros_per_hour)]
    for change in changes:
        if change > prices[-1][0]:
            factor = dice.choice([10, 2, 1.31, 0.5])
            prices.append((change, int(prices[-1][1] * factor) + 1))
    minimum = timedelta(seconds=dice.choice([0, 0, 3600]))
    return DrilledNode(
        attempt=attempt,
        rank=rank,
        started=started,
        ended=ended,
        prices=tuple(prices),
        minimum=minimum,
    )


async def _play_node(drilled: DrilledStore, dice: random.Random, node: DrilledNode) -> None:
    """Write the node's bill at random polls, some of which know less than the truth, and at the
    end.
    """
    polls = sorted(dice.random() for _ in range(dice.randint(0, 6)))
    for poll in polls:
        until = node.started + (node.ended - node.started) * poll * 1.2  # too late: a correction
        told = node
        if dice.random() < 0.3 and len(node.prices) > 1:  # a price that is known only later
            told = replace(node, prices=node.prices[:-1])
        started = node.started + timedelta(seconds=dice.choice([0, 0, 0, 13]))
        if until > started:
            charges = _bill(told, started, until, final=False)
            await drilled.commit(AtomicWrite(charges=charges))
    final = _bill(node, node.started, node.ended, final=True)
    await drilled.commit(AtomicWrite(charges=final))


async def compare(store: Store, nodes: Sequence[DrilledNode]) -> list[str]:
    """What differs between the ledger and the recount."""
    lines = await read_all(store)
    charged: Counter[tuple[str, int]] = Counter()
    by_project: Counter[str] = Counter()
    by_month: Counter[str] = Counter()
    discounted: Counter[tuple[str, str]] = Counter()
    of_month: Counter[tuple[str, str]] = Counter()
    for entry in lines:
        month = f"{entry.since:%Y-%m}"
        by_project[entry.project] += entry.amount.micros
        by_month[month] += entry.amount.micros
        if entry.kind == "discount":
            discounted[entry.line, month] -= entry.amount.micros
            continue
        charged[entry.subject, entry.rank] += entry.amount.micros
        if entry.subject in {each.attempt.id for each in nodes if _is_aws(each)}:
            of_month["aws", month] += entry.amount.micros
    faults = []
    for node in nodes:
        key = node.attempt.id, node.rank
        if charged.pop(key, 0) != node.recount():
            faults.append(f"{key}: the ledger differs from {node.recount()}")
    faults += [f"{key}: nothing was run for {amount}" for key, amount in charged.items() if amount]
    for (_, month), amount in of_month.items():
        if discounted[f"aws:{_PERCENT}%", month] != amount * _PERCENT // 100:
            faults.append(f"discount of {month} is {discounted} of {amount}")
    for dimension, expected in (("project", by_project), ("month", by_month)):
        sums = await store.sum_ledger(LedgerFilter(), (dimension,))
        told = {each.groups[dimension]: each.amount.micros for each in sums}
        if told != expected:
            faults.append(f"by {dimension}: {told} is not {expected}")
    return faults


def _is_aws(node: DrilledNode) -> bool:
    return node.attempt.offer.provider == "aws"


async def read_all(store: Store) -> list[LedgerEntry]:
    """All entries of the ledger."""
    found: list[LedgerEntry] = []
    after = 0
    while lines := await store.ledger_lines(LedgerFilter(), after=after):
        found += [line.entry for line in lines]
        after = lines[-1].entry.number
    return found


async def play(url: str, histories: int, seed: int) -> list[str]:
    """Play random histories in an empty database. Returns what differed."""
    dice = random.Random(seed)
    drilled = DrilledStore(url, dice)
    await drilled.store.open()
    nodes: list[DrilledNode] = []
    for number in range(histories):
        nodes += await play_history(drilled, dice, number)
    discounts = parse_discounts(f"aws:{_PERCENT}%")
    for month in (11, 12, 11):  # the second and third time, nothing is left to post
        await post_discounts(drilled.store, discounts, datetime(2026, month, 5, tzinfo=UTC))
    faults = await compare(drilled.store, nodes)
    before = await read_all(drilled.store)
    await drilled.restart()
    faults += await compare(drilled.store, nodes)
    if await read_all(drilled.store) != before:
        faults.append("the entries changed with the restart")
    await drilled.store.close()
    return faults if before else ["there are no entries"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", help="an empty database; the default is a new SQLite file")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        url = asked.url or f"sqlite:///{folder}/cavvy.db"
        faults = asyncio.run(play(url, asked.histories, asked.seed))
    print("\n".join(faults[:20]) or f"{asked.histories} histories agree with their recount")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
