"""Reads what the order of the queue depends on: the projects' shares, quotas and limits, what they
hold, and what they have used.

The use of a project is stored with the GPUs that the project holds since the stored time, so that
it can be computed for any later time. It is stored again when the held GPUs change.
"""

import asyncio
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import chain

from cavvy.control.decide.start_trials import make_row
from cavvy.domain.jobs import Attempt, JobRecord
from cavvy.domain.policies import ProjectPolicy, UserBounds
from cavvy.domain.shares import (
    DOLLARS,
    GPUS,
    MIN_RUN,
    ProjectUse,
    QueueRow,
    accelerators_of_task,
    share_of,
)
from cavvy.domain.values import Struct, replace
from cavvy.scheduler.shares import (
    JOBS,
    SLACK,
    Amounts,
    ExceededBound,
    ProjectStanding,
    QueueTurn,
    ShareBook,
    ShareLimits,
    ShareRule,
    decay,
    give_turns,
    list_exceeded,
    list_standings,
)
from cavvy.store.queue import PlacedRow, sort_rows
from cavvy.store.sql import Store

# How long the order of each thousand waiting jobs is used again even if it has changed, as all
# users may ask at once: to compute it takes about 15 ms.
FRESH = timedelta(milliseconds=500)
# How long the order is used again while its mark is the same: the use of projects decays meanwhile.
UNCHANGED = timedelta(seconds=10)
_MOST_KNOWN = 100_000  # waiting jobs whose accelerators are kept
_AT_ONCE = 1000  # jobs that are read at once
_FEW = 64  # jobs that a pass may start which reads only the first jobs of each project
_LEAST = 4  # jobs of a project or an array that are read at once
_CLOCKS = timedelta(minutes=1)  # by which the clocks of several servers may differ


def _need_gangs(rules: Mapping[str, ShareRule]) -> bool:
    return any(each.needs_gangs for each in rules.values())


def _make_rule(policy: ProjectPolicy) -> ShareRule:
    return ShareRule(
        weight=1.0 if policy.share is None else policy.share,
        quota=policy.quota_gpus,
        limit=policy.max_gpus,
        user_limit=policy.user_gpus,
        user_jobs=policy.user_jobs,
        quotas=_join(policy.quota_accelerators, policy.quota_micros_per_hour),
        limits=_join(policy.max_accelerators, policy.max_micros_per_hour),
        user_limits=_join(policy.user_accelerators, policy.user_micros_per_hour),
        users={name: _make_amounts(each) for name, each in policy.users.items()},
    )


def _make_amounts(limits: UserBounds) -> Amounts:
    singles = {GPUS: limits.gpus, JOBS: limits.jobs}
    known = {name: float(most) for name, most in singles.items() if most is not None}
    return {**known, **_join(limits.accelerators, limits.micros_per_hour)}


def _join(accelerators: Amounts, micros: int | None) -> Amounts:
    return accelerators if micros is None else {**accelerators, DOLLARS: micros}


def advance(
    uses: Mapping[str, ProjectUse], now: datetime, half_life: timedelta
) -> Mapping[str, float]:
    """Return the decayed use of each project in GPU-hours at the time `now`."""
    return {
        name: decay(each.gpu_hours, each.held, now - each.at, half_life)
        for name, each in uses.items()
    }


def find_changes(
    uses: Mapping[str, ProjectUse], book: ShareBook, now: datetime
) -> Mapping[str, ProjectUse]:
    """Return the new use of the projects whose held GPUs have changed, or whose use has a later
    time than now: a clock was wrong, and the use would not decay until then.
    """
    gpus: defaultdict[str, float] = defaultdict(float)
    for each in book.held:
        gpus[each.project] += each.gpus + each.idle
    return {
        name: ProjectUse(gpu_hours=book.used_h.get(name, 0.0), held=gpus[name], at=now)
        for name in {*gpus, *uses}
        if name not in uses
        or abs(uses[name].held - gpus[name]) > SLACK
        or uses[name].at > now + _CLOCKS
    }


class QueuePlace(Struct, frozen=True):
    """A job's position in the queue, 1 for the next job to start, and how many jobs of each project
    are before it."""

    position: int
    ahead: Mapping[str, int]


def take_turns(
    rows: Sequence[QueueRow], book: ShareBook, limit: int
) -> tuple[Sequence[QueueTurn], Sequence[str]]:
    """Return the next turns: at most `limit` jobs that may start, and as many that wait for a
    limit. Also return the IDs of the jobs that had a turn before the last of them."""
    turns: list[QueueTurn] = []
    taken: list[str] = []
    free = limited = 0
    for turn in give_turns(rows, book, brief=True):
        if not turn.limit or limited < limit:
            turns.append(turn)
        free += not turn.limit
        limited += bool(turn.limit)
        if free == limit:
            return turns, taken
        taken.append(turn.row.id)
    return turns, taken


# An array, or the jobs of a project beside arrays.
_LineKey = tuple[str | None, str]


class _ShortLines(Struct, frozen=True, kw_only=True):
    """Arrays and projects of which to read at most `limit` jobs, and projects of which to read so
    many of each user."""

    limit: int
    arrays: Sequence[str]
    projects: Sequence[str]
    users_of: Sequence[str]


class _QueueLines:
    """The first waiting jobs of each line. The next jobs of a line are needed only if all of its
    jobs that are known have their turns.

    Of a line, first a few of its next jobs are read, because most of many lines have few turns in
    a pass, and then as many as may start. Of a project, those of each user come last, because all
    next jobs may wait for a limit of one user.
    """

    def __init__(self, firsts: Sequence[PlacedRow], limit: int) -> None:
        self._lines = {_key_of(row): [(place, row)] for place, row in firsts}
        few = max(_LEAST, 2 * limit // max(1, len(self._lines)))
        # How many jobs each read asks for; the last one asks for so many of each user.
        self._sizes = (few, limit, limit) if few < limit else (limit, limit)
        self._reads = dict.fromkeys(self._lines, 0)  # of each line that may have more jobs
        self._short: Sequence[_LineKey] = ()

    def sort(self) -> Sequence[QueueRow]:
        return sort_rows(chain.from_iterable(self._lines.values()))

    def find_short(self, taken: Sequence[str]) -> "_ShortLines | None":
        """Return the lines of which to read more jobs next if these have their turns, or None if no
        more jobs are needed."""
        had = set(taken)
        short = [key for key in self._reads if self._lines[key][-1][1].id in had]
        if not short:
            return None
        reads = min(self._reads[key] for key in short)
        self._short = [key for key in short if self._reads[key] == reads]
        projects = [key[1] for key in self._short if key[0] is None]
        by_user = reads == len(self._sizes) - 1
        return _ShortLines(
            limit=self._sizes[reads],
            arrays=[array for array, _ in self._short if array is not None],
            projects=[] if by_user else projects,
            users_of=projects if by_user else [],
        )

    def extend(self, more: Sequence[PlacedRow]) -> None:
        """Replace the lines that `find_short` has returned by the jobs that were read of them."""
        read: defaultdict[_LineKey, list[PlacedRow]] = defaultdict(list)
        for place, row in more:
            read[_key_of(row)].append((place, row))
        for key in self._short:
            self._lines[key] = sorted(read[key], key=lambda each: each[0]) or self._lines[key]
            reads, last = self._reads[key], len(self._sizes) - (1 if key[0] is None else 2)
            if reads < last and len(read[key]) == self._sizes[reads]:
                self._reads[key] = reads + 1
            else:
                del self._reads[key]  # it has no more jobs, or no more that count


def _key_of(row: QueueRow) -> _LineKey:
    return row.array, "" if row.array is not None else row.project


class OrderedQueue:
    """All waiting jobs in their order, as they were at the time `at`. `mark` is that of the
    database, see `SqlQueue.mark`. What requests ask is found without a walk along the line."""

    def __init__(
        self, rows: Sequence[QueueRow], book: ShareBook, at: datetime, mark: object
    ) -> None:
        self.rows, self.book, self.at, self.mark = rows, book, at, mark
        self.places: dict[str, int] = {}  # of each job
        self.firsts: dict[str, str] = {}  # the ID of the first job of each array
        self.absent: set[str] = set()  # jobs that were asked for, and did not wait
        places_of: defaultdict[str, list[int]] = defaultdict(list)
        for place, row in enumerate(rows):
            self.places[row.id] = place
            places_of[row.project].append(place)
            if row.array is not None:
                self.firsts.setdefault(row.array, row.id)
        self._places_of = sorted(places_of.items())  # of the jobs of each project

    def is_fresh(self, job_ids: Collection[str], now: datetime) -> bool:
        """Return whether the order may be used again without a look at the mark."""
        return self.knows(job_ids) and now - self.at < len(self.rows) // 1000 * FRESH

    def knows(self, job_ids: Collection[str]) -> bool:
        """Return whether none of these jobs may have arrived since."""
        return all(each in self.places or each in self.absent for each in job_ids)

    def find(self, job_id: str) -> QueuePlace:
        """Return the place of a job of the line."""
        place = self.places[job_id]
        counts = ((name, bisect_left(own, place)) for name, own in self._places_of)
        return QueuePlace(place + 1, {name: count for name, count in counts if count})


class FairQueue:
    """The order of the waiting jobs of all projects."""

    def __init__(self, store: Store, half_life: timedelta, min_run: timedelta = MIN_RUN) -> None:
        self._store = store
        self.half_life = half_life
        self.min_run = min_run  # of work before its nodes are reclaimed for a quota
        self._line = OrderedQueue((), ShareBook(), datetime.min.replace(tzinfo=UTC), None)
        self._lining_up = asyncio.Lock()
        self._rules: Mapping[str, tuple[ProjectPolicy, ShareRule]] = {}  # by project
        self._accelerators: dict[str, tuple[str, ...]] = {}  # of waiting jobs, by their ID

    async def order_heads(self, limit: int, now: datetime) -> tuple[Sequence[QueueTurn], ShareBook]:
        """Return the next jobs in the order of their turns, and the state of all projects. At most
        `limit` of the jobs may start, and at most `limit` wait for a limit if the jobs before them
        start. Also store the use of projects whose held GPUs have changed.
        """
        book, uses = await self._read_book(now)
        if changes := find_changes(uses, book, now):
            await self._store.queue.put_used(changes)
        return await self._read_turns(book, limit, now), book

    async def _read_turns(self, book: ShareBook, limit: int, now: datetime) -> Sequence[QueueTurn]:
        """Read the waiting jobs that have the next turns."""
        if limit > _FEW:
            rows = await self._store.queue.heads(now, limit)
            return take_turns(await self._name_accelerators(rows, book), book, limit)[0]
        lines = _QueueLines(await self._store.queue.firsts(now), limit)
        while True:
            rows = await self._name_accelerators(lines.sort(), book)
            turns, taken = take_turns(rows, book, limit)
            short = lines.find_short(taken)
            if short is None:
                return turns
            more = await self._store.queue.more(
                now,
                short.limit,
                arrays=short.arrays,
                projects=short.projects,
                users_of=short.users_of,
            )
            lines.extend(more)

    async def find_places(
        self, job_ids: Collection[str], now: datetime
    ) -> Mapping[str, QueuePlace]:
        """Return the places of those of the jobs that are in the queue. Jobs that a limit keeps
        waiting come last. The places in a long queue may be a moment old.
        """
        line = await self.line_up(job_ids, now)
        return {each: line.find(each) for each in job_ids if each in line.places}

    async def find_next(self, array_ids: Collection[str], now: datetime) -> Mapping[str, str]:
        """Return for each of the arrays that have jobs in the queue the ID of its first one."""
        firsts = (await self.line_up((), now)).firsts if array_ids else {}
        return {each: firsts[each] for each in array_ids if each in firsts}

    async def line_up(self, job_ids: Collection[str], now: datetime) -> OrderedQueue:
        """Return all waiting jobs in their order. The order is computed again only if something may
        have changed it, or for a job that may have arrived since. That of a long queue may be a
        moment old."""
        if self._line.is_fresh(job_ids, now):
            return self._line
        async with self._lining_up:
            line = self._line
            if line.is_fresh(job_ids, now):
                return line
            mark = await self._store.queue.mark(now)
            if mark != line.mark or now - line.at >= UNCHANGED or not line.knows(job_ids):
                line = await self._line_up(job_ids, now, mark)
            return line

    async def _line_up(self, job_ids: Collection[str], now: datetime, mark: object) -> OrderedQueue:
        book, _ = await self._read_book(now)
        rows = await self._name_accelerators(await self._store.queue.rows(now), book)
        turns = sorted(give_turns(rows, book), key=lambda turn: bool(turn.limit))
        self._line = line = OrderedQueue([each.row for each in turns], book, now, mark)
        line.absent = {each for each in job_ids if each not in line.places}
        return line

    async def find_limit(self, job: JobRecord, gangs: Sequence[Attempt], now: datetime) -> str:
        """Return which limit keeps a running job from these further gangs, or "". They count beside
        the gang that the job leaves, because this one is held until its work has ended."""
        limits = ShareLimits((await self._read_book(now))[0])
        row = make_row(job)
        shares = [share_of(each.offer, each.nodes, row.size) for each in gangs]
        return next((reason for each in shares if (reason := limits.refuse(row, each))), "")

    async def list_standings(self, now: datetime) -> tuple[Sequence[ProjectStanding], ShareBook]:
        """Return where each project stands, and what this was computed from."""
        book = await self._read_whole_book(now)
        return list_standings(await self._store.queue.rows(now), book), book

    async def list_exceeded(
        self, project: str, policy: ProjectPolicy, now: datetime
    ) -> Sequence[ExceededBound]:
        """Return the quotas and limits that the policy would lower below what is held now."""
        return list_exceeded(project, _make_rule(policy), await self._read_whole_book(now))

    async def _read_whole_book(self, now: datetime) -> ShareBook:
        """Return the state of all projects with the gangs that they hold."""
        book, _ = await self._read_book(now)
        return book if book.gangs else replace(book, gangs=await self._store.queue.held_gangs())

    async def _name_accelerators(
        self, rows: Sequence[QueueRow], book: ShareBook
    ) -> Sequence[QueueRow]:
        """Return the rows with the accelerators of their tasks, if a rule counts accelerators."""
        if not _need_gangs(book.rules):
            return rows
        if len(self._accelerators) > _MOST_KNOWN:
            self._accelerators.clear()
        missing = [row.id for row in rows if row.id not in self._accelerators]
        for at in range(0, len(missing), _AT_ONCE):
            for job in await self._store.find_jobs(missing[at : at + _AT_ONCE]):
                self._accelerators[job.id] = accelerators_of_task(job.task)
        return [replace(row, accelerators=self._accelerators.get(row.id, ())) for row in rows]

    async def _read_book(self, now: datetime) -> tuple[ShareBook, Mapping[str, ProjectUse]]:
        """Return the state of all projects, and their use as it is stored."""
        policies, uses = await self._store.policies(), await self._store.queue.used()
        known = self._rules  # the store returns the same object for a policy that has not changed
        self._rules = {
            each.project: known[each.project]
            if each.project in known and known[each.project][0] is each.policy
            else (each.policy, _make_rule(each.policy))
            for each in policies
        }
        rules = {name: rule for name, (_, rule) in self._rules.items()}
        held, running = await self._store.queue.held()
        book = ShareBook(
            parents=policies.parents,
            rules=rules,
            used_h=advance(uses, now, self.half_life),
            held=held,
            running=running,
            gangs=await self._store.queue.held_gangs() if _need_gangs(rules) else (),
        )
        return book, uses
