"""The order of the jobs of several projects (`scheduler.shares`)."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from math import log
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cavvy.control.fair_queue import (
    FRESH,
    UNCHANGED,
    FairQueue,
    QueuePlace,
    advance,
    find_changes,
    take_turns,
)
from cavvy.domain.policies import ProjectPolicy, UserBounds
from cavvy.domain.shares import GPUS, GangShare, HeldGang, HeldShare, ProjectUse, QueueRow
from cavvy.scheduler.shares import (
    JOBS,
    QueueTurn,
    ShareBook,
    ShareLimits,
    ShareRule,
    decay,
    give_turns,
    list_exceeded,
)
from cavvy.store.open import MemoryStore
from cavvy.store.queue import PlacedRow, SqlQueue

HOUR = timedelta(hours=1)


def rows(*lines: str) -> list[QueueRow]:
    """Each line is "project user size"; the IDs are the places in the list."""
    return [
        QueueRow(str(place), project, user, float(size))
        for place, (project, user, size) in enumerate(line.split() for line in lines)
    ]


def order(turns: "list[QueueTurn]") -> list[str]:
    return [turn.row.id for turn in turns if not turn.limit]


def test_projects_take_turns_and_keep_the_order_of_their_own_jobs() -> None:
    waiting = rows(*["a u 1"] * 4, *["b u 1"] * 2)
    turns = list(give_turns(waiting, ShareBook()))
    assert order(turns) == ["0", "4", "1", "5", "2", "3"]


def test_a_weight_of_three_gives_three_turns_of_four() -> None:
    book = ShareBook(rules={"a": ShareRule(weight=3)})
    turns = list(give_turns(rows(*["b u 1"] * 100, *["a u 1"] * 100), book))
    assert Counter(turn.row.project for turn in turns[:80]) == {"a": 60, "b": 20}


def test_large_jobs_count_as_their_gpus() -> None:
    turns = list(give_turns(rows(*["a u 8"] * 20, *["b u 2"] * 80), ShareBook()))
    gpus = Counter[str]()
    for turn in turns[:50]:
        gpus[turn.row.project] += int(turn.row.size)
    assert gpus == {"a": 80, "b": 80}


def test_shares_are_divided_below_each_parent() -> None:
    """A project with many projects below it gets no more than its own share."""
    book = ShareBook(parents={"a1": "a", "a2": "a", "a3": "a", "a": None, "b": None})
    waiting = rows(*(f"{name} u 1" for name in ("a1", "a2", "a3", "a", "b") for _ in range(40)))
    turns = list(give_turns(waiting, book))[:80]
    counts = Counter(turn.row.project for turn in turns)
    assert counts == {"b": 40, "a": 10, "a1": 10, "a2": 10, "a3": 10}


def test_past_use_and_held_gpus_count_against_a_project() -> None:
    waiting = rows("a u 1", "b u 1", "c u 1")
    book = ShareBook(used_h={"a": 5}, held=[HeldShare("b", "u", 2, 1)])
    assert order(list(give_turns(waiting, book))) == ["2", "1", "0"]


def test_jobs_below_a_quota_go_first() -> None:
    book = ShareBook(rules={"a": ShareRule(quota=3)}, used_h={"a": 1000})
    turns = list(give_turns(rows(*["a u 1"] * 5, *["b u 1"] * 2), book))
    assert order(turns) == ["0", "1", "2", "5", "6", "3", "4"]


def test_a_quota_below_a_project_without_one_goes_first() -> None:
    book = ShareBook(parents={"a1": "a"}, rules={"a1": ShareRule(quota=1)}, used_h={"a1": 1000})
    turns = list(give_turns(rows(*["b u 1"] * 2, *["a1 u 1"] * 2), book))
    assert order(turns) == ["2", "0", "1", "3"]


def test_a_limit_of_a_project_holds_all_jobs_below_it() -> None:
    book = ShareBook(
        parents={"a1": "a"},
        rules={"a": ShareRule(limit=4)},
        held=[HeldShare("a1", "u", 2, 1)],
    )
    turns = list(give_turns(rows("a u 4", "a1 u 1", "b u 8"), book))
    assert order(turns) == ["2"]
    assert {turn.limit for turn in turns if turn.limit} == {
        "waits for the limit of project a: it holds 2 of at most 4 GPUs"
    }


def test_the_jobs_of_a_project_at_its_limit_can_be_left_out() -> None:
    dice = Random(4)
    names = ["a", "a1", "a2", "b", "b1", "c"]
    for _ in range(200):
        waiting = [
            QueueRow(str(n), dice.choice(names), dice.choice("uv"), float(dice.choice([1, 2, 5])))
            for n in range(40)
        ]
        book = ShareBook(
            parents={"a1": "a", "a2": "a", "b1": "b"},
            rules={
                name: ShareRule(
                    quota=dice.choice([None, 2.0]),
                    limit=dice.choice([None, 4.0, 9.0]),
                    user_limit=dice.choice([None, None, 3.0]),
                )
                for name in (*names, "")
            },
            held=[HeldShare(dice.choice(names), "u", 2, 1)],
        )
        turns, brief = list(give_turns(waiting, book)), list(give_turns(waiting, book, brief=True))
        assert order(brief) == order(turns)
        assert {*brief} <= {*turns}
    book = ShareBook(rules={"a": ShareRule(limit=2)}, held=[HeldShare("a", "u", 2, 1)])
    (turn,) = give_turns(rows(*["a u 1"] * 9), book, brief=True)
    assert turn.limit


def test_a_job_that_no_limit_can_ever_admit_keeps_no_other_job_waiting() -> None:
    book = ShareBook(rules={"": ShareRule(limit=4, user_limit=2)})
    turns = list(give_turns(rows("a ann 5", "b bob 1", "b bob 3", "b bob 1"), book))
    assert {turn.row.id: turn.limit for turn in turns} == {
        "0": "waits for the limit of the installation: the job alone needs 5 of at most 4 GPUs",
        "1": "",
        "2": "waits for the limit of the installation: the job alone needs 3 of at most 2 GPUs",
        "3": "",
    }


def test_limits_of_a_user() -> None:
    book = ShareBook(rules={"": ShareRule(user_jobs=2), "a": ShareRule(user_limit=3)})
    waiting = rows("a ann 2", "a ann 2", "a bob 2", "b ann 1", "b ann 1", "b bob 1")
    turns = list(give_turns(waiting, book))
    assert {turn.row.id: turn.limit for turn in turns} == {
        "0": "",
        "1": "waits for the limit of project a: user ann holds 2 of at most 3 GPUs",
        "2": "",
        "3": "",
        "4": "waits for the limit of the installation: user ann runs 2 of at most 2 jobs",
        "5": "",
    }


def test_a_user_without_a_name_is_one_user() -> None:
    book = ShareBook(rules={"a": ShareRule(user_limit=2)}, held=[HeldShare("a", "ann", 2, 1)])
    (turn,) = give_turns([QueueRow("0", "a", "", 2)], book)
    assert turn.limit == ""
    full = ShareBook(rules=book.rules, held=[HeldShare("a", "", 1, 1)])
    (turn,) = give_turns([QueueRow("0", "a", "", 2)], full)
    assert "user without a name holds 1 of at most 2 GPUs" in turn.limit


def test_a_weight_of_zero_comes_last() -> None:
    book = ShareBook(rules={"a": ShareRule(weight=0)}, used_h={"b": 10})
    assert order(list(give_turns(rows("a u 1", "b u 1"), book))) == ["1", "0"]


def test_projects_that_form_a_cycle_are_ordered_too() -> None:
    book = ShareBook(parents={"a": "b", "b": "a"})
    assert sorted(order(list(give_turns(rows("a u 1", "b u 1"), book)))) == ["0", "1"]


def test_a_deep_tree_is_ordered_too() -> None:
    """An admin of a project can create any number of levels below it."""
    book = ShareBook(parents={f"p{n}": f"p{n - 1}" for n in range(1, 1500)})
    assert order(list(give_turns(rows("p1499 u 1", "p0 u 1"), book))) == ["0", "1"]


def test_use_decays_by_half_and_grows_with_what_is_held() -> None:
    assert decay(8, 0, HOUR, HOUR) == 4
    assert decay(0, 2, HOUR * 100, HOUR) == pytest.approx(2 / log(2))
    half = decay(1, 3, HOUR, HOUR)
    assert decay(half, 3, HOUR, HOUR) == pytest.approx(decay(1, 3, 2 * HOUR, HOUR))
    assert decay(8, 5, -HOUR, HOUR) == 8


def test_the_use_of_a_clock_that_was_wrong_decays_from_now_on() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    uses = {
        "early": ProjectUse(gpu_hours=8, held=0, at=now + 9000 * HOUR),
        "right": ProjectUse(gpu_hours=8, held=0, at=now + HOUR / 100),  # another server's clock
    }
    changed = find_changes(uses, ShareBook(used_h=advance(uses, now, HOUR)), now)
    assert changed == {"early": ProjectUse(gpu_hours=8, held=0, at=now)}


class LongLine(SqlQueue):
    """A queue whose rows are given, and which counts how often they are read."""

    def __init__(self, waiting: list[QueueRow]) -> None:
        self.waiting, self.reads, self.read_rows = waiting, 0, 0

    written: object = None  # what was written last; by default, something is all the time

    async def mark(self, now: datetime) -> object:
        return self.written or object()

    async def rows(self, now: datetime) -> Sequence[QueueRow]:
        self.reads += 1
        return self.waiting

    async def held(self) -> tuple[Sequence[HeldShare], Mapping[str, int]]:
        return (), {}

    async def used(self) -> Mapping[str, ProjectUse]:
        return {}


def test_the_places_in_a_long_queue_are_computed_once_a_moment() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    store = MemoryStore()
    store.queue = line = LongLine(rows(*["a u 1", "b u 1"] * 1000))
    queue = FairQueue(store, HOUR)

    def find(row: QueueRow, at: datetime) -> QueuePlace | None:
        return asyncio.run(queue.find_places([row.id], at)).get(row.id)

    assert find(line.waiting[2], now) == QueuePlace(3, {"a": 1, "b": 1})
    assert find(line.waiting[1999], now + FRESH) == QueuePlace(2000, {"a": 1000, "b": 999})
    assert line.reads == 1
    del line.waiting[0]
    assert find(line.waiting[1], now + FRESH * 2) == QueuePlace(2, {"b": 1})
    del line.waiting[500:]  # a short queue is read each time
    line.waiting[0:0] = [QueueRow("new", "a", "u", 1)]
    assert find(line.waiting[0], now + FRESH * 2) == QueuePlace(1, {})
    assert find(line.waiting[1], now + FRESH * 2) == QueuePlace(2, {"a": 1})
    line.waiting.clear()
    assert find(QueueRow("new", "a", "u", 1), now + FRESH * 2) is None
    assert line.reads == 5


def test_the_order_is_computed_again_only_if_something_was_written() -> None:
    now = datetime(2030, 1, 1, tzinfo=UTC)
    store = MemoryStore()
    store.queue = line = LongLine([QueueRow(f"{n}", "a", "u", 1, f"r{n % 2}") for n in range(9)])
    line.written, queue = "first", FairQueue(store, HOUR)

    def find(*names: str, at: datetime = now) -> list[int]:
        places = asyncio.run(queue.find_places(names, at))
        return [places[each].position for each in names if each in places]

    assert find("3", "8") == find("3", "8") == [4, 9]
    assert asyncio.run(queue.find_next(["r0", "r1", "r2"], now)) == {"r0": "0", "r1": "1"}
    assert line.reads == 1
    assert find("new") == find("new") == []  # it may have arrived since
    assert line.reads == 2
    del line.waiting[0]
    line.written = "second"
    assert find("3", "8") == [3, 8]
    assert line.reads == 3
    assert find("3", at=now + UNCHANGED) == [3]  # the use of projects has decayed
    assert line.reads == 4


TREES = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from("abcdef") | st.none())
RULES = st.builds(
    ShareRule,
    weight=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    quota=st.none() | st.integers(0, 8).map(float),
    limit=st.none() | st.integers(0, 8).map(float),
    user_limit=st.none() | st.integers(0, 8).map(float),
    user_jobs=st.none() | st.integers(0, 3),
    users=st.dictionaries(
        st.just("x"), st.dictionaries(st.sampled_from([GPUS, JOBS]), st.integers(0, 9).map(float))
    ),
)
ROWS = st.lists(
    st.builds(
        QueueRow, st.just(""), st.sampled_from("abcdef"), st.sampled_from("xy"), st.integers(1, 4)
    ),
    max_size=30,
)


@given(ROWS, TREES, st.dictionaries(st.sampled_from(["", *"abcdef"]), RULES))
def test_all_jobs_have_a_turn_and_no_limit_is_exceeded(
    waiting: list[QueueRow], parents: Mapping[str, str | None], rules: Mapping[str, ShareRule]
) -> None:
    named = [QueueRow(str(n), r.project, r.user, r.size) for n, r in enumerate(waiting)]
    turns = list(give_turns(named, ShareBook(parents=parents, rules=rules)))
    assert sorted(turn.row.id for turn in turns) == sorted(row.id for row in named)
    for owner, rule in rules.items():
        below = [t.row for t in turns if not t.limit and owner in line(t.row.project, parents)]
        if rule.limit is not None:
            assert sum(row.size for row in below) <= rule.limit
        for user in "xy":
            mine = [row for row in below if row.user == user]
            own = rule.users.get(user, {})
            gpus, jobs = own.get(GPUS, rule.user_limit), own.get(JOBS, rule.user_jobs)
            assert gpus is None or sum(row.size for row in mine) <= gpus
            assert jobs is None or len(mine) <= jobs


@given(ROWS, TREES, st.dictionaries(st.sampled_from(["", *"abcdef"]), RULES), st.booleans())
def test_a_project_that_waits_alone_has_the_turns_that_it_has_before_others(
    waiting: list[QueueRow],
    parents: Mapping[str, str | None],
    rules: Mapping[str, ShareRule],
    brief: bool,
) -> None:
    """A project without a weight comes after all others."""
    named = [QueueRow(str(n), "a", r.user, r.size) for n, r in enumerate(waiting)]
    last = QueueRow("last", "z", "", 1)
    book = ShareBook(parents=parents, rules={**rules, "z": ShareRule(weight=0.0)})
    turns = list(give_turns([*named, last], book, brief=brief))
    assert list(give_turns(named, book, brief=brief)) == [t for t in turns if t.row != last]


class PlacedLine(LongLine):
    """Reads the next jobs as the database does."""

    def _first(self, mine: Callable[[QueueRow], object], limit: int) -> list[PlacedRow]:
        found = [row for row in self.waiting if mine(row)][:limit]
        return [((0, row.id), row) for row in found]

    async def firsts(self, now: datetime) -> Sequence[PlacedRow]:
        arrays = {row.array for row in self.waiting if row.array}
        projects = {row.project for row in self.waiting if not row.array}
        return await self.more(now, 1, arrays=arrays, projects=projects)

    async def more(
        self,
        now: datetime,
        limit: int,
        *,
        arrays: Collection[str] = (),
        projects: Collection[str] = (),
        users_of: Collection[str] = (),
    ) -> Sequence[PlacedRow]:
        self.reads += 1
        users = {(row.project, row.user) for row in self.waiting if row.project in users_of}
        lines = [
            *(lambda row, name=name: row.array == name for name in arrays),
            *(lambda row, name=name: not row.array and row.project == name for name in projects),
            *(lambda row, of=of: not row.array and (row.project, row.user) == of for of in users),
        ]
        found = [each for mine in lines for each in self._first(mine, limit)]
        self.read_rows += len(found)
        return found

    async def heads(self, now: datetime, limit: int) -> Sequence[QueueRow]:
        counts = Counter[object]()
        found = []
        for row in self.waiting:
            key = row.array or (row.project, row.user)
            counts[key] += 1
            found += [row] if counts[key] <= limit else []
        return found


A_ROW = st.tuples(
    st.sampled_from("abcdef"),
    st.sampled_from("xxxy"),
    st.integers(1, 4),
    st.sampled_from(["", "", "", "1", "2"]),
)


@given(
    st.lists(A_ROW, max_size=40),
    TREES,
    st.dictionaries(st.sampled_from(["", *"abcdef"]), RULES),
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.0, 1.0, 9.0])),
    st.integers(1, 12),
)
def test_the_next_turns_need_only_the_first_jobs_of_each_line(
    waiting: list[tuple[str, str, int, str]],
    parents: Mapping[str, str | None],
    rules: Mapping[str, ShareRule],
    used_h: Mapping[str, float],
    limit: int,
) -> None:
    """The turns are the same as with all jobs that could have them."""
    store = MemoryStore()
    store.queue = line = PlacedLine(
        [
            QueueRow(
                f"{place:03}", project, user, size, array and project + array, 1 if array else None
            )
            if array
            else QueueRow(f"{place:03}", project, user, size)
            for place, (project, user, size, array) in enumerate(waiting)
        ]
    )
    held = [HeldShare("a", "x", 2, 1), HeldShare("b", "y", 1, 1)]
    book = ShareBook(parents=parents, rules=rules, used_h=used_h, held=held, running={"c2": 1})
    now = datetime(2030, 1, 1, tzinfo=UTC)
    turns = asyncio.run(FairQueue(store, HOUR)._read_turns(book, limit, now))
    everything = asyncio.run(line.heads(now, limit))
    assert turns == take_turns(everything, book, limit)[0]


def test_a_pass_reads_few_jobs_of_many_projects() -> None:
    store = MemoryStore()
    store.queue = line = PlacedLine(
        [QueueRow(f"{place:04}", f"p{place % 40:02}", "", 1) for place in range(4000)]
    )
    now = datetime(2030, 1, 1, tzinfo=UTC)
    turns = asyncio.run(FairQueue(store, HOUR)._read_turns(ShareBook(), 64, now))
    assert len(turns) == 64
    assert line.read_rows == 40 + 40 * 4


def test_others_have_turns_while_the_first_jobs_of_a_project_wait_for_a_limit_of_their_user() -> (
    None
):
    store = MemoryStore()
    store.queue = PlacedLine(rows(*["a x 1"] * 3, "a y 1"))
    book = ShareBook(rules={"a": ShareRule(user_jobs=1)}, held=[HeldShare("a", "x", 1, 1)])
    now = datetime(2030, 1, 1, tzinfo=UTC)
    turns = asyncio.run(FairQueue(store, HOUR)._read_turns(book, 2, now))
    assert order([*turns]) == ["3"]


OFFERS = st.sampled_from(
    [GangShare("H100", 1, 30), GangShare("H100-PCIe", 2, 20), GangShare("A100", 4, 10), GangShare()]
)
COUNTED = st.dictionaries(st.sampled_from(["H100", "A100", "$"]), st.integers(0, 60).map(float))
OFFER_RULES = st.builds(ShareRule, limits=COUNTED, user_limits=COUNTED)


@given(
    ROWS,
    TREES,
    st.dictionaries(st.sampled_from(["", *"abcdef"]), OFFER_RULES, min_size=1),
    st.lists(st.lists(OFFERS, max_size=3), min_size=30, max_size=30),
    st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("xy"), OFFERS), max_size=5),
)
def test_no_limit_of_accelerators_and_dollars_is_exceeded(
    waiting: list[QueueRow],
    parents: Mapping[str, str | None],
    rules: Mapping[str, ShareRule],
    offered: list[list[GangShare]],
    held: list[tuple[str, str, GangShare]],
) -> None:
    """Each job takes its first offer that the limits admit. What was held before may be above a
    limit that was set later."""
    limits = ShareLimits(
        ShareBook(parents=parents, rules=rules, gangs=[HeldGang(*each) for each in held])
    )
    started: list[tuple[str, str, GangShare]] = []
    for row, shares in zip(waiting, offered, strict=False):
        share = next((each for each in shares if limits.admits(row, each)), None)
        if share is not None:
            limits.start_gang(row.project, row.user, share)
            started.append((row.project, row.user, share))
        for refused in shares if share is None else ():
            assert "limit" in limits.hold(row, refused)
            assert not limits.admits(row, refused)  # and no later job passes it

    def count(name: str, gangs: list[tuple[str, str, GangShare]]) -> float:
        found = [share for _, _, share in gangs]
        if name == "$":
            return sum(each.micros_per_hour for each in found)
        return sum(each.gpus for each in found if each.accelerator.startswith(name))

    for owner, rule in rules.items():
        for user, bounds in ((None, rule.limits), ("x", rule.user_limits), ("y", rule.user_limits)):
            old, new = (
                [g for g in gangs if owner in line(g[0], parents) and user in (None, g[1])]
                for gangs in (held, started)
            )
            for name, most in bounds.items():
                assert count(name, old) + count(name, new) <= max(most, count(name, old))


def test_limits_of_accelerators_order_jobs_that_accept_no_others() -> None:
    """Jobs that accept a family wait for its limit before they are placed, and keep no jobs waiting
    that accept more."""
    rules = {"a": ShareRule(limits={"H100": 2})}
    held = [HeldGang("a", "u", GangShare("H100-PCIe", 1, 0))]
    waiting = [
        QueueRow(str(n), "a", "u", 1.0, accelerators=names)
        for n, names in enumerate([("H100",), ("H100-NVL",), ("H100", "A100"), (), ("A100",)])
    ]
    turns = {t.row.id: t.limit for t in give_turns(waiting, ShareBook(rules=rules, gangs=held))}
    assert turns == {
        **dict.fromkeys("0234", ""),
        "1": "waits for the limit of project a: it holds 2 of at most 2 H100",
    }


def test_parts_of_gpus_count_toward_the_limits_of_their_product() -> None:
    """A part is a fraction of a GPU or a MIG instance."""
    limits = ShareLimits(ShareBook(rules={"a": ShareRule(limits={"A100": 0.5})}))
    row = QueueRow("0", "a", "u", 0.25, accelerators=("A100-MIG-1g.20gb",))
    for share in (GangShare("A100-MIG-1g.20gb", 0.25, 0), GangShare("A100", 0.25, 0)):
        assert limits.admits(row, share)
        limits.start_gang("a", "u", share)
    assert not limits.admits(row, GangShare("A100-MIG-1g.20gb", 0.25, 0))
    assert limits.find(row)


def test_a_job_that_alone_costs_too_much_keeps_no_other_waiting() -> None:
    limits = ShareLimits(ShareBook(rules={"a": ShareRule(user_limits={"$": 5e6})}))
    row = QueueRow("0", "a", "ann", 1.0)
    dear, cheap = GangShare("H100", 1, 6_000_000), GangShare("A100", 1, 3_000_000)
    reason = "waits for the limit of project a: the job alone needs $6.00 of at most $5.00 an hour"
    assert limits.hold(row, dear) == reason
    assert limits.admits(row, cheap)
    limits.start_gang("a", "ann", cheap)
    reason = "waits for the limit of project a: user ann holds $3.00 of at most $5.00 an hour"
    assert limits.hold(row, cheap) == reason
    assert limits.admits(row, GangShare("L4", 1, 0))  # own machines cost nothing


def test_limits_of_one_user_replace_those_of_each_user() -> None:
    """Also those that only the price of an offer decides, and where nobody else has a limit."""
    own = {"ann": {JOBS: 2.0}, "bob": {"$": 3e6}}
    limits = ShareLimits(ShareBook(rules={"a": ShareRule(user_jobs=1, users=own)}))
    ann, bob, cat = rows("a ann 1", "a bob 1", "a cat 1")
    for row in (ann, bob, cat):
        limits.start(row)
    assert [bool(limits.find(row)) for row in (ann, bob, cat)] == [False, True, True]
    limits.start(ann)
    reason = "waits for the limit of project a: user ann runs 2 of at most 2 jobs"
    assert limits.find(ann) == reason
    dear = GangShare("H100", 1, 4_000_000)
    assert [limits.admits(row, dear) for row in (bob, cat)] == [False, True]
    assert ShareRule(users=own).needs_gangs
    assert not ShareRule(users={"ann": {JOBS: 1.0, GPUS: 1.0}}).needs_gangs


def test_each_number_of_a_policy_is_a_rule_of_the_queue() -> None:
    policy = ProjectPolicy(
        share=1.0,
        quota_gpus=2.0,
        max_gpus=3.0,
        user_gpus=4.0,
        user_jobs=5,
        quota_accelerators={"H100": 6.0},
        max_accelerators={"H100": 7.0},
        user_accelerators={"H100": 8.0},
        quota_micros_per_hour=9,
        max_micros_per_hour=10,
        user_micros_per_hour=11,
        users={
            "ann": UserBounds(gpus=12.0, jobs=13, micros_per_hour=14),
            "bob": UserBounds(accelerators={"H100": 15.0}, waiting=16),
        },
    )

    async def read() -> Mapping[str, ShareRule]:
        store = MemoryStore()
        await store.put_policy("a", policy)
        _, book = await FairQueue(store, HOUR).order_heads(1, datetime(2030, 1, 1, tzinfo=UTC))
        return book.rules

    rule = ShareRule(
        weight=1.0,
        quota=2.0,
        limit=3.0,
        user_limit=4.0,
        user_jobs=5,
        quotas={"H100": 6.0, "$": 9},
        limits={"H100": 7.0, "$": 10},
        user_limits={"H100": 8.0, "$": 11},
        users={"ann": {GPUS: 12.0, JOBS: 13.0, "$": 14}, "bob": {"H100": 15.0}},
    )
    assert asyncio.run(read()) == {"a": rule}


def test_which_new_quotas_and_limits_are_below_what_is_held() -> None:
    """Those of the projects below count, idle nodes and other projects do not, and a bound that is
    kept or raised is not named again."""
    held = [HeldShare("a", "ann", 4, 2, idle=2), HeldShare("b", "bob", 2, 1)]
    gangs = [
        HeldGang("a", "ann", GangShare("H100", 4, 40)),
        HeldGang("a", "ann", GangShare("H100", 2, 20), idle=True),
        HeldGang("b", "bob", GangShare("H100-NVL", 2, 20)),
        HeldGang("c", "ann", GangShare("H100", 8, 80)),
    ]

    def find(new: ShareRule, old: ShareRule | None = None, project: str = "a") -> list[str]:
        rules = {project: old} if old else {}
        book = ShareBook(parents={"b": "a"}, rules=rules, held=held, gangs=gangs)
        return [
            f"{each.user or ''} {each.name} {each.held:g}>{each.most:g}{'q' * each.is_quota}"
            for each in list_exceeded(project, new, book)
        ]

    assert find(ShareRule(quota=5, limit=5.5)) == ["  6>5q", "  6>5.5"]
    assert find(ShareRule(quota=6, limit=6, limits={"H100": 6, "$": 60})) == []
    assert find(ShareRule(quotas={"H100": 5}, limits={"$": 59})) == [" H100 6>5q", " $ 60>59"]
    assert find(ShareRule(user_limit=3, user_jobs=1)) == ["ann  4>3", "ann jobs 2>1"]
    assert find(ShareRule(user_limit=1, users={"ann": {GPUS: 4.0}})) == ["bob  2>1"]
    assert find(ShareRule(users={"ann": {"$": 39.0}, "cat": {GPUS: 0.0}})) == ["ann $ 40>39"]
    low = ShareRule(quota=1, limit=2, users={"ann": {JOBS: 1.0}})
    assert find(low, low) == []
    assert find(ShareRule(quota=3, limit=3), low) == []
    # the limit of each user applies to her again
    assert find(ShareRule(user_jobs=0), low) == ["ann jobs 2>0", "bob jobs 1>0"]
    assert find(ShareRule(limit=5), project="b") == []
    assert find(ShareRule(limits={"H100": 13}), project="") == [" H100 14>13"]


def test_what_counts_toward_a_limit_of_an_accelerator() -> None:
    """Gangs that are kept without work do not count, and a group that is refused does not. A job
    that waits for the limit keeps smaller ones waiting."""
    kept = HeldGang("a", "u", GangShare("H100", 3, 0), idle=True)
    limits = ShareLimits(ShareBook(rules={"a": ShareRule(limits={"H100": 3})}, gangs=[kept]))
    row, two, one = rows("a u 2")[0], GangShare("H100", 2, 0), GangShare("H100", 1, 0)
    assert "limit of project a" in limits.start_gangs([(row, two), (row, two)])
    assert limits.start_gangs([(row, two)]) == ""
    assert limits.admits(row, one)
    assert limits.hold(row, two)
    assert not limits.admits(row, one)


def test_quotas_of_accelerators_and_dollars_order_the_projects() -> None:
    used = {"a": 1000.0}

    def first(rule: ShareRule, *names: str, held: GangShare | None = None) -> str:
        waiting = [QueueRow("b", "b", "u", 1.0), QueueRow("a", "a", "u", 1.0, accelerators=names)]
        gangs = [HeldGang("a", "u", held)] if held else []
        book = ShareBook(rules={"a": rule}, used_h=used, gangs=gangs)
        return next(give_turns(waiting, book)).row.id

    quota = ShareRule(quotas={"H100": 2})
    assert first(quota, "H100") == "a"
    assert first(quota, "A100") == first(quota) == "b"
    assert first(quota, "H100", held=GangShare("H100", 2, 0)) == "b"
    assert first(quota, "H100", held=GangShare("A100", 8, 0)) == "a"
    assert first(ShareRule(quota=0, quotas={"H100": 2}), "H100") == "b"
    assert first(ShareRule(quotas={"$": 10})) == "a"
    assert first(ShareRule(quotas={"$": 10}), held=GangShare("L4", 1, 10)) == "b"


def line(project: str, parents: Mapping[str, str | None]) -> set[str]:
    found, at = {""}, project
    while at and at not in found:
        found.add(at)
        at = parents.get(at) or ""
    return found


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, 5.0]), min_size=2, max_size=4), st.integers(0, 9))
@settings(max_examples=10)
def test_shares_come_within_five_percent_of_the_weights(weights: list[float], seed: int) -> None:
    """A hundred GPUs, jobs of random sizes and lengths, and a first project that has used
    everything before: after ten half-lives, the decayed use is divided by the weights."""
    random = Random(seed)
    names = [f"p{place}" for place in range(len(weights))]
    rules = {name: ShareRule(weight=weight) for name, weight in zip(names, weights, strict=True)}
    used = dict.fromkeys(names, 0.0) | {names[0]: 1000.0}
    running: list[tuple[int, str, int]] = []  # end, project, size
    half_life = timedelta(hours=24)
    for hour in range(240):
        running = [job for job in running if job[0] > hour]
        held = Counter[str]()
        for _, name, size in running:
            held[name] += size
        waiting = [
            QueueRow(f"{hour}-{name}-{n}", name, "u", random.randint(1, 4))
            for name in names
            for n in range(40)
        ]
        book = ShareBook(
            rules=rules, used_h=used, held=[HeldShare(n, "u", g, 1) for n, g in held.items()]
        )
        free = 100 - sum(held.values())
        for turn in give_turns(waiting, book):
            if turn.row.size > free:
                break
            free -= int(turn.row.size)
            running.append((hour + random.randint(1, 6), turn.row.project, int(turn.row.size)))
            held[turn.row.project] += int(turn.row.size)
        used = {name: decay(used[name], held[name], HOUR, half_life) for name in names}
    for name, weight in zip(names, weights, strict=True):
        assert used[name] / sum(used.values()) == pytest.approx(weight / sum(weights), rel=0.05)
