"""Which jobs give their GPUs back for another project's quota (`scheduler.reclaim`)."""

from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st
from tests.records import FIXED, TASK, make_attempt_record, make_job_record

from cavvy.control.decide.queue import decide_return, make_borrowers
from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.jobs import AttemptPhase
from cavvy.domain.services import SERVICE_TAG
from cavvy.domain.shares import GangShare, HeldGang, HeldShare, QueueRow
from cavvy.domain.values import replace
from cavvy.scheduler.queue import JobScheduler, QueueCapacity, WaitingJob
from cavvy.scheduler.reclaim import (
    Borrower,
    QuotaClaim,
    ShareQuotas,
    choose_borrowers,
    find_return,
    list_loans,
)
from cavvy.scheduler.shares import ShareBook, ShareRule

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def job(gang: str, size: float = 1, *, minutes: int = 60, saves: bool = True) -> Borrower:
    """The project is the first letter of the gang."""
    since = NOW - timedelta(minutes=minutes)
    return Borrower(gang=gang, project=gang[0], size=size, since=since, saves=saves)


def book(quotas: Mapping[str, float | None], *running: Borrower, **used_h: float) -> ShareBook:
    held: dict[str, float] = {}
    for each in running:
        held[each.project] = held.get(each.project, 0) + each.size
    return ShareBook(
        rules={name: ShareRule(quota=quota) for name, quota in quotas.items()},
        held=[HeldShare(name, "u", gpus, 1) for name, gpus in held.items()],
        used_h=used_h,
    )


def needs(gpus: float, running: Collection[Borrower]) -> Callable[[Collection[str]], bool]:
    sizes = {each.gang: each.size for each in running}
    return lambda gangs: sum(sizes[gang] for gang in gangs) >= gpus


def choose(size: float, running: list[Borrower], state: ShareBook, *, free: float = 0) -> list[str]:
    row = QueueRow("0", "p", "u", size)
    latest = NOW - timedelta(minutes=30)
    claim = QuotaClaim(row=row, running=running, book=state, suffices=needs(size - free, running))
    found = choose_borrowers(claim, latest)
    return [each.gang for each in found]


def test_the_fewest_jobs_give_back_the_latest_first() -> None:
    running = [job("a1", minutes=90), job("a2", minutes=40), job("a3", minutes=60)]
    assert choose(2, running, book({"p": 4}, *running)) == ["a2", "a3"]
    assert choose(2, running, book({"p": 4}, *running), free=1) == ["a2"]


def test_only_a_project_within_its_quota_gets_something_back() -> None:
    running = [job("a1", 4), job("p1", 3)]
    for quota, expected in ((None, []), (4, []), (5, ["a1"])):
        assert choose(2, running, book({"p": quota}, *running)) == expected


def test_no_job_of_a_project_within_its_quota_gives_back() -> None:
    running = [job("a1", 2), job("a2", 2), job("b1", 4)]
    assert choose(4, running, book({"p": 4, "a": 4, "b": 4}, *running)) == []
    assert choose(2, running, book({"p": 4, "a": 2, "b": 4}, *running)) == ["a1"]
    assert choose(4, running, book({"p": 4, "a": 2, "b": 4}, *running)) == []


def test_jobs_that_have_just_begun_and_jobs_of_the_same_quota_keep_their_gangs() -> None:
    running = [job("a1", minutes=29), job("p1", minutes=300)]
    assert choose(1, running, book({"p": 4}, *running)) == []


def test_a_job_gives_nothing_back_to_one_of_its_own_quota() -> None:
    """It alone exceeds the quota of dollars, which does not count the other job."""
    dear = replace(job("a1"), share=GangShare("A100", 1, 50))
    state = ShareBook(
        parents={"p": "top", "a": "top"},
        rules={"top": ShareRule(quota=4, quotas={"$": 10})},
        held=[HeldShare("a", "u", 1, 1)],
        gangs=[HeldGang("a", "u", dear.share)],
    )
    assert choose(1, [dear], state) == []
    apart = replace(state, parents={"p": "top"}, rules={**state.rules, "a": ShareRule(quota=0)})
    assert choose(1, [dear], apart) == ["a1"]


def test_jobs_that_save_and_projects_that_have_used_most_are_first() -> None:
    running = [job("a1", saves=False, minutes=31), job("a2", minutes=99), job("b1", minutes=98)]
    state = book({"p": 4}, *running, a=1, b=50)
    assert choose(1, running, state) == ["b1"]
    assert choose(2, running, state) == ["b1", "a2"]
    assert choose(3, running, state) == ["b1", "a2", "a1"]


def test_a_large_job_replaces_small_ones_that_do_not_suffice() -> None:
    running = [job("a1", 1, minutes=31), job("a2", 8, minutes=99)]
    assert choose(8, running, book({"p": 8}, *running)) == ["a2"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 8), st.integers(0, 90)), max_size=12),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 12)),
    st.integers(1, 16),
)
def test_lenders_and_the_minimum_time_are_kept(
    jobs: list[tuple[str, int, int]], quotas: dict[str, int], size: int
) -> None:
    running = [
        job(f"{name}{number}", gpus, minutes=minutes)
        for number, (name, gpus, minutes) in enumerate(jobs)
    ]
    state = book({"p": 16, **quotas}, *running)
    chosen = choose(size, running, state)
    by_gang = {each.gang: each for each in running}
    assert not chosen or needs(size, running)(chosen)
    for gang in chosen:
        assert by_gang[gang].since <= NOW - timedelta(minutes=30)
        assert not needs(size, running)([each for each in chosen if each != gang])
    for name, quota in quotas.items():
        mine = [by_gang[gang].size for gang in chosen if gang[0] == name]
        if mine:  # the project held more than its quota when the last of its jobs was chosen
            held = sum(each.size for each in running if each.project == name)
            assert held - sum(mine) + max(mine) > quota


NAMES = st.sampled_from(["", "H100", "$"])  # the GPUs of all products, of one, and dollars


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.builds(
                GangShare,
                st.sampled_from(["H100", "A100"]),
                st.integers(1, 4),
                st.integers(0, 5),
            ),
            st.integers(0, 90),
        ),
        max_size=10,
    ),
    st.dictionaries(
        st.sampled_from("abcp"), st.dictionaries(NAMES, st.integers(0, 12)), min_size=1
    ),
    st.integers(1, 8),
)
def test_quotas_of_accelerators_and_dollars_are_kept(
    gangs: list[tuple[str, GangShare, int]], quotas: dict[str, dict[str, int]], need: int
) -> None:
    """Only projects above a quota give back, and only to a job within all quotas that count it;
    what the queue tells about the return comes true."""
    running = [
        Borrower(
            gang=f"{name}{number}",
            project=name,
            size=share.gpus,
            since=NOW - timedelta(minutes=minutes),
            saves=True,
            share=share,
        )
        for number, (name, share, minutes) in enumerate(gangs)
    ]
    sums = {name: 0.0 for name in "abc"}
    for each in running:
        sums[each.project] += each.size
    state = ShareBook(
        rules={
            name: ShareRule(
                quota=own.get(""), quotas={what: most for what, most in own.items() if what}
            )
            for name, own in quotas.items()
        },
        held=[HeldShare(name, "u", gpus, 1) for name, gpus in sums.items()],
        gangs=[HeldGang(each.project, "u", each.share) for each in running],
    )
    row, share = QueueRow("0", "p", "u", float(need)), GangShare("H100", float(need), need)
    freed = {each.gang: each.share.gpus * (each.share.accelerator == "H100") for each in running}

    def suffices(gone: Collection[str]) -> bool:
        return sum(freed[gang] for gang in gone) >= need

    claim = QuotaClaim(row=row, running=running, book=state, suffices=suffices, share=share)

    def choose_until(latest: datetime) -> list[Borrower]:
        return [*choose_borrowers(claim, latest)]

    latest = NOW - timedelta(minutes=30)
    chosen = choose_until(latest)
    mine = quotas.get("p", {})
    if chosen:
        assert mine
        assert all(need <= most for most in mine.values())
        assert all(each.since <= latest for each in chosen)
    for name in "abc":
        given_back = [each.share for each in chosen if each.project == name]
        held = [each.share for each in running if each.project == name]
        if given_back and quotas.get(name):
            assert any(
                _count(what, held) > most
                for what, most in quotas[name].items()
                if _count(what, given_back)
            ) or not any(_count(what, given_back) for what in quotas[name])
    later = find_return(claim, latest)
    if chosen or later is None:
        assert chosen or not choose_until(NOW)
    else:
        assert latest < later.since
        assert later.borrowers == choose_until(later.since)
        assert not choose_until(later.since - timedelta(seconds=1))


def _count(name: str, shares: list[GangShare]) -> float:
    if name == "$":
        return sum(each.micros_per_hour for each in shares)
    return sum(each.gpus for each in shares if name in ("", each.accelerator))


def test_loans_of_quotas() -> None:
    """`c` has no quota, and `b` holds more than its own: both have borrowed of `p`."""
    state = ShareBook(
        rules={
            "p": ShareRule(quota=10, quotas={"H100": 4, "$": 90}),
            "b": ShareRule(quota=2),
        },
        held=[HeldShare("p", "u", 1, 1), HeldShare("b", "u", 5, 1), HeldShare("c", "u", 4, 1)],
        gangs=[HeldGang("c", "u", GangShare("H100-NVL", 4, 80))],
    )
    found = {(each.borrower, each.name): each.amount for each in list_loans(state)}
    assert found == {("b", ""): 3, ("c", ""): 4, ("c", "H100"): 4, ("c", "$"): 80}
    assert {each.lender for each in list_loans(state)} == {"p"}


BALANCES = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9).map(float), max_size=6)


@given(BALANCES, BALANCES)
def test_no_more_is_lent_than_is_left_or_borrowed(
    quotas: dict[str, float], held: dict[str, float]
) -> None:
    loans = list_loans(
        ShareBook(
            rules={name: ShareRule(quota=quota) for name, quota in quotas.items()},
            held=[HeldShare(name, "u", gpus, 1) for name, gpus in held.items()],
        )
    )
    left = {name: max(0, quota - held.get(name, 0)) for name, quota in quotas.items()}
    beyond = {name: max(0, gpus - quotas.get(name, 0)) for name, gpus in held.items()}
    for side, most in (("lender", left), ("borrower", beyond)):
        for name in "abcdef":
            assert sum(e.amount for e in loans if getattr(e, side) == name) <= most.get(name, 0)
    if quotas:
        assert sum(e.amount for e in loans) == min(sum(left.values()), sum(beyond.values()))


def test_a_job_above_its_quota_says_so() -> None:
    book = ShareBook(
        parents={"b": "top"},
        rules={"top": ShareRule(quotas={"$": 9e6}), "b": ShareRule(quotas={"H100": 4})},
        gangs=[HeldGang("b", "u", GangShare("H100", 3, 0))],
    )
    quotas, row = ShareQuotas(book), QueueRow("w", "b", "u", 2.0)
    said = "above the quota of project b, which holds 3 of at most 4 H100"
    assert quotas.explain(row, GangShare("H100", 2, 0)) == said
    said = "above the quota of project top, which holds $0.00 of at most $9.00 an hour"
    assert quotas.explain(row, GangShare("A100", 2, 10_000_000)) == said
    assert quotas.explain(row, GangShare("H100", 1, 9_000_000)) == ""
    assert quotas.explain(row, GangShare("A100", 2, 0)) == ""


def test_a_waiting_job_says_who_has_borrowed_its_quota_and_until_when() -> None:
    sold = replace(FIXED, accelerator="H100", accelerator_count=2, capacity=0)
    waiting = make_job_record(NOW, id="w", project="b")
    line = WaitingJob(job=waiting, gang="new", offers=(sold,))
    book = ShareBook(
        rules={"b": ShareRule(quotas={"H100": 2})},
        gangs=[HeldGang("a", "u", GangShare("H100", 2, 0))],
    )

    def ask(minutes: int, **changes: object) -> tuple[list[str], str]:
        since = NOW - timedelta(minutes=minutes)
        gang = make_attempt_record(
            since, sold, phase=AttemptPhase.RUNNING, running_at=since, **changes
        )
        job = make_job_record(since, project="a", attempt=1)
        found, text = decide_return(
            QueueRow("w", "b", "u", 1.0),
            [line],
            [(gang, job)],
            QueueCapacity(),
            JobScheduler(QueueCapacity()),
            book,
            NOW,
            timedelta(minutes=30),
        )
        return [*found], text

    said = "project a has borrowed 2 H100 of its quota, back by 2030-01-01 00:{} UTC at the latest"
    assert ask(10) == ([], said.format("21"))
    assert ask(40) == (["g"], said.format("01"))
    leaving = {"reclaimed_for": "b", "drill_until": NOW + timedelta(minutes=5)}
    assert ask(40, **leaving) == ([], said.format("06"))
    assert ask(40, number=2) == ([], "")  # a gang that is not the job's own gives nothing back


def test_a_gang_gives_back_its_part_of_a_host_if_that_suffices() -> None:
    """The scheduler of tries is kept from pass to pass, while others hold the host's GPUs."""
    host = Host(name="farm/h", cpus=8, memory_mib=65536, devices=("0", "1"))
    sold = replace(FIXED, provider="farm", region="h", zone=None, shared=True)
    sold = replace(sold, accelerator="H100", accelerator_count=2, capacity=None)
    since = NOW - timedelta(minutes=40)
    gang = make_attempt_record(since, sold, phase=AttemptPhase.RUNNING, running_at=since)
    job = make_job_record(since, project="a", attempt=1)
    waiting = make_job_record(NOW, id="w", project="b")
    book = ShareBook(
        rules={"b": ShareRule(quotas={"H100": 2})},
        gangs=[HeldGang("a", "u", GangShare("H100", 2, 0))],
    )
    scheduler = JobScheduler(QueueCapacity(hosts=[host]))

    def ask(**devices: str) -> list[str]:
        held = [
            Allocation(
                host=host.name,
                gang=name,
                rank=0,
                project="a",
                cpus=1,
                memory_mib=0,
                devices=tuple(mine),
            )
            for name, mine in devices.items()
        ]
        found, _ = decide_return(
            QueueRow("w", "b", "u", 1.0),
            [WaitingJob(job=waiting, gang="new", offers=(sold,))],
            [(gang, job)],
            QueueCapacity(hosts=[host], allocations=held),
            scheduler,
            book,
            NOW,
            timedelta(minutes=30),
        )
        return [*found]

    assert ask(g="01") == ["g"]
    assert ask(g="0", other="1") == [], "one GPU does not suffice"
    assert ask(g="01") == ["g"]


def test_replicas_sessions_and_jobs_of_machines_give_nothing_back() -> None:
    attempt = make_attempt_record(NOW, FIXED, phase=AttemptPhase.RUNNING, running_at=NOW)

    def lend(**changes: object) -> list[str]:
        job = make_job_record(NOW, attempt=1, task=replace(TASK, **changes))
        return [each.gang for each in make_borrowers([(attempt, job)])]

    assert lend() == ["g"]
    assert lend(tags={SERVICE_TAG: "s"}) == lend(session=True) == lend(machine="m") == []


def test_what_a_project_holds_above_its_quotas_is_counted_in_gangs() -> None:
    running = [job("a1", 8), job("p1", 3)]
    quotas = ShareQuotas(book({"a": 6, "p": 4}, *running))
    assert quotas.count_spare("a", GangShare(), 8) == 2 / 8
    assert quotas.count_spare("p", GangShare(), 3) == 0.0
    assert quotas.count_spare("q", GangShare(), 1) is None, "no quota counts it"
