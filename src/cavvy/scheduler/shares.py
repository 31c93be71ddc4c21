"""Orders the waiting jobs of several projects by fair share, and applies the projects' limits. The
module does no I/O.

Projects with the same parent are compared by their use divided by their weight, level by level from
the installation down, as in Slurm's Fair Tree (https://slurm.schedmd.com/fair_tree.html). The
project with the lowest quotient has the next turn. A project that waits below its quota has its
turn before all projects that do not. Past use decays with a half-life (Slurm's
PriorityDecayHalfLife), so a project that used much long ago is not held back forever.

Use is measured in GPU-hours (see `domain.shares` for nodes without GPUs). Quotas and limits may
also be set for accelerators by their names, and for dollars an hour. Which accelerator a job gets,
and at what price, is known only when it is placed. Therefore `give_turns` applies those of
accelerators only to jobs that accept nothing else, and `ShareLimits.hold` checks the offer.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from heapq import heapify, heappop, heapreplace
from math import exp2, log

from cavvy.catalog.accelerators import is_match, names_matching, split_instance
from cavvy.domain.accounts import INSTALLATION
from cavvy.domain.authorization import list_line
from cavvy.domain.shares import DOLLARS, GPUS, GangShare, HeldGang, HeldShare, QueueRow
from cavvy.domain.units import format_price
from cavvy.domain.values import Struct, field

# A job counts as if it ran for this many hours from now on. Without this, a project whose jobs have
# just started would have used nothing yet, and would get all turns of one pass.
_AHEAD_H = 1.0
SLACK = 1e-9  # GPUs; sums of fractions are not exact in floating point

JOBS = "jobs"  # counted by limits, beside what `domain.shares` names
Amounts = Mapping[str, float]


def decay(used_h: float, held: float, elapsed: timedelta, half_life: timedelta) -> float:
    """Return the decayed use in GPU-hours after `elapsed`, in which `held` GPUs were in use: the
    integral of the held GPUs, each moment weighted by 2^(-age / half_life)."""
    left = exp2(-max(elapsed, timedelta(0)) / half_life)
    return used_h * left + held * (1 - left) * (half_life / timedelta(hours=1)) / log(2)


class ShareRule(Struct, frozen=True, kw_only=True):
    """What a project may use, together with the projects below it. `weight` is its share among the
    projects with the same parent. Below `quota` GPUs, its jobs go before those of projects that
    are not below theirs. It never holds more than `limit` GPUs. `user_limit` and `user_jobs` are
    the most GPUs and running jobs of each user. `quotas`, `limits` and `user_limits` are the same
    for the GPUs of each name and for `DOLLARS`. `users` are limits of users by their names, which
    replace those of each user for the same GPUs, `JOBS` or `DOLLARS`.
    """

    weight: float = 1.0
    quota: float | None = None
    limit: float | None = None
    user_limit: float | None = None
    user_jobs: int | None = None
    quotas: Amounts = field(default_factory=dict)
    limits: Amounts = field(default_factory=dict)
    user_limits: Amounts = field(default_factory=dict)
    users: Mapping[str, Amounts] = field(default_factory=dict)

    @property
    def needs_gangs(self) -> bool:
        """Whether the rule counts what depends on the offers of gangs."""
        if self.quotas or self.limits or self.user_limits:
            return True
        return any(name not in (GPUS, JOBS) for own in self.users.values() for name in own)

    @property
    def has_limits(self) -> bool:
        return bool(self.users or self.bounds)

    @property
    def all_quotas(self) -> Amounts:
        return self.quotas if self.quota is None else {GPUS: self.quota, **self.quotas}

    @property
    def bounds(self) -> Sequence[tuple[bool, str, float]]:
        """The limits: whether each is one of each user, what it counts, and the most of it."""
        if self.limit is self.user_limit is self.user_jobs is None and not self.needs_gangs:
            return ()
        singles = ((False, GPUS, self.limit), (True, GPUS, self.user_limit))
        found = [*singles, (True, JOBS, self.user_jobs)]
        found += [(False, name, most) for name, most in self.limits.items()]
        found += [(True, name, most) for name, most in self.user_limits.items()]
        return [(of_user, name, most) for of_user, name, most in found if most is not None]

    def list_bounds_of(self, user: str) -> Sequence[tuple[bool, str, float]]:
        """Return the limits that apply to the user, as in `bounds`."""
        own = self.users.get(user, {})
        kept = [each for each in self.bounds if not (each[0] and each[1] in own)]
        return [*kept, *((True, name, most) for name, most in own.items())]


def list_amounts(
    names: Iterable[str], share: GangShare, size: float | None = None
) -> dict[str, float]:
    """Return what a gang counts toward the quotas and limits with these names. `size` is its job's
    size, which counts toward `GPUS`."""
    found: dict[str, float] = {}
    for name in names:
        if name == DOLLARS:
            found[name] = share.micros_per_hour
        elif name == GPUS:
            found[name] = share.gpus if size is None else size
        elif share.accelerator and is_match(_whole(share.accelerator), name):
            found[name] = share.gpus
    return found


def list_certain(names: Iterable[str], row: QueueRow) -> dict[str, float]:
    """Return what a waiting job counts toward those of these names that count it on any offer:
    `GPUS`, and accelerators if it accepts no others."""
    found: dict[str, float] = {}
    for name in names:
        named = name not in (GPUS, DOLLARS) and row.accelerators
        if name == GPUS or (named and _covers(name, row.accelerators)):
            found[name] = row.size
    return found


@lru_cache(maxsize=4096)
def _covers(name: str, wanted: tuple[str, ...]) -> bool:
    products = names_matching(name)
    return all(names_matching(_whole(each)) <= products for each in wanted)


def _whole(accelerator: str) -> str:
    """Return the family of which an accelerator is a MIG instance, or the accelerator itself."""
    instance = split_instance(accelerator)
    return instance[0] if instance else accelerator


class ShareBook(Struct, frozen=True, kw_only=True):
    """The state of all projects at one time: their parents and rules, their decayed use in
    GPU-hours without that of the projects below them, and what they hold. `running` are the members
    of each array that run. `gangs` are needed only if a rule counts accelerators or dollars."""

    parents: Mapping[str, str | None] = field(default_factory=dict)
    rules: Mapping[str, ShareRule] = field(default_factory=dict)
    used_h: Mapping[str, float] = field(default_factory=dict)
    held: Sequence[HeldShare] = ()
    running: Mapping[str, int] = field(default_factory=dict)
    gangs: Sequence[HeldGang] = ()


class ProjectStanding(Struct, frozen=True, kw_only=True):
    """Where a project stands in the queue. All numbers but `weight` include the projects below it.

    `part` is what the project should have of the use of all projects, by its weight and those of
    the projects above it, among the projects that use or want something now. `used_part` is what
    it has, and `debt_h` what it has used beyond it, or less than 0 if the others have.
    """

    project: str
    weight: float
    part: float
    used_h: float
    used_part: float
    debt_h: float
    micros_per_hour: float  # of all nodes that it holds
    accelerators: Amounts  # of each product that it holds, on nodes that are kept warm, too
    held: float
    jobs: int
    waiting: float
    waiting_jobs: int


class QueueTurn(Struct, frozen=True):
    """A waiting job in the order of the queue. `limit` is empty if the job may start, and otherwise
    says which limit keeps it waiting."""

    row: QueueRow
    limit: str = ""


def give_turns(
    rows: Iterable[QueueRow], book: ShareBook, *, brief: bool = False
) -> Iterator[QueueTurn]:
    """Yield the waiting jobs in the order in which they have their turns. `rows` are sorted by
    priority and age; jobs of the same project keep this order. Each job counts as started for the
    jobs after it.

    While the first job of a project or of a user waits because of a limit, later jobs under the
    same limit wait, too, so that large jobs are not passed for ever. If `brief` is set, these jobs
    are left out once a project has reached its limit of GPUs.
    """
    rows = [*rows]
    alone = all(row.project == rows[0].project for row in rows)
    line = _LoneLine(rows) if alone else _Tree(book, rows)
    limits = ShareLimits(book)
    while (row := line.next_row()) is not None:
        reason = limits.find(row)
        line.end_turn(starts=not reason, full=limits.list_full(row) if brief and reason else ())
        if not reason:
            limits.start(row)
        yield QueueTurn(row, reason)


# Whether the next job is above the quotas, the use divided by the weight, the job's place in the
# rows, and a name.
_Rank = tuple[bool, float, int, str]


def list_standings(rows: Iterable[QueueRow], book: ShareBook) -> Sequence[ProjectStanding]:
    """Return where each project stands that uses or wants something, sorted by name."""
    sums: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def add(project: str, **amounts: float) -> None:
        for name in list_line(project, book.parents):
            for what, amount in amounts.items():
                sums[name][what] += amount  # type: ignore[assignment]

    for row in rows:
        add(row.project, waiting=row.size, waiting_jobs=1)
    for each in book.held:
        add(each.project, held=each.gpus + each.idle, jobs=each.jobs)
    products: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for gang in book.gangs:
        add(gang.project, micros_per_hour=gang.share.micros_per_hour)
        for name in list_line(gang.project, book.parents) if gang.share.accelerator else ():
            products[name][gang.share.accelerator] += gang.share.gpus
    for project, used_h in book.used_h.items():
        add(project, used_h=used_h)
    active = {
        name for name, found in sums.items() if any(amount > SLACK for amount in found.values())
    }
    parts = _divide(active, book)
    everything = sums[INSTALLATION]["used_h"]
    return [
        ProjectStanding(
            project=name,
            weight=_rule_of(name, book).weight,
            part=parts[name],
            used_h=sums[name]["used_h"],
            used_part=sums[name]["used_h"] / everything if everything else 0.0,
            debt_h=sums[name]["used_h"] - parts[name] * everything,
            micros_per_hour=sums[name]["micros_per_hour"],
            accelerators=products[name],
            held=sums[name]["held"],
            jobs=int(sums[name]["jobs"]),
            waiting=sums[name]["waiting"],
            waiting_jobs=int(sums[name]["waiting_jobs"]),
        )
        for name in sorted(active - {INSTALLATION})
    ]


class ExceededBound(Struct, frozen=True, kw_only=True):
    """A new quota or limit of a project below what the project or, for a limit of users, one user
    holds in it. `name` is what it counts."""

    user: str | None
    is_quota: bool
    name: str
    held: float
    most: float


def list_exceeded(project: str, rule: ShareRule, book: ShareBook) -> Sequence[ExceededBound]:
    """Return those quotas and limits of a new rule of the project that are lower than those of its
    present rule, and than what is held now. Idle nodes do not count."""
    old = _rule_of(project, book)
    bounds = (old, rule)
    names = {name for each in bounds for name in (*each.all_quotas, *_names_of(each))}
    held: defaultdict[str | None, Counter[str]] = defaultdict(Counter)

    def add(owner: str, user: str, amounts: Amounts) -> None:
        for key in (None, user) if project in list_line(owner, book.parents) else ():
            for name, amount in amounts.items():
                held[key][name] += amount  # type: ignore[assignment]

    for each in book.held:
        add(each.project, each.user, {GPUS: each.gpus, JOBS: each.jobs})
    for gang in book.gangs:
        if not gang.idle:
            add(gang.project, gang.user, list_amounts(names - {GPUS, JOBS}, gang.share))
    found = [
        ExceededBound(user=None, is_quota=True, name=name, held=held[None][name], most=most)
        for name, most in rule.all_quotas.items()
        if _is_exceeded(held[None][name], most, old.all_quotas.get(name))
    ]
    for user in sorted(held, key=lambda each: (each is not None, each or "")):
        before, after = (_bounds_on(each, user) for each in bounds)
        found += [
            ExceededBound(user=user, is_quota=False, name=name, held=held[user][name], most=most)
            for name, most in after.items()
            if _is_exceeded(held[user][name], most, before.get(name))
        ]
    return found


def _is_exceeded(held: float, most: float, before: float | None) -> bool:
    return held > most + SLACK and (before is None or most < before)


def _names_of(rule: ShareRule) -> Iterator[str]:
    """Yield what the limits of the rule count."""
    yield from (name for _, name, _ in rule.bounds)
    yield from (name for own in rule.users.values() for name in own)


def _bounds_on(rule: ShareRule, user: str | None) -> Amounts:
    """Return the limits on what the user or, without a user, the whole project holds."""
    bounds = rule.bounds if user is None else rule.list_bounds_of(user)
    return {name: most for of_user, name, most in bounds if of_user == (user is not None)}


def _divide(active: Collection[str], book: ShareBook) -> Mapping[str, float]:
    """Return the part of the whole that each active project should have."""
    parents = {name: [*list_line(name, book.parents), INSTALLATION][1] for name in active}
    weights: Counter[str] = Counter()
    for name in active:
        if name != INSTALLATION:
            weights[parents[name]] += _rule_of(name, book).weight  # type: ignore[assignment]
    parts = {INSTALLATION: 1.0}
    for name in sorted(active, key=lambda each: len(list_line(each, book.parents))):
        if name != INSTALLATION:
            among = weights[parents[name]]
            weight = _rule_of(name, book).weight
            parts[name] = parts.get(parents[name], 1.0) * (weight / among if among else 0.0)
    return parts


def _rule_of(project: str, book: ShareBook) -> ShareRule:
    return book.rules.get(project, ShareRule())


class _Node:
    """A project, or the waiting jobs of a project itself beside those of the projects below it."""

    __slots__ = (
        "children",
        "held",
        "held_of",
        "line",
        "name",
        "next",
        "parent",
        "quotas",
        "used_h",
        "weight",
    )

    def __init__(self, name: str, parent: "_Node | None", rule: ShareRule) -> None:
        self.name, self.parent = name, parent
        self.weight, self.quotas = rule.weight, rule.all_quotas
        self.used_h = self.held = 0.0
        self.held_of: defaultdict[str, float] = defaultdict(float)  # toward its quotas
        self.children: list[tuple[_Rank, _Node]] = []  # heap of those that wait
        self.line: deque[tuple[int, QueueRow]] = deque()
        # the next job of this node: whether it is above all quotas from this node down, its place
        # in the rows, and itself
        self.next: tuple[bool, int, QueueRow | None] = (True, 0, None)

    def rank(self) -> _Rank:
        """Return the key by which the node is compared with the other children of its parent, and
        set `next`. The lowest key has the next turn."""
        if self.children:
            above, place, row = self.children[0][1].next
        else:
            above, (place, row) = True, self.line[0]
        assert row is not None
        own = above if not self.quotas else not self._is_within(row, otherwise=not above)
        self.next = (above and own, place, row)
        ratio = (self.used_h + self.held * _AHEAD_H) / self.weight if self.weight else float("inf")
        return own, ratio, place, self.name

    def _is_within(self, row: QueueRow, *, otherwise: bool) -> bool:
        """Return whether the job is within the quotas of this node that count it. The price of a
        job is not known yet, so a quota of dollars counts it as long as some of it is left."""
        wanted = list_certain(self.quotas, row)
        if DOLLARS in self.quotas:
            wanted[DOLLARS] = 1.0
        if not wanted:
            return otherwise
        return all(
            self.held_of[name] + amount <= self.quotas[name] + SLACK
            for name, amount in wanted.items()
        )

    def count(self, amounts: Amounts) -> None:
        for name, amount in amounts.items():
            self.held_of[name] += amount

    @property
    def waits(self) -> bool:
        return bool(self.children or self.line)


class _LoneLine:
    """The waiting jobs of one project when no other project waits: there is nothing to compare."""

    def __init__(self, rows: Iterable[QueueRow]) -> None:
        self._rows = deque(rows)

    def next_row(self) -> QueueRow | None:
        return self._rows[0] if self._rows else None

    def end_turn(self, *, starts: bool, full: Collection[str]) -> None:
        self._rows.popleft()
        if full:
            self._rows.clear()


class _Tree:
    """The waiting jobs of several projects, which take turns."""

    def __init__(self, book: ShareBook, rows: Iterable[QueueRow]) -> None:
        self._book = book
        self._root = _Node(INSTALLATION, None, ShareRule())
        self._nodes = {INSTALLATION: self._root}
        self._own: dict[str, _Node] = {}
        self._turn: _Node | None = None
        for place, row in enumerate(rows):
            self._own_of(row.project).line.append((place, row))
        for project, used_h in book.used_h.items():
            self._add(project, used_h=used_h)
        for each in book.held:
            self._add(each.project, held=each.gpus + each.idle)
        for gang in book.gangs:
            self._add_gang(gang)
        self._fill()

    def next_row(self) -> QueueRow | None:
        """Return the job that has the next turn, or None if no job is left."""
        node = self._root
        while node.children:
            node = node.children[0][1]
        self._turn = node
        return node.line[0][1] if node.line else None

    def end_turn(self, *, starts: bool, full: Collection[str]) -> None:
        """Remove the job that had its turn. If it starts, count it as held from now on. Also remove
        the other jobs of those of its projects that are `full`."""
        node = self._turn
        assert node is not None
        _, row = node.line.popleft()
        while True:
            if starts:
                node.held += row.size
                node.count(list_certain(node.quotas, row))
            if full and any(self._nodes.get(name) is node for name in full):
                node.children.clear()
            parent = node.parent
            if parent is None:
                return
            if node.waits:
                heapreplace(parent.children, (node.rank(), node))
            else:
                heappop(parent.children)
            node = parent

    def _own_of(self, project: str) -> _Node:
        if project not in self._own:
            self._own[project] = _Node("", self._node_of(project), ShareRule())
        return self._own[project]

    def _node_of(self, project: str) -> _Node:
        if project in self._nodes:
            return self._nodes[project]
        node = self._root
        for name in reversed(list_line(project, self._book.parents)):
            if name not in self._nodes:
                self._nodes[name] = _Node(name, node, _rule_of(name, self._book))
            node = self._nodes[name]
        return node

    def _add(self, project: str, *, used_h: float = 0.0, held: float = 0.0) -> None:
        """Add to the project and to the projects above it."""
        node: _Node | None = self._own_of(project)
        while node is not None:
            node.used_h += used_h
            node.held += held
            if held and GPUS in node.quotas:
                node.held_of[GPUS] += held
            node = node.parent

    def _add_gang(self, gang: HeldGang) -> None:
        node: _Node | None = self._own_of(gang.project)
        while node is not None:
            if node.quotas:
                names = [each for each in node.quotas if each != GPUS]  # `_add` has counted these
                node.count(list_amounts(names, gang.share))
            node = node.parent

    def _fill(self) -> None:
        """Build the heaps of all nodes. A node was made after its parent, and is filled before."""
        for node in (*self._own.values(), *reversed(self._nodes.values())):
            heapify(node.children)
            if node.parent is not None and node.waits:
                node.parent.children.append((node.rank(), node))


class ShareLimits:
    """What counts toward the limits of projects and users, and the limits that keep a job waiting.
    The key of a limit is its project, its user or, for all users together, None, and what it
    counts."""

    def __init__(self, book: ShareBook) -> None:
        self._parents = book.parents
        limited = {name: rule for name, rule in book.rules.items() if rule.has_limits}
        self._bounds = {name: rule.bounds for name, rule in limited.items()}
        self._bounds_of = {
            (name, user): rule.list_bounds_of(user)
            for name, rule in limited.items()
            for user in rule.users
        }
        every = (*self._bounds.values(), *self._bounds_of.values())
        names = {name for bounds in every for _, name, _ in bounds}
        self._on_offers = sorted(names - {GPUS, JOBS})  # what depends on the offer
        self._held: defaultdict[tuple[str, str | None, str], float] = defaultdict(float)
        self._full: dict[tuple[str, str | None, str], str] = {}
        self._lines: dict[str, Sequence[str]] = {}
        self._members = Counter(book.running)
        for each in book.held if self._bounds else ():
            self._add(each.project, each.user, {GPUS: each.gpus, JOBS: each.jobs})
        for gang in book.gangs:
            if not gang.idle:
                self.start_gang(gang.project, gang.user, gang.share)

    @property
    def count_offers(self) -> bool:
        """Whether a limit counts what depends on the offers of gangs."""
        return bool(self._on_offers)

    def start(self, row: QueueRow) -> None:
        """Count a job as started."""
        if self._bounds:
            self._add(row.project, row.user, self._certain(row))
        if row.array is not None:
            self._members[row.array] += 1

    def start_gang(self, project: str, user: str, share: GangShare) -> None:
        """Count what a gang of a job holds on its offer."""
        if self._on_offers:
            self._add(project, user, list_amounts(self._on_offers, share))

    def start_gangs(self, gangs: Sequence[tuple[QueueRow, GangShare]]) -> str:
        """Count what gangs that start together hold on their offers. If a limit does not allow all
        of them, count none and return the reason."""
        before = dict(self._held)
        for row, share in gangs:
            amounts = list_amounts(self._on_offers, share)
            if reason := self._compare(row, amounts, hold=False):
                self._held.clear()
                self._held.update(before)
                return reason
            self._add(row.project, row.user, amounts)
        return ""

    def end_gang(self, project: str, user: str, size: float, share: GangShare) -> None:
        """Count a gang of a job as ended."""
        amounts = {GPUS: size, JOBS: 1.0, **list_amounts(self._on_offers, share)}
        self._add(project, user, {name: -amount for name, amount in amounts.items()})

    def find(self, row: QueueRow) -> str:
        """Return why the job must wait, or "" if no limit keeps it waiting. A member that waits for
        its array keeps no other jobs waiting. The reason names no numbers that change, because it
        is stored with each member."""
        if row.parallel is not None and self._members[row.array or ""] >= row.parallel:
            return f"waits for its array, of which at most {row.parallel} jobs run at once"
        return self._compare(row, self._certain(row), hold=True) if self._bounds else ""

    def list_full(self, row: QueueRow) -> Sequence[str]:
        """Return those of the job's projects of which all later jobs wait for the same limit."""
        owners = self._owners(row.project)
        return [owner for owner in owners if (owner, None, GPUS) in self._full]

    def admits(self, row: QueueRow, share: GangShare) -> bool:
        """Return whether the job, which no limit of `find` keeps waiting, may hold this on an
        offer."""
        if not self._on_offers:
            return True
        return not self._compare(row, list_amounts(self._on_offers, share), hold=False)

    def hold(self, row: QueueRow, share: GangShare) -> str:
        """Return why the job may not hold this on an offer, and let later jobs under the same limit
        wait, as it gets no other offer."""
        return self._compare(row, list_amounts(self._on_offers, share), hold=True)

    def refuse(self, row: QueueRow, share: GangShare) -> str:
        """Return why a job may hold no further gang like this, or "" if it may."""
        amounts = self._certain(row) | list_amounts(self._on_offers, share)
        return self._compare(row, amounts, hold=False)

    def list_bounds(
        self, row: QueueRow, share: GangShare | None = None
    ) -> Iterator[tuple[str, float, float]]:
        """Yield each limit that applies to a job: its key, what the job counts toward it, and what
        is left of it. `share` is what it holds or will hold on its offer, if this is known."""
        if row.array is not None and row.parallel is not None:
            yield f"array {row.array}", 1.0, float(row.parallel - self._members[row.array])
        amounts = self._certain(row)
        if share is not None:
            amounts |= list_amounts(self._on_offers, share)
        for key, amount, most in self._list_counted(row, amounts):
            owner, whose, name = key
            yield f"{name or 'GPUs'} {owner} {whose}", amount, most - self._held[key]

    def _certain(self, row: QueueRow) -> dict[str, float]:
        return {GPUS: row.size, JOBS: float(row.jobs), **list_certain(self._on_offers, row)}

    def _list_counted(
        self, row: QueueRow, amounts: Amounts
    ) -> Iterator[tuple[tuple[str, str | None, str], float, float]]:
        """Yield the key of each limit toward which some of the amounts count, this amount, and the
        limit."""
        for owner in self._owners(row.project):
            bounds = self._bounds_of.get((owner, row.user), self._bounds[owner])
            for of_user, name, most in bounds:
                if amount := amounts.get(name):
                    yield (owner, row.user if of_user else None, name), amount, most

    def _add(self, project: str, user: str, amounts: Amounts) -> None:
        for owner in self._owners(project):
            for name, amount in amounts.items():
                self._held[owner, None, name] += amount
                self._held[owner, user, name] += amount

    def _compare(self, row: QueueRow, amounts: Amounts, *, hold: bool) -> str:
        for key, amount, most in self._list_counted(row, amounts):
            if key in self._full:
                return self._full[key]
            held = self._held[key]
            if held + amount > most + SLACK:
                reason = _say_limit(key, held, amount, most)
                # others would wait for ever behind a job that can never start
                if hold and amount <= most + SLACK:
                    self._full[key] = reason
                return reason
        return ""

    def _owners(self, project: str) -> Sequence[str]:
        """Return the project and those above it that have a limit."""
        if not self._bounds:
            return ()
        if project not in self._lines:
            self._lines[project] = [
                each for each in list_line(project, self._parents) if each in self._bounds
            ]
        return self._lines[project]


def _say_limit(key: tuple[str, str | None, str], held: float, amount: float, most: float) -> str:
    owner, user, name = key
    who = "it" if user is None else f"user {user or 'without a name'}"
    where = f"waits for the limit of {f'project {owner}' if owner else 'the installation'}"
    if name == JOBS:
        return f"{where}: {who} runs {held:g} of at most {most:g} jobs"
    if amount > most + SLACK:
        return f"{where}: the job alone needs {say_part(name, amount, most)}"
    return f"{where}: {who} holds {say_part(name, held, most)}"


def say_part(name: str, amount: float, most: float) -> str:
    """Return what is held of a quota or limit as text for people."""
    if name == DOLLARS:
        return f"{format_price(amount / 1e6)} of at most {format_price(most / 1e6)} an hour"
    return f"{amount:g} of at most {most:g} {name or 'GPUs'}"
