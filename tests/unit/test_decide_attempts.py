"""The decisions about attempts: every view has an answer, and the answers that matter are the
right ones.
"""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavvy.control import attempts as a
from cavvy.control.attempts import AttemptView, Look, decide_attempt
from cavvy.domain.jobs import (
    ATTEMPT_MOVES,
    JOB_ENDS,
    JOB_MOVES,
    Attempt,
    AttemptPhase,
    Course,
    Job,
    JobPhase,
    Node,
    NodePhase,
    Order,
    Outcome,
    StopCause,
)
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Task
from cavvy.domain.units import HourlyRate
from cavvy.providers.base import GangSeen, GangState, NodeSeen

T0 = datetime(2030, 1, 1, tzinfo=UTC)
OFFER = Offer(provider="p", region="r", instance_type="t", rate=HourlyRate(1))
SETTLE = timedelta(minutes=2)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def view(
    phase: AttemptPhase = AttemptPhase.RUNNING,
    *,
    ranks: int = 1,
    claimed: bool = True,
    seen: a.Seen = Look.UNKNOWN,
    job: Job | None = None,
    **changes: object,
) -> AttemptView:
    node_phase = NodePhase.RUNNING if claimed else NodePhase.EXPECTED
    nodes = [
        Node(
            attempt_id="j-1",
            project="p",
            rank=rank,
            phase=node_phase,
            claim="n" if claimed else None,
            claimed_at=T0 if claimed else None,
            heard_at=T0 if claimed else None,
            running_at=T0 if claimed else None,
        )
        for rank in range(ranks)
    ]
    attempt = Attempt(
        id="j-1",
        job_id="j",
        project="p",
        number=1,
        gang="g",
        offer=OFFER,
        nodes=ranks,
        phase=phase,
        created_at=T0,
        since=T0,
        launched_at=None if phase is AttemptPhase.LAUNCHING else T0,
    )
    given_job = job or make_job()
    made = AttemptView(
        job=given_job,
        attempt=attempt,
        nodes=tuple(nodes),
        seen=seen,
        settle=SETTLE,
        listening_since=T0,
    )
    return replace(made, attempt=replace(attempt, **changes)) if changes else made  # type: ignore[arg-type]


def make_job(phase: JobPhase = JobPhase.RUNNING, **changes: object) -> Job:
    job = Job(
        id="j",
        project="p",
        name="n",
        task=Task(name="n", run="x"),
        phase=phase,
        submitted_at=T0,
        since=T0,
        attempt=1,
    )
    return replace(job, **changes)  # type: ignore[arg-type]


def with_exit(
    old: AttemptView, rank: int, outcome: Outcome, code: int, seconds: float = 1
) -> AttemptView:
    nodes = list(old.nodes)
    nodes[rank] = replace(
        nodes[rank],
        phase=NodePhase.EXITED,
        exit_outcome=outcome,
        exit_code=code,
        exited_at=at(seconds),
    )
    return replace(old, nodes=tuple(nodes))


def with_progress(old: AttemptView, rank: int, values: dict[str, float | str]) -> AttemptView:
    nodes = list(old.nodes)
    nodes[rank] = replace(nodes[rank], progress=values)
    return replace(old, nodes=tuple(nodes))


def alive(*, ended_rank: int | None = None, ranks: int = 1) -> GangSeen:
    nodes = [
        NodeSeen(
            rank=rank,
            engine_id=str(rank),
            started_at=T0,
            ended_at=at(5) if rank == ended_rank else None,
        )
        for rank in range(ranks)
    ]
    return GangSeen(name="g", state=GangState.RUNNING, nodes=nodes)


def gone(*, preempted: bool = False, told: bool = True) -> GangSeen:
    node = NodeSeen(rank=0, engine_id="0", started_at=T0, ended_at=at(9) if told else None)
    return GangSeen(name="g", state=GangState.ENDED, preempted=preempted, nodes=[node])


def ends_as(action: a.Action, outcome: Outcome) -> bool:
    return (
        isinstance(action, a.Advance)
        and action.phase is AttemptPhase.ENDING
        and action.outcome is outcome
    )


class TestLaunching:
    def test_asks_the_place(self) -> None:
        assert isinstance(
            decide_attempt(view(AttemptPhase.LAUNCHING, claimed=False), at(1)), a.Launch
        )

    def test_looks_before_it_asks_again(self) -> None:
        doubtful = replace(view(AttemptPhase.LAUNCHING, claimed=False), asked=True)
        assert isinstance(decide_attempt(doubtful, at(1)), a.LookAgain)
        assert isinstance(decide_attempt(replace(doubtful, seen=Look.ABSENT), at(1)), a.Launch)
        found = decide_attempt(replace(doubtful, seen=alive()), at(1))
        assert isinstance(found, a.Advance)
        assert found.phase is AttemptPhase.BOOTING

    def test_gives_up_a_place_without_a_clear_answer(self) -> None:
        action = decide_attempt(view(AttemptPhase.LAUNCHING, claimed=False), T0 + a.LAUNCH_TIMEOUT)
        assert ends_as(action, Outcome.TIMEOUT)

    def test_a_stop_before_the_launch_still_removes(self) -> None:
        job = make_job(JobPhase.STOPPING, stop_reason="enough", stop_cause=StopCause.USER)
        assert ends_as(
            decide_attempt(view(AttemptPhase.LAUNCHING, claimed=False, job=job), at(1)),
            Outcome.STOPPED,
        )


class TestBooting:
    def test_runs_once_every_rank_runs(self) -> None:
        whole = view(AttemptPhase.BOOTING, ranks=2)
        action = decide_attempt(whole, at(1))
        assert isinstance(action, a.Advance)
        assert action.phase is AttemptPhase.RUNNING
        half = replace(whole, nodes=(whole.nodes[0], replace(whole.nodes[1], running_at=None)))
        assert isinstance(decide_attempt(half, at(1)), a.LookAgain)

    def test_times_out_without_claims(self) -> None:
        silent = view(AttemptPhase.BOOTING, claimed=False, seen=alive())
        assert isinstance(
            decide_attempt(silent, T0 + a.BOOT_TIMEOUT - timedelta(seconds=1)), a.LookAgain
        )
        assert ends_as(decide_attempt(silent, T0 + a.BOOT_TIMEOUT), Outcome.TIMEOUT)

    def test_waiting_in_the_places_own_queue_is_not_booting(self) -> None:
        queued = GangSeen(name="g", state=GangState.QUEUED)
        action = decide_attempt(
            view(AttemptPhase.BOOTING, claimed=False, seen=queued), T0 + 10 * a.BOOT_TIMEOUT
        )
        assert isinstance(action, a.LookAgain)

    def test_absence_without_a_claim_waits_for_the_boot_timeout(self) -> None:
        missed = view(
            AttemptPhase.BOOTING,
            claimed=False,
            seen=Look.ABSENT,
            missed_looks=2,
            missed_since=at(1),
        )
        assert isinstance(decide_attempt(missed, at(300)), a.LookAgain)


class TestRunning:
    def test_a_good_end(self) -> None:
        action = decide_attempt(with_exit(view(), 0, Outcome.SUCCEEDED, 0), at(2))
        assert ends_as(action, Outcome.SUCCEEDED)
        assert isinstance(action, a.Advance)
        assert action.exit_code == 0

    def test_a_gang_succeeds_when_all_ranks_do(self) -> None:
        one = with_exit(view(ranks=2), 0, Outcome.SUCCEEDED, 0)
        assert isinstance(decide_attempt(one, at(2)), a.LookAgain)
        assert ends_as(
            decide_attempt(with_exit(one, 1, Outcome.SUCCEEDED, 0), at(2)), Outcome.SUCCEEDED
        )

    @pytest.mark.parametrize(
        ("progress", "outcome"),
        [
            ({}, Outcome.PREEMPTED),
            ({"step": 100}, Outcome.PREEMPTED),
            ({"done": 10, "total": 10}, Outcome.PREEMPTED),
            ({"fraction": 0.99}, Outcome.PREEMPTED),
            ({"fraction": 1.0}, Outcome.SUCCEEDED),
            ({"complete": 1}, Outcome.SUCCEEDED),
            ({"complete": 0, "fraction": 1.0}, Outcome.PREEMPTED),
            ({"complete": "no"}, Outcome.PREEMPTED),
        ],
    )
    def test_an_exit_0_after_a_signal_is_success_of_complete_work_only(
        self, progress: dict[str, float | str], outcome: Outcome
    ) -> None:
        told = with_exit(view(), 0, Outcome.PREEMPTED, 0)
        action = decide_attempt(with_progress(told, 0, progress), at(2))
        assert ends_as(action, outcome)
        assert isinstance(action, a.Advance)
        assert ("did not report" in action.reason) == (outcome is Outcome.PREEMPTED)

    def test_work_that_failed_after_a_signal_is_not_saved_by_its_report(self) -> None:
        told = with_exit(view(), 0, Outcome.PREEMPTED, 143)
        action = decide_attempt(with_progress(told, 0, {"complete": 1}), at(2))
        assert ends_as(action, Outcome.PREEMPTED)

    @pytest.mark.parametrize(
        ("codes", "progress", "outcome"),
        [
            ((0, 143), ({}, {}), Outcome.PREEMPTED),
            ((0, 143), ({"complete": 1}, {}), Outcome.PREEMPTED),
            ((0, 0), ({}, {}), Outcome.PREEMPTED),
            ((0, 0), ({"complete": 1}, {}), Outcome.SUCCEEDED),
            ((0, 0), ({"complete": 1}, {"fraction": 0.5}), Outcome.PREEMPTED),
        ],
    )
    def test_a_gang_is_complete_when_every_rank_that_reports_is(
        self,
        codes: tuple[int, int],
        progress: tuple[dict[str, float | str], ...],
        outcome: Outcome,
    ) -> None:
        gang = view(ranks=2, drill_until=at(60))
        for rank, code in enumerate(codes):
            gang = with_progress(gang, rank, progress[rank])
            assert isinstance(decide_attempt(gang, at(2)), (a.LookAgain, a.Tell))
            gang = with_exit(gang, rank, Outcome.PREEMPTED, code, 1 + rank)
        assert ends_as(decide_attempt(gang, at(3)), outcome)

    def test_a_rank_that_ended_before_the_signal_does_not_end_the_others(self) -> None:
        gang = with_exit(view(ranks=2), 0, Outcome.SUCCEEDED, 0)
        assert ends_as(
            decide_attempt(with_exit(gang, 1, Outcome.PREEMPTED, 0), at(3)), Outcome.PREEMPTED
        )

    def test_a_failed_rank_stops_the_others_and_names_the_exit_code(self) -> None:
        failed = with_exit(view(ranks=3), 1, Outcome.EXIT, 7)
        action = decide_attempt(failed, at(2))
        assert isinstance(action, a.Tell)
        assert (action.ranks, action.kind) == ((0, 2), "stop")
        order = Order(seq=1, kind="stop", seconds=10, reason="")
        told = replace(failed, nodes=tuple(replace(node, order=order) for node in failed.nodes))
        assert isinstance(decide_attempt(told, at(2)), a.LookAgain)
        stopped = with_exit(
            with_exit(told, 0, Outcome.STOPPED, 143, 3), 2, Outcome.STOPPED, 143, 0.5
        )
        end = decide_attempt(stopped, at(4))
        assert isinstance(end, a.Advance)
        assert (end.outcome, end.exit_code, end.rank) == (Outcome.EXIT, 7, 1)

    def test_stubborn_ranks_are_not_waited_for_without_end(self) -> None:
        failed = with_exit(view(ranks=2), 1, Outcome.EXIT, 7)
        assert ends_as(
            decide_attempt(failed, at(1) + timedelta(seconds=10) + a.MARGIN), Outcome.EXIT
        )

    def test_the_first_failure_is_the_earliest(self) -> None:
        both = with_exit(with_exit(view(ranks=2), 0, Outcome.EXIT, 1, 9), 1, Outcome.EXIT, 2, 3)
        action = decide_attempt(both, at(10))
        assert isinstance(action, a.Advance)
        assert (action.exit_code, action.rank) == (2, 1)

    def test_the_place_took_it_back(self) -> None:
        assert ends_as(decide_attempt(view(seen=gone(preempted=True)), at(10)), Outcome.PREEMPTED)
        assert ends_as(decide_attempt(view(seen=gone()), at(10)), Outcome.NODE)

    def test_an_exit_that_was_reported_counts_more_than_the_gangs_end(self) -> None:
        done = with_exit(view(seen=gone()), 0, Outcome.SUCCEEDED, 0)
        assert ends_as(decide_attempt(done, at(10)), Outcome.SUCCEEDED)

    def test_one_lost_node_is_the_gangs_loss_unless_its_work_was_over(self) -> None:
        lost = view(ranks=2, seen=alive(ended_rank=1, ranks=2))
        action = decide_attempt(lost, at(10))
        assert ends_as(action, Outcome.NODE)
        done = with_exit(lost, 1, Outcome.SUCCEEDED, 0)
        assert isinstance(decide_attempt(done, at(10)), a.LookAgain)

    def test_one_look_that_misses_the_gang_is_counted_and_not_believed(self) -> None:
        absent = view(seen=Look.ABSENT)
        late = at(1000)
        assert isinstance(decide_attempt(absent, late), a.Miss)
        once = view(seen=Look.ABSENT, missed_looks=1, missed_since=late)
        assert isinstance(decide_attempt(once, late + SETTLE / 2), a.LookAgain)
        assert isinstance(decide_attempt(once, late + SETTLE), a.Miss)
        twice = view(seen=Look.ABSENT, missed_looks=2, missed_since=late)
        assert ends_as(decide_attempt(twice, late + SETTLE), Outcome.NODE)

    def test_an_agent_that_was_just_heard_is_there_whatever_the_place_says(self) -> None:
        twice = view(seen=Look.ABSENT, missed_looks=2, missed_since=T0)
        assert isinstance(
            decide_attempt(twice, T0 + a.HEARD_LATELY - timedelta(seconds=1)), a.LookAgain
        )

    def test_found_again(self) -> None:
        assert isinstance(
            decide_attempt(view(seen=alive(), missed_looks=1, missed_since=T0), at(1)), a.Found
        )

    def test_silence_longer_than_the_lease(self) -> None:
        quiet = view(seen=alive())
        lease = quiet.job.task.limits.unattended + quiet.job.task.grace + a.MARGIN
        assert isinstance(decide_attempt(quiet, T0 + lease - timedelta(seconds=1)), a.LookAgain)
        assert ends_as(decide_attempt(quiet, T0 + lease), Outcome.NODE)
        restarted = replace(quiet, listening_since=T0 + lease)
        assert isinstance(decide_attempt(restarted, T0 + lease), a.LookAgain)

    def test_a_drill_tells_and_then_takes(self) -> None:
        drilled = view(drill_until=at(30))
        told = decide_attempt(drilled, at(1))
        assert isinstance(told, a.Tell)
        assert (told.kind, told.seconds) == ("notice", 29)
        assert ends_as(decide_attempt(drilled, at(30)), Outcome.PREEMPTED)

    @pytest.mark.parametrize(
        ("moved", "course", "reason"),
        [
            (False, None, "a fire drill takes the node"),
            (False, Course(at=T0, mode="idle", reason="cheap"), "a fire drill takes the node"),
            (True, None, "the work moves to another gang"),
            (
                True,
                Course(at=T0, mode="on-demand", reason="cheap"),
                "the work moves to another gang",
            ),
            (
                True,
                Course(at=T0, mode="idle", reason="cheap", place="p/r/t"),
                "the work moves to another gang",
            ),
            (True, Course(at=T0, mode="idle", reason="cheap"), "the job waits for spot"),
        ],
    )
    def test_why_we_take_a_gang_away_ourselves_is_told(
        self, moved: bool, course: Course | None, reason: str
    ) -> None:
        leaving = view(job=make_job(course=course), drill_until=at(30), moved=moved)
        told, end = decide_attempt(leaving, at(1)), decide_attempt(leaving, at(30))
        assert isinstance(told, a.Tell)
        assert isinstance(end, a.Advance)
        assert (told.reason, end.reason) == (reason, reason)
        sooner = replace(leaving, nodes=(replace(leaving.nodes[0], notice_until=at(20)),))
        taken = decide_attempt(sooner, at(20))
        assert isinstance(taken, a.Advance)
        assert taken.reason == "the place takes the node back"

    def test_one_nodes_notice_is_every_ranks(self) -> None:
        two = view(ranks=2)
        noticed = replace(two, nodes=(replace(two.nodes[0], notice_until=at(60)), two.nodes[1]))
        action = decide_attempt(noticed, at(1))
        assert isinstance(action, a.Tell)
        assert action.ranks == (0, 1)

    def test_a_stop_is_an_order_then_a_removal(self) -> None:
        job = make_job(JobPhase.STOPPING, stop_reason="enough", stop_cause=StopCause.USER)
        stopping = view(job=job)
        assert isinstance(decide_attempt(stopping, at(1)), a.Tell)
        order = Order(seq=1, kind="stop", seconds=10, reason="enough")
        told = replace(stopping, nodes=(replace(stopping.nodes[0], order=order),))
        assert decide_attempt(told, at(14)) == a.LookAgain(
            after=timedelta(seconds=1)
        )  # its grace and a margin
        assert ends_as(decide_attempt(told, at(15)), Outcome.STOPPED)
        assert ends_as(
            decide_attempt(with_exit(stopping, 0, Outcome.STOPPED, 143), at(2)), Outcome.STOPPED
        )
        assert ends_as(
            decide_attempt(with_exit(stopping, 0, Outcome.SUCCEEDED, 0), at(2)), Outcome.SUCCEEDED
        )
        told = with_exit(stopping, 0, Outcome.STOPPED, 0)
        assert ends_as(decide_attempt(told, at(2)), Outcome.STOPPED)
        complete = with_progress(told, 0, {"complete": 1})
        assert ends_as(decide_attempt(complete, at(2)), Outcome.SUCCEEDED)
        limited = replace(told, job=replace(job, stop_cause=StopCause.BUDGET))
        assert ends_as(decide_attempt(limited, at(2)), Outcome.LIMIT)

    def test_an_attempt_that_was_overtaken_goes(self) -> None:
        assert ends_as(decide_attempt(view(job=make_job(attempt=2)), at(1)), Outcome.STOPPED)


class TestKept:
    def test_waits_for_the_next_job_no_longer_than_its_time(self) -> None:
        kept = view(AttemptPhase.KEPT, seen=alive(), kept_since=T0, kept_until=at(40))
        waiting = decide_attempt(kept, at(30))
        assert isinstance(waiting, a.LookAgain)
        assert waiting.after <= timedelta(seconds=10)
        over = decide_attempt(kept, at(40))
        assert isinstance(over, a.Advance)
        assert (over.phase, over.reason) == (
            AttemptPhase.ENDING,
            "no job came for the gang that was kept",
        )

    @pytest.mark.parametrize("seen", [alive(ended_rank=0), gone(), gone(preempted=True)])
    def test_a_node_that_is_gone_ends_it(self, seen: GangSeen) -> None:
        kept = with_exit(
            view(AttemptPhase.KEPT, seen=seen, kept_until=at(600)), 0, Outcome.SUCCEEDED, 0
        )
        action = decide_attempt(kept, at(10))
        assert isinstance(action, a.Advance)
        assert (action.phase, action.outcome) == (AttemptPhase.ENDING, None)
        assert action.reason.startswith("lost while it was kept: ")

    def test_agents_that_do_not_wait_end_it(self) -> None:
        kept = view(AttemptPhase.KEPT, ranks=2, seen=alive(ranks=2), kept_until=at(600))
        silent = replace(kept, nodes=(replace(kept.nodes[0], heard_at=at(59)), kept.nodes[1]))
        assert isinstance(decide_attempt(silent, at(59)), a.LookAgain)
        action = decide_attempt(silent, T0 + a.HEARD_LATELY)
        assert isinstance(action, a.Advance)
        assert action.reason == "an agent of the gang that was kept does not wait"

    @pytest.mark.parametrize(
        ("seen", "after"),
        [
            (Look.UNKNOWN, 2.5),
            (alive(), 2.5),  # one of two
            (
                GangSeen(
                    name="g",
                    state=GangState.RUNNING,
                    nodes=[NodeSeen(rank=n, engine_id="e") for n in (0, 1)],
                ),
                2.5,
            ),
            (alive(ranks=2), 15),
        ],
    )
    def test_is_looked_at_soon_until_every_node_can_be_billed(
        self, seen: a.Seen, after: float
    ) -> None:
        """Until then nobody can take it over."""
        kept = view(AttemptPhase.KEPT, ranks=2, seen=seen, kept_since=T0, kept_until=at(600))
        assert decide_attempt(kept, at(10)) == a.LookAgain(after=timedelta(seconds=after))


class TestEnding:
    def test_asks_for_the_removal_and_again_if_it_shows_no_effect(self) -> None:
        there = view(AttemptPhase.ENDING, seen=alive())
        assert isinstance(decide_attempt(there, at(1)), a.Remove)
        asked = replace(there, removed_at=at(1))
        assert isinstance(decide_attempt(asked, at(2)), a.LookAgain)
        assert isinstance(decide_attempt(asked, at(1) + a.REMOVE_AGAIN), a.Remove)

    def test_is_over_once_the_place_says_when_each_node_ended(self) -> None:
        action = decide_attempt(view(AttemptPhase.ENDING, seen=gone()), at(10))
        assert isinstance(action, a.Advance)
        assert action.phase is AttemptPhase.ENDED
        vague = view(AttemptPhase.ENDING, seen=gone(told=False))
        assert isinstance(decide_attempt(vague, at(10)), a.LookAgain)
        assert isinstance(decide_attempt(vague, T0 + a.END_TIMES_TIMEOUT), a.Advance)

    @pytest.mark.parametrize(
        ("misses", "outcome", "over"),
        [
            (1, Outcome.NODE, False),
            (2, Outcome.NODE, True),
            (1, Outcome.CAPACITY, True),
            (0, Outcome.REFUSED, False),
        ],
    )
    def test_absence_is_believed_after_enough_witnesses(
        self, misses: int, outcome: Outcome, over: bool
    ) -> None:
        launched = None if outcome in (Outcome.CAPACITY, Outcome.REFUSED) else T0
        absent = view(
            AttemptPhase.ENDING,
            seen=Look.ABSENT,
            missed_looks=misses,
            missed_since=T0 if misses else None,
            outcome=outcome,
            launched_at=launched,
        )
        action = decide_attempt(absent, at(1))
        assert isinstance(action, a.Advance) == over

    @pytest.mark.parametrize(
        ("denied", "unsure", "launched", "over"),
        [
            (True, False, None, True),
            (False, False, None, False),
            (True, True, None, False),  # an earlier request was never answered
            (True, False, T0, False),  # an earlier one was granted
        ],
    )
    def test_a_place_that_said_no_to_the_only_request_is_believed_at_once(
        self, denied: bool, unsure: bool, launched: datetime | None, over: bool
    ) -> None:
        """Also where the row says nothing of it: its job was stopped while the answer was on its
        way.
        """
        absent = view(
            AttemptPhase.ENDING,
            seen=Look.ABSENT,
            missed_looks=1,
            missed_since=T0,
            outcome=Outcome.STOPPED,
            launched_at=launched,
        )
        action = decide_attempt(replace(absent, denied=denied, unsure=unsure), at(1))
        assert isinstance(action, a.Advance) is over

    def test_a_place_that_shows_nothing_yet_is_asked_to_remove_all_the_same(self) -> None:
        absent = view(AttemptPhase.ENDING, seen=Look.ABSENT)
        assert decide_attempt(absent, at(1)) == a.Remove(missed=True)


times = st.integers(-100, 100_000).map(at)
maybe_times = st.none() | times
nodes = st.builds(
    Node,
    attempt_id=st.just("j-1"),
    project=st.just("p"),
    rank=st.just(0),
    phase=st.sampled_from(NodePhase),
    claim=st.none() | st.just("n"),
    order=st.sampled_from(
        [None, *(Order(seq=1, kind=kind, seconds=1, reason="") for kind in ("stop", "notice"))]
    ),
    exit_code=st.none() | st.integers(0, 255),
    exit_outcome=st.none() | st.sampled_from(Outcome),
    claimed_at=maybe_times,
    running_at=maybe_times,
    exited_at=maybe_times,
    heard_at=maybe_times,
    notice_until=maybe_times,
)
attempts = st.builds(
    Attempt,
    id=st.just("j-1"),
    job_id=st.just("j"),
    project=st.just("p"),
    number=st.just(1),
    gang=st.just("g"),
    offer=st.just(OFFER),
    nodes=st.just(1),
    reason=st.just("why"),
    phase=st.sampled_from(AttemptPhase),
    outcome=st.none() | st.sampled_from(Outcome),
    created_at=times,
    since=times,
    launched_at=maybe_times,
    running_at=maybe_times,
    missed_looks=st.integers(0, 3),
    missed_since=maybe_times,
    drill_until=maybe_times,
)
seen_nodes = st.builds(
    NodeSeen,
    rank=st.integers(0, 2),
    engine_id=st.just("e"),
    started_at=maybe_times,
    ended_at=maybe_times,
)
looks = st.sampled_from(Look) | st.builds(
    GangSeen,
    name=st.just("g"),
    state=st.sampled_from(GangState),
    preempted=st.booleans(),
    nodes=st.lists(seen_nodes, max_size=3),
)
jobs = st.builds(
    make_job,
    st.sampled_from(JobPhase),
    stop_reason=st.none() | st.just("x"),
    stop_cause=st.none() | st.sampled_from(StopCause),
    attempt=st.integers(1, 2),
    since=times,
)
views = st.builds(
    AttemptView,
    job=jobs,
    attempt=attempts,
    nodes=st.lists(nodes, min_size=1, max_size=3).map(
        lambda group: tuple(replace(node, rank=rank) for rank, node in enumerate(group))
    ),
    seen=looks,
    settle=st.sampled_from([timedelta(0), SETTLE]),
    listening_since=times,
    asked=st.booleans(),
    removed_at=maybe_times,
)


@given(views, times)
def test_every_view_has_a_legal_answer(given_view: AttemptView, now: datetime) -> None:
    action = decide_attempt(given_view, now)
    phase = given_view.attempt.phase
    match action:
        case a.Advance():
            assert action.phase in ATTEMPT_MOVES[phase]
            assert action.reason
            told = phase is AttemptPhase.KEPT  # its outcome is known already
            assert (action.phase is AttemptPhase.ENDING and not told) == (
                action.outcome is not None
            )
        case a.LookAgain():
            assert action.after > timedelta(0), "nothing to do now means some time later"
        case a.Tell():
            assert action.ranks
            assert all(
                given_view.nodes[rank].phase is not NodePhase.EXITED for rank in action.ranks
            )
        case a.Launch():
            assert phase is AttemptPhase.LAUNCHING
        case a.Remove():
            assert phase is AttemptPhase.ENDING
        case a.Miss():
            assert given_view.seen is Look.ABSENT
        case a.Found():
            assert isinstance(given_view.seen, GangSeen)


def test_every_phase_is_reached_and_decided() -> None:
    for moves, start in ((ATTEMPT_MOVES, AttemptPhase.LAUNCHING), (JOB_MOVES, JobPhase.QUEUED)):
        reached, todo = {start}, [start]
        while todo:
            for phase in moves[todo.pop()]:  # type: ignore[index]  # one loop over two tables
                if phase not in reached:
                    reached.add(phase)
                    todo.append(phase)
        assert reached == set(moves)
    assert set(a.DECIDE) == set(AttemptPhase)
    assert {
        phase for phase, moves in JOB_MOVES.items() if not set(moves) - {JobPhase.QUEUED}
    } == JOB_ENDS
