"""Orders the waiting jobs of several projects by fair share, and applies the projects' limits. The
module does no I/O.

Projects with the same parent are compared by their use divided by their weight, level by level from
the installation down, as in Slurm's Fair Tree (https://slurm.schedmd.com/fair_tree.html). The
project with the lowest quotient has the next turn. A project that waits below its quota has its
turn before all projects that do not. Past use decays with a half-life (Slurm's
PriorityDecayHalfLife), so a project that used much long ago is not held back forever.

Use is measured in GPU-hours (see `domain.shares` for nodes without GPUs).
"""

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from heapq import heapify, heappop, heapreplace
from math import exp2, log

from cavvy.domain.accounts import INSTALLATION
from cavvy.domain.authorization import list_line
from cavvy.domain.shares import HeldShare, QueueRow
from cavvy.domain.values import Struct, field

# A job counts as if it ran for this many hours from now on. Without this, a project whose jobs have
# just started would have used nothing yet, and would get all turns of one pass.
_AHEAD_H = 1.0
SLACK = 1e-9  # GPUs; sums of fractions are not exact in floating point


def decay(used_h: float, held: float, elapsed: timedelta, half_life: timedelta) -> float:
    """Return the decayed use in GPU-hours after `elapsed`, in which `held` GPUs were in use: the
    integral of the held GPUs, each moment weighted by 2^(-age / half_life)."""
    left = exp2(-max(elapsed, timedelta(0)) / half_life)
    return used_h * left + held * (1 - left) * (half_life / timedelta(hours=1)) / log(2)


class ShareRule(Struct, frozen=True, kw_only=True):
    """What a project may use, together with the projects below it. `weight` is its share among the
    projects with the same parent. Below `quota` GPUs, its jobs go before those of projects that
    are not below theirs. It never holds more than `limit` GPUs. `user_limit` and `user_jobs` are
    the most GPUs and running jobs of each user.
    """

    weight: float = 1.0
    quota: float | None = None
    limit: float | None = None
    user_limit: float | None = None
    user_jobs: int | None = None


class ShareBook(Struct, frozen=True, kw_only=True):
    """The state of all projects at one time: their parents and rules, their decayed use in
    GPU-hours without that of the projects below them, and what they hold. `running` are the members
    of each array that run."""

    parents: Mapping[str, str | None] = field(default_factory=dict)
    rules: Mapping[str, ShareRule] = field(default_factory=dict)
    used_h: Mapping[str, float] = field(default_factory=dict)
    held: Sequence[HeldShare] = ()
    running: Mapping[str, int] = field(default_factory=dict)


class ProjectStanding(Struct, frozen=True, kw_only=True):
    """Where a project stands in the queue. All numbers but `weight` include the projects below it.

    `part` is what the project should have of the use of all projects, by its weight and those of
    the projects above it, among the projects that use or want something now. `used_part` is what
    it has.
    """

    project: str
    weight: float
    part: float
    used_h: float
    used_part: float
    held: float
    jobs: int
    waiting: float
    waiting_jobs: int


class QueueTurn(Struct, frozen=True):
    """A waiting job in the order of the queue. `limit` is empty if the job may start, and otherwise
    says which limit keeps it waiting."""

    row: QueueRow
    limit: str = ""


def give_turns(rows: Iterable[QueueRow], book: ShareBook) -> Iterator[QueueTurn]:
    """Yield the waiting jobs in the order in which they have their turns. `rows` are sorted by
    priority and age; jobs of the same project keep this order. Each job counts as started for the
    jobs after it.

    While the first job of a project or of a user waits because of a limit, later jobs under the
    same limit wait, too, so that large jobs are not passed for ever.
    """
    tree = _Tree(book, rows)
    limits = ShareLimits(book)
    while (row := tree.next_row()) is not None:
        reason = limits.find(row)
        tree.end_turn(0.0 if reason else row.size)
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
            held=sums[name]["held"],
            jobs=int(sums[name]["jobs"]),
            waiting=sums[name]["waiting"],
            waiting_jobs=int(sums[name]["waiting_jobs"]),
        )
        for name in sorted(active - {INSTALLATION})
    ]


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

    __slots__ = ("children", "held", "line", "name", "next", "parent", "quota", "used_h", "weight")

    def __init__(self, name: str, parent: "_Node | None", rule: ShareRule) -> None:
        self.name, self.parent = name, parent
        self.weight, self.quota = rule.weight, rule.quota
        self.used_h = self.held = 0.0
        self.children: list[tuple[_Rank, _Node]] = []  # heap of those that wait
        self.line: deque[tuple[int, QueueRow]] = deque()
        # of the next job of this node: whether it is above all quotas from this node down, its
        # place in the rows, and its size
        self.next = (True, 0, 0.0)

    def rank(self) -> _Rank:
        """Return the key by which the node is compared with the other children of its parent, and
        set `next`. The lowest key has the next turn."""
        if self.children:
            above, place, size = self.children[0][1].next
        else:
            above, place, size = True, self.line[0][0], self.line[0][1].size
        own = above if self.quota is None else self.held + size > self.quota + SLACK
        self.next = (above and own, place, size)
        ratio = (self.used_h + self.held * _AHEAD_H) / self.weight if self.weight else float("inf")
        return own, ratio, place, self.name

    @property
    def waits(self) -> bool:
        return bool(self.children or self.line)


class _Tree:
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
        self._fill()

    def next_row(self) -> QueueRow | None:
        """Return the job that has the next turn, or None if no job is left."""
        node = self._root
        while node.children:
            node = node.children[0][1]
        self._turn = node
        return node.line[0][1] if node.line else None

    def end_turn(self, size: float) -> None:
        """Remove the job that had its turn, and count `size` GPUs as held from now on."""
        node = self._turn
        assert node is not None
        node.line.popleft()
        while True:
            node.held += size
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
            node = node.parent

    def _fill(self) -> None:
        """Build the heaps of all nodes. A node was made after its parent, and is filled before."""
        for node in (*self._own.values(), *reversed(self._nodes.values())):
            heapify(node.children)
            if node.parent is not None and node.waits:
                node.parent.children.append((node.rank(), node))


class ShareLimits:
    """What counts toward the limits of projects and users, and the limits that keep a job waiting.
    The key of a limit is its project, and its user or, for all users together, None."""

    def __init__(self, book: ShareBook) -> None:
        self._parents = book.parents
        self._rules = {
            name: rule
            for name, rule in book.rules.items()
            if (rule.limit, rule.user_limit, rule.user_jobs) != (None, None, None)
        }
        self._gpus: defaultdict[tuple[str, str | None], float] = defaultdict(float)
        self._jobs: defaultdict[tuple[str, str | None], int] = defaultdict(int)
        self._full: dict[tuple[str, str | None], str] = {}
        self._lines: dict[str, Sequence[str]] = {}
        self._members = Counter(book.running)
        for each in book.held:
            self._add(each.project, each.user, each.gpus, each.jobs)

    def start(self, row: QueueRow) -> None:
        """Count a job as started."""
        self._add(row.project, row.user, row.size, 1)
        if row.array is not None:
            self._members[row.array] += 1

    def find(self, row: QueueRow) -> str:
        """Return why the job must wait, or "" if no limit keeps it waiting. A member that waits for
        its array keeps no other jobs waiting. The reason names no numbers that change, because it
        is stored with each member."""
        if row.parallel is not None and self._members[row.array or ""] >= row.parallel:
            return f"waits for its array, of which at most {row.parallel} jobs run at once"
        for owner in self._owners(row.project):
            rule = self._rules[owner]
            for whose, most, jobs in (
                (None, rule.limit, None),
                (row.user, rule.user_limit, rule.user_jobs),
            ):
                if most is None and jobs is None:
                    continue
                key = owner, whose
                if key not in self._full:
                    reason = self._compare(key, most, jobs, row.size)
                    if not reason:
                        continue
                    if most is not None and row.size > most + SLACK:
                        return reason  # others would wait for ever behind a job that cannot start
                    self._full[key] = reason
                return self._full[key]
        return ""

    def list_bounds(self, row: QueueRow) -> Iterator[tuple[str, float, float]]:
        """Yield each limit that applies to a job: its key, what the job counts toward it, and what
        is left of it."""
        if row.array is not None and row.parallel is not None:
            yield f"array {row.array}", 1.0, float(row.parallel - self._members[row.array])
        for owner in self._owners(row.project):
            rule = self._rules[owner]
            for whose, most in ((None, rule.limit), (row.user, rule.user_limit)):
                if most is not None:
                    yield f"GPUs {owner} {whose}", row.size, most - self._gpus[owner, whose]
            if rule.user_jobs is not None:
                left = rule.user_jobs - self._jobs[owner, row.user]
                yield f"jobs {owner} {row.user}", 1.0, float(left)

    def _add(self, project: str, user: str, gpus: float, jobs: int) -> None:
        for owner in self._owners(project):
            for whose in (None, user):
                self._gpus[owner, whose] += gpus
                self._jobs[owner, whose] += jobs

    def _compare(
        self, key: tuple[str, str | None], most: float | None, jobs: int | None, size: float
    ) -> str:
        owner, user = key
        who = "it" if user is None else f"user {user or 'without a name'}"
        where = f"project {owner}" if owner else "the installation"
        held, running = self._gpus[key], self._jobs[key]
        if most is not None and size > most + SLACK:
            return (
                f"waits for the limit of {where}: the job alone needs {size:g} of at most "
                f"{most:g} GPUs"
            )
        if most is not None and held + size > most + SLACK:
            return f"waits for the limit of {where}: {who} holds {held:g} of at most {most:g} GPUs"
        if jobs is not None and running >= jobs:
            return f"waits for the limit of {where}: {who} runs {running} of at most {jobs} jobs"
        return ""

    def _owners(self, project: str) -> Sequence[str]:
        """Return the project and those above it that have a limit."""
        if not self._rules:
            return ()
        if project not in self._lines:
            self._lines[project] = [
                each for each in list_line(project, self._parents) if each in self._rules
            ]
        return self._lines[project]
