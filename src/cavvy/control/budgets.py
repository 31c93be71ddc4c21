"""Monitors budgets: sums up spending, sends alerts, and limits running jobs.

Posts the discounts in the settings to the ledger for the current and the previous month.
"""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.control.clock import ControlClock
from cavvy.control.decide.bills import ACCRUE
from cavvy.control.decide.budgets import (
    BudgetAllowance,
    BudgetState,
    SeenSpending,
    ServiceStop,
    find_allowance,
    find_block,
    find_service_stop,
    find_stop,
    list_alerts,
    month_limit,
)
from cavvy.control.decide.rows import make_event
from cavvy.control.running_costs import sum_to_now
from cavvy.control.webhooks import Post, post_json
from cavvy.costs.discounts import Discount, list_bases, spread_discounts
from cavvy.costs.statements import month_period
from cavvy.domain.authorization import list_below, list_line
from cavvy.domain.budgets import ChargedRate, SpendingBudget
from cavvy.domain.jobs import JOB_ENDS, JobPhase, JobRecord
from cavvy.domain.ledger import MonthDiscounts, month_of
from cavvy.domain.services import SERVICE_TAG
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate, Money, format_usd
from cavvy.domain.values import replace
from cavvy.http_client import TargetDenied
from cavvy.store.base import AtomicWrite, JobSummary, LedgerFilter
from cavvy.store.sql import Store

BUDGETS = "budgets"  # the worklist's key
_REFRESH = timedelta(seconds=15)  # maximum age of the sums of the ledger
_LIVE = [phase for phase in JobPhase if phase not in JOB_ENDS]
_PAGE = 500
# How long the spending that a pass has found is used. A job that no pass has renewed is reconciled
# by another server.
_RENEWED = 2 * ACCRUE
_log = logging.getLogger(__name__)

_SUMS = ("subject", "account")


class BudgetKeeper:
    """Reports to the queue and the jobs' reconciler what the budgets permit. The sums of the ledger
    are at most 15 s old. `BudgetKeeper` adds the newer spending of running jobs, read from this
    server's passes or, for jobs that other servers reconcile, from the newest charges.
    """

    def __init__(self, store: Store, clock: ControlClock, post: Post | None = None) -> None:
        self._store = store
        self._clock = clock
        self._post = post or post_json
        self._states: list[BudgetState] = []
        self._parents: Mapping[str, str | None] = {}  # each project -> its parent
        self._read_at: datetime | None = None
        self._reading = asyncio.Lock()
        self._seen: dict[str, SeenSpending] = {}  # by job ID

    def expire(self) -> None:
        """Discard the cached budgets, so that the next query reads them from the store."""
        self._read_at = None

    async def find_block(self, job: JobRecord) -> str:
        """Return why the job may start no paid work, or "" if the job may start it."""
        await self._refresh()
        return find_block(self._covering(job), job.project, self._clock.now())

    async def find_stop(self, job: JobRecord) -> str:
        """Return why the job's nodes must be released, or "" if they may be kept."""
        await self._refresh()
        return find_stop(self._covering(job), job.project, self._clock.now())

    async def watches(self, job: JobRecord) -> bool:
        """Return whether a budget may stop the job while it runs."""
        await self._refresh()
        return any(each.budget.hard_percent is not None for each in self._covering(job))

    async def find_allowance(
        self, job: JobRecord, spent: Money, rate: HourlyRate
    ) -> BudgetAllowance | None:
        """Return how much a running job may spend in total, given the amount that it has spent
        until now.
        """
        now, known = self._clock.now(), self._seen.get(job.id)
        if known is None:
            known = SeenSpending(at=now, spent=spent, rate=rate, posted=spent, project=job.project)
            self.expire()
        self._seen[job.id] = replace(known, at=now, spent=spent, rate=rate)
        await self._refresh()
        return find_allowance(self._covering(job), job.id, now)

    async def reconcile(self) -> timedelta | None:
        """Send the alerts that are due, and return the time until the next call. If there are no
        budgets, return None: the next call is then made when a budget is created.
        """
        self.expire()
        await self._refresh()
        now = self._clock.now()
        for state in self._states:
            spent = self._with_running(state).spent(now)
            for percent in list_alerts(state, spent):
                await self._alert(state, percent, spent, now)
        return _REFRESH if self._states else None

    async def renew_alerts(self, name: str) -> None:
        """Let the alerts of a changed budget be sent again for each share that the spending of this
        month does not reach now.
        """
        self.expire()
        await self._refresh()
        for state in self._states:
            if state.budget.name == name:
                reached = list_alerts(state, self._with_running(state).spent(self._clock.now()))
                await self._store.budgets.forget_alerts(name, state.month, max(reached, default=0))

    async def find_service_stop(self, task: TaskSpec, user: str, drain: timedelta) -> ServiceStop:
        """Return the budgets that stop the service with this task and user, whose replicas may take
        the time `drain` to end.
        """
        await self._refresh()
        states = self._find(task.project, user, {**task.tags, SERVICE_TAG: task.name})
        return find_service_stop(states, self._clock.now(), drain + ACCRUE)

    def _covering(self, job: JobRecord) -> list[BudgetState]:
        return self._find(job.project, job.user, job.task.tags)

    def _find(self, project: str, user: str, tags: Mapping[str, str]) -> list[BudgetState]:
        return [
            self._with_running(state)
            for state in self._states
            if state.budget.covers(self._line(project), user, tags)
        ]

    def _line(self, project: str) -> Sequence[str]:
        return list_line(project, self._parents)

    def _with_running(self, state: BudgetState) -> BudgetState:
        oldest = self._clock.now() - _RENEWED
        here = {
            job_id: self._seen[job_id]
            for job_id in state.running
            if job_id in self._seen and self._seen[job_id].at >= oldest
        }
        return replace(state, running={**state.running, **here})

    async def _refresh(self) -> None:
        # all jobs wait for the first answer, so that no job starts without it
        async with self._reading:
            now = self._clock.now()
            if self._read_at is None or now - self._read_at >= _REFRESH:
                await self._read(now)
                self._read_at = now

    async def _read(self, now: datetime) -> None:
        budgets = await self._store.budgets.list()
        self._parents = await read_parents(self._store) if budgets else {}
        live = await self._read_live() if budgets else []
        rates = await self._store.budgets.charged_rates() if live else {}
        known = {job.id: _by_charges(job, rates.get(job.id), now) for job in live}
        # The ledger is read after the jobs' sums, so that no spending is missing from both.
        self._states = [await self._read_state(each, live, known, now) for each in budgets]
        self._seen = {
            job_id: replace(
                seen, posted=known[job_id].posted, posted_until=known[job_id].posted_until
            )
            for job_id, seen in self._seen.items()
            if job_id in known
        }

    async def _read_live(self) -> list[JobSummary]:
        found: list[JobSummary] = []
        cursor: str | None = None
        while True:
            page = await self._store.list_jobs(None, _LIVE, cursor, _PAGE)
            found += [job for job in page.jobs if job.attempt]
            cursor = page.cursor
            if cursor is None:
                return found

    async def _read_state(
        self,
        budget: SpendingBudget,
        live: Sequence[JobSummary],
        known: Mapping[str, SeenSpending],
        now: datetime,
    ) -> BudgetState:
        this = month_of(now)
        last = Money()
        if budget.carry_over:
            last = await self._sum(budget, month_of(this - timedelta(days=1)))
        which = filter_budget(budget, self._parents, *month_period(this))
        sums = await self._store.sum_ledger(which, ("project",))
        return BudgetState(
            budget=budget,
            month=this,
            limit=month_limit(budget, last, now),
            posted=Money(sum(each.amount.micros for each in sums)),
            by_project={each.groups["project"]: each.amount for each in sums},
            running={
                job.id: known[job.id]
                for job in live
                if budget.covers(self._line(job.project), job.user, job.tags)
            },
        )

    async def _sum(self, budget: SpendingBudget, month: datetime) -> Money:
        return await sum_budget(self._store, budget, self._parents, month)

    async def _alert(self, state: BudgetState, percent: int, spent: Money, now: datetime) -> None:
        """Notify running jobs and the webhook, once per month for each percentage."""
        budget = state.budget
        text = f"{percent}% of the budget {budget.name} is spent: {format_usd(spent)} of "
        text += format_usd(state.limit)
        told = {
            each.project: f"{percent}% of the budget {budget.name} is spent"
            + state.say_part(each.project, now)
            for each in state.running.values()
        }
        month = month_of(now)
        if not await self._store.budgets.claim_alert(budget, month, percent, text, now, told):
            return
        jobs = [await self._store.job(job_id) for job_id in state.running]
        events = [
            make_event(
                job, now, "budget", text + state.say_part(job.project, now), fact=budget.name
            )
            for job in jobs
        ]
        if events:
            await self._store.commit(AtomicWrite(events=events))
        if budget.webhook:
            sent = {
                "event": "budget",
                "budget": budget.name,
                "percent": percent,
                "spent_micros": spent.micros,
                "limit_micros": state.limit.micros,
                "text": text,
            }
            try:
                problem = await self._post(budget.webhook, json.dumps(sent).encode())
            except TargetDenied as error:
                problem = str(error)
            if problem:
                _log.warning("a budget's webhook failed", extra={"budget": budget.name})


def _by_charges(job: JobSummary, charged: ChargedRate | None, now: datetime) -> SeenSpending:
    """Return the amount that a job has spent according to the charges in the store."""
    return SeenSpending(
        project=job.project,
        at=now if charged is None else charged.until,
        spent=job.spent,
        rate=HourlyRate() if charged is None else charged.rate,
        posted=job.spent,
        posted_until=None if charged is None else charged.until,
    )


async def read_parents(store: Store) -> Mapping[str, str | None]:
    """Return the parent of each project."""
    return {each.name: each.parent for each in await store.projects()}


def filter_budget(
    budget: SpendingBudget, parents: Mapping[str, str | None], since: datetime, until: datetime
) -> LedgerFilter:
    """Return a filter that selects a period's ledger entries that count toward a budget."""
    return LedgerFilter(
        projects=list_below(budget.project, parents) if budget.project else None,
        user=budget.user or None,
        tag=budget.tag_pair,
        service=budget.service or None,
        since=since,
        until=until,
    )


async def sum_budget(
    store: Store,
    budget: SpendingBudget,
    parents: Mapping[str, str | None],
    month: datetime,
    now: datetime | None = None,
) -> Money:
    """Return the sum of the ledger's entries that count toward a budget in a month. With `now`,
    what running nodes cost since their newest entries is added.
    """
    which = filter_budget(budget, parents, *month_period(month))
    sums = await (store.sum_ledger(which, ()) if now is None else sum_to_now(store, which, (), now))
    return sums[0].amount if sums else Money()


async def post_discounts(store: Store, discounts: Sequence[Discount], now: datetime) -> int:
    """Post the current amounts of the discounts, minus the amounts that were posted before.
    Discounts that are no longer in the settings are reversed. Return the number of new entries.
    """
    count = 0
    this = month_of(now)
    for month in (month_of(this - timedelta(days=1)), this):
        posted = MonthDiscounts(month=month)
        if discounts:
            since, until = month_period(month)
            sums = await store.sum_ledger(LedgerFilter(since=since, until=until), _SUMS)
            charged = list_bases(
                (each.groups, each.amount.micros - each.discount.micros) for each in sums
            )
            periods = {
                each.groups["subject"]: (each.since, each.until)
                for each in sums
                if each.since is not None and each.until is not None
            }
            spread = spread_discounts(discounts, charged)
            posted = MonthDiscounts(month=month, spread=spread, periods=periods)
        count += await store.post_discounts(posted)
    return count
