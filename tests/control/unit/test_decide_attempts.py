"""The decisions about attempts: every view has an answer, and the answers that matter are the
right ones.
"""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.records import make_attempt_record, make_job_record

from cavvy.control.decide import attempt as a
from cavvy.control.decide.attempt import decide_attempt
from cavvy.control.decide.attempt_snapshot import (
    HEARD_LATELY,
    MARGIN,
    AttemptSnapshot,
    GangAbsence,
    Seen,
)
from cavvy.domain.jobs import (
    ATTEMPT_MOVES,
    JOB_ENDS,
    JOB_MOVES,
    Attempt,
    AttemptOutcome,
    AttemptPhase,
    JobPhase,
    JobRecord,
    Node,
    NodePhase,
    Order,
    PlanState,
    StopCause,
)
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.base import GangSeen, GangState, NodeSeen

T0 = datetime(2030, 1, 1, tzinfo=UTC)
OFFER = Offer(provider="p", region="r", instance_type="t", rate=HourlyRate(1))
VISIBILITY_DELAY = timedelta(minutes=2)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def absent_at_end(
    launched: datetime | None, outcome: AttemptOutcome = AttemptOutcome.STOPPED, misses: int = 1
) -> AttemptSnapshot:
    """An ending attempt whose gang so many looks have missed."""
    return view(
        AttemptPhase.ENDING,
        seen=GangAbsence.ABSENT,
        missed_looks=misses,
        missed_since=T0 if misses else None,
        outcome=outcome,
        launched_at=launched,
    )


def view(
    phase: AttemptPhase = AttemptPhase.RUNNING,
    *,
    ranks: int = 1,
    claimed: bool = True,
    seen: Seen = GangAbsence.UNKNOWN,
    job: JobRecord | None = None,
    **changes: object,
) -> AttemptSnapshot:
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
    attempt = make_attempt_record(
        T0,
        OFFER,
        nodes=ranks,
        phase=phase,
        launched_at=None if phase is AttemptPhase.LAUNCHING else T0,
    )
    given_job = job or make_job()
    made = AttemptSnapshot(
        job=given_job,
        attempt=attempt,
        nodes=tuple(nodes),
        seen=seen,
        visibility_delay=VISIBILITY_DELAY,
        listening_since=T0,
    )
    return replace(made, attempt=replace(attempt, **changes)) if changes else made  # type: ignore[arg-type]


def make_job(phase: JobPhase = JobPhase.RUNNING, **changes: object) -> JobRecord:
    job = make_job_record(T0, phase=phase, attempt=1)
    return replace(job, **changes)  # type: ignore[arg-type]


def with_exit(
    old: AttemptSnapshot, rank: int, outcome: AttemptOutcome, code: int, seconds: float = 1
) -> AttemptSnapshot:
    nodes = list(old.nodes)
    nodes[rank] = replace(
        nodes[rank],
        phase=NodePhase.EXITED,
        exit_outcome=outcome,
        exit_code=code,
        exited_at=at(seconds),
    )
    return replace(old, nodes=tuple(nodes))


def with_order(old: AttemptSnapshot, rank: int, kind: str, given: datetime) -> AttemptSnapshot:
    nodes = list(old.nodes)
    order = Order(seq=1, kind=kind, seconds=10, reason="", at=given)
    nodes[rank] = replace(nodes[rank], order=order)
    return replace(old, nodes=tuple(nodes))


def with_progress(
    old: AttemptSnapshot, rank: int, values: dict[str, float | str]
) -> AttemptSnapshot:
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


def ends_as(action: a.Action, outcome: AttemptOutcome) -> bool:
    return (
        isinstance(action, a.AdvanceAttempt)
        and action.phase is AttemptPhase.ENDING
        and action.outcome is outcome
    )


class TestBootTime:
    @pytest.mark.parametrize("started", [(None, 600), (600, None), (60, 600)])
    def test_a_boot_begins_with_the_start_of_the_last_node(
        self, started: tuple[float | None, float | None]
    ) -> None:
        nodes = [
            NodeSeen(rank=rank, engine_id="", started_at=None if since is None else at(since))
            for rank, since in enumerate(started)
        ]
        seen = GangSeen(name="g", state=GangState.RUNNING, nodes=nodes)
        booting = view(AttemptPhase.BOOTING, ranks=2, claimed=False, seen=seen)
        over = at(600) + a.BOOT_TIMEOUT
        assert isinstance(decide_attempt(booting, over - timedelta(seconds=1)), a.RecheckAttempt)
        assert ends_as(decide_attempt(booting, over), AttemptOutcome.TIMEOUT)


class TestLaunching:
    def test_asks_the_place(self) -> None:
        assert isinstance(
            decide_attempt(view(AttemptPhase.LAUNCHING, claimed=False), at(1)), a.LaunchGang
        )

    def test_looks_before_it_asks_again(self) -> None:
        doubtful = replace(view(AttemptPhase.LAUNCHING, claimed=False), asked=True)
        assert isinstance(decide_attempt(doubtful, at(1)), a.RecheckAttempt)
        assert isinstance(
            decide_attempt(replace(doubtful, seen=GangAbsence.ABSENT), at(1)), a.LaunchGang
        )
        found = decide_attempt(replace(doubtful, seen=alive()), at(1))
        assert isinstance(found, a.AdvanceAttempt)
        assert found.phase is AttemptPhase.BOOTING

    def test_goes_on_with_the_launch_until_the_agent_of_every_rank_has_reported_in(self) -> None:
        whole = view(AttemptPhase.LAUNCHING, ranks=3, seen=GangAbsence.ABSENT)
        late = replace(whole.nodes[2], phase=NodePhase.EXPECTED, claim=None)
        part = replace(whole, nodes=(*whole.nodes[:2], late))
        assert isinstance(decide_attempt(part, at(1)), a.LaunchGang)
        action = decide_attempt(whole, at(1))
        assert isinstance(action, a.AdvanceAttempt)
        assert action.phase is AttemptPhase.BOOTING
        assert ends_as(decide_attempt(part, T0 + a.LAUNCH_TIMEOUT), AttemptOutcome.TIMEOUT)

    def test_gives_up_a_place_without_a_clear_answer(self) -> None:
        action = decide_attempt(view(AttemptPhase.LAUNCHING, claimed=False), T0 + a.LAUNCH_TIMEOUT)
        assert ends_as(action, AttemptOutcome.TIMEOUT)

    @pytest.mark.parametrize(
        ("phase", "seen", "reason"),
        [
            (
                AttemptPhase.LAUNCHING,
                GangAbsence.UNKNOWN,
                "the provider gave no clear answer for 10 minutes: no route",
            ),
            (
                AttemptPhase.BOOTING,
                GangAbsence.UNKNOWN,
                "no agent of rank 0, 1 contacted the server within 20 minutes: no route",
            ),
            (
                AttemptPhase.BOOTING,
                replace(alive(ranks=2), reason="the image cannot be pulled"),
                "no agent of rank 0, 1 contacted the server within 20 minutes: the image cannot be "
                "pulled",
            ),
        ],
    )
    def test_a_start_that_takes_too_long_ends_with_the_last_known_cause(
        self, phase: AttemptPhase, seen: Seen, reason: str
    ) -> None:
        late = replace(view(phase, ranks=2, claimed=False, seen=seen), trouble="no route")
        action = decide_attempt(late, T0 + timedelta(hours=1))
        assert ends_as(action, AttemptOutcome.TIMEOUT)
        assert isinstance(action, a.AdvanceAttempt)
        assert action.reason == reason

    def test_a_gang_that_ends_before_its_agents_call_is_told_apart(self) -> None:
        """A machine that cannot reach the server ends itself, and its cloud knows no reason."""
        boot = view(AttemptPhase.BOOTING, ranks=2, claimed=False, seen=gone())
        action = decide_attempt(boot, at(900))
        assert isinstance(action, a.AdvanceAttempt)
        assert action.reason == "the gang ended before the agent of rank 0, 1 contacted the server"
        lost = replace(boot, seen=alive(ended_rank=1, ranks=2))
        action = decide_attempt(lost, at(900))
        assert isinstance(action, a.AdvanceAttempt)
        assert action.reason == "the node of rank 1 was lost before its agent contacted the server"

    def test_a_stop_before_the_launch_still_removes(self) -> None:
        job = make_job(JobPhase.STOPPING, stop_reason="enough", stop_cause=StopCause.USER)
        assert ends_as(
            decide_attempt(view(AttemptPhase.LAUNCHING, claimed=False, job=job), at(1)),
            AttemptOutcome.STOPPED,
        )


class TestBooting:
    def test_a_long_setup_is_no_missing_agent(self) -> None:
        gang, late = view(AttemptPhase.BOOTING, ranks=2, seen=alive(ranks=2)), T0 + a.BOOT_TIMEOUT
        set_up = replace(
            gang,
            nodes=tuple(
                replace(each, phase=NodePhase.CLAIMED, running_at=None, heard_at=late)
                for each in gang.nodes
            ),
        )
        assert isinstance(decide_attempt(set_up, late), a.RecheckAttempt)
        missing = replace(set_up.nodes[1], phase=NodePhase.EXPECTED, claim=None)
        action = decide_attempt(replace(set_up, nodes=(set_up.nodes[0], missing)), late)
        assert ends_as(action, AttemptOutcome.TIMEOUT)

    def test_runs_once_every_rank_runs(self) -> None:
        whole = view(AttemptPhase.BOOTING, ranks=2)
        action = decide_attempt(whole, at(1))
        assert isinstance(action, a.AdvanceAttempt)
        assert action.phase is AttemptPhase.RUNNING
        half = replace(whole, nodes=(whole.nodes[0], replace(whole.nodes[1], running_at=None)))
        assert isinstance(decide_attempt(half, at(1)), a.RecheckAttempt)

    def test_times_out_without_claims(self) -> None:
        silent = view(AttemptPhase.BOOTING, claimed=False, seen=alive())
        assert isinstance(
            decide_attempt(silent, T0 + a.BOOT_TIMEOUT - timedelta(seconds=1)), a.RecheckAttempt
        )
        assert ends_as(decide_attempt(silent, T0 + a.BOOT_TIMEOUT), AttemptOutcome.TIMEOUT)

    def test_waiting_in_the_places_own_queue_is_not_booting(self) -> None:
        queued = GangSeen(name="g", state=GangState.QUEUED)
        action = decide_attempt(
            view(AttemptPhase.BOOTING, claimed=False, seen=queued), T0 + 10 * a.BOOT_TIMEOUT
        )
        assert isinstance(action, a.RecheckAttempt)

    def test_absence_without_a_claim_waits_for_the_boot_timeout(self) -> None:
        missed = view(
            AttemptPhase.BOOTING,
            claimed=False,
            seen=GangAbsence.ABSENT,
            missed_looks=2,
            missed_since=at(1),
        )
        assert isinstance(decide_attempt(missed, at(300)), a.RecheckAttempt)


class TestRunning:
    def test_a_good_end(self) -> None:
        action = decide_attempt(with_exit(view(), 0, AttemptOutcome.SUCCEEDED, 0), at(2))
        assert ends_as(action, AttemptOutcome.SUCCEEDED)
        assert isinstance(action, a.AdvanceAttempt)
        assert action.exit_code == 0

    def test_a_gang_succeeds_when_all_ranks_do(self) -> None:
        one = with_exit(view(ranks=2), 0, AttemptOutcome.SUCCEEDED, 0)
        assert isinstance(decide_attempt(one, at(2)), a.RecheckAttempt)
        assert ends_as(
            decide_attempt(with_exit(one, 1, AttemptOutcome.SUCCEEDED, 0), at(2)),
            AttemptOutcome.SUCCEEDED,
        )

    @pytest.mark.parametrize(
        ("progress", "outcome"),
        [
            ({}, AttemptOutcome.PREEMPTED),
            ({"step": 100}, AttemptOutcome.PREEMPTED),
            ({"done": 10, "total": 10}, AttemptOutcome.PREEMPTED),
            ({"fraction": 0.99}, AttemptOutcome.PREEMPTED),
            ({"fraction": 1.0}, AttemptOutcome.SUCCEEDED),
            ({"complete": 1}, AttemptOutcome.SUCCEEDED),
            ({"complete": 0, "fraction": 1.0}, AttemptOutcome.PREEMPTED),
            ({"complete": "no"}, AttemptOutcome.PREEMPTED),
        ],
    )
    def test_an_exit_0_after_a_signal_is_success_of_complete_work_only(
        self, progress: dict[str, float | str], outcome: AttemptOutcome
    ) -> None:
        told = with_exit(view(), 0, AttemptOutcome.PREEMPTED, 0)
        action = decide_attempt(with_progress(told, 0, progress), at(2))
        assert ends_as(action, outcome)
        assert isinstance(action, a.AdvanceAttempt)
        assert ("did not report" in action.reason) == (outcome is AttemptOutcome.PREEMPTED)

    def test_work_that_failed_after_a_signal_is_not_saved_by_its_report(self) -> None:
        told = with_exit(view(), 0, AttemptOutcome.PREEMPTED, 143)
        action = decide_attempt(with_progress(told, 0, {"complete": 1}), at(2))
        assert ends_as(action, AttemptOutcome.PREEMPTED)

    @pytest.mark.parametrize(
        ("codes", "progress", "outcome"),
        [
            ((0, 143), ({}, {}), AttemptOutcome.PREEMPTED),
            ((0, 143), ({"complete": 1}, {}), AttemptOutcome.PREEMPTED),
            ((0, 0), ({}, {}), AttemptOutcome.PREEMPTED),
            ((0, 0), ({"complete": 1}, {}), AttemptOutcome.SUCCEEDED),
            ((0, 0), ({"complete": 1}, {"fraction": 0.5}), AttemptOutcome.PREEMPTED),
        ],
    )
    def test_a_gang_is_complete_when_every_rank_that_reports_is(
        self,
        codes: tuple[int, int],
        progress: tuple[dict[str, float | str], ...],
        outcome: AttemptOutcome,
    ) -> None:
        gang = view(ranks=2, drill_until=at(60))
        for rank, code in enumerate(codes):
            gang = with_progress(gang, rank, progress[rank])
            assert isinstance(decide_attempt(gang, at(2)), (a.RecheckAttempt, a.OrderRanks))
            gang = with_exit(gang, rank, AttemptOutcome.PREEMPTED, code, 1 + rank)
        assert ends_as(decide_attempt(gang, at(3)), outcome)

    def test_a_rank_that_ended_before_the_signal_does_not_end_the_others(self) -> None:
        gang = with_exit(view(ranks=2), 0, AttemptOutcome.SUCCEEDED, 0)
        assert ends_as(
            decide_attempt(with_exit(gang, 1, AttemptOutcome.PREEMPTED, 0), at(3)),
            AttemptOutcome.PREEMPTED,
        )

    def test_a_failed_rank_stops_the_others_and_names_the_exit_code(self) -> None:
        failed = with_exit(view(ranks=3), 1, AttemptOutcome.EXIT, 7)
        action = decide_attempt(failed, at(2))
        assert isinstance(action, a.OrderRanks)
        assert (action.ranks, action.kind) == ((0, 2), "stop")
        order = Order(seq=1, kind="stop", seconds=10, reason="")
        told = replace(failed, nodes=tuple(replace(node, order=order) for node in failed.nodes))
        assert isinstance(decide_attempt(told, at(2)), a.RecheckAttempt)
        stopped = with_exit(
            with_exit(told, 0, AttemptOutcome.STOPPED, 143, 3), 2, AttemptOutcome.STOPPED, 143, 0.5
        )
        end = decide_attempt(stopped, at(4))
        assert isinstance(end, a.AdvanceAttempt)
        assert (end.outcome, end.exit_code, end.rank) == (AttemptOutcome.EXIT, 7, 1)

    def test_stubborn_ranks_are_not_waited_for_without_end(self) -> None:
        failed = with_order(with_exit(view(ranks=2), 1, AttemptOutcome.EXIT, 7), 0, "stop", at(20))
        until = at(20) + timedelta(seconds=10) + MARGIN
        assert decide_attempt(failed, at(20)) == a.RecheckAttempt(after=until - at(20))
        assert ends_as(decide_attempt(failed, until), AttemptOutcome.EXIT)

    def test_a_rank_that_dies_in_its_notice_leaves_the_others_their_grace(self) -> None:
        gang = view(ranks=3)
        noticed = replace(gang, nodes=(*gang.nodes[:2], replace(gang.nodes[2], notice_until=at(4))))
        taken = with_exit(noticed, 2, AttemptOutcome.PREEMPTED, 143)
        told = decide_attempt(taken, at(2))
        assert isinstance(told, a.OrderRanks)
        assert (told.ranks, told.kind, told.seconds) == ((0, 1), "notice", 10)
        for rank in told.ranks:
            taken = with_order(taken, rank, "notice", at(2))
        assert isinstance(decide_attempt(taken, at(16)), a.RecheckAttempt)
        assert ends_as(decide_attempt(taken, at(17)), AttemptOutcome.PREEMPTED)
        for rank in told.ranks:
            taken = with_exit(taken, rank, AttemptOutcome.PREEMPTED, 143, 9)
        action = decide_attempt(taken, at(9))
        assert ends_as(action, AttemptOutcome.PREEMPTED)

    def test_a_short_notice_of_one_node_leaves_the_others_their_grace(self) -> None:
        gang = view(ranks=2)
        noticed = replace(gang, nodes=(gang.nodes[0], replace(gang.nodes[1], notice_until=at(3))))
        told = decide_attempt(noticed, at(1))
        assert isinstance(told, a.OrderRanks)
        assert told.seconds == 10
        for rank in (0, 1):
            noticed = with_order(noticed, rank, "notice", at(1))
        assert isinstance(decide_attempt(noticed, at(3)), a.RecheckAttempt)
        assert ends_as(decide_attempt(noticed, at(16)), AttemptOutcome.PREEMPTED)

    def test_the_first_failure_is_the_earliest(self) -> None:
        both = with_exit(
            with_exit(view(ranks=2), 0, AttemptOutcome.EXIT, 1, 9), 1, AttemptOutcome.EXIT, 2, 3
        )
        action = decide_attempt(both, at(10))
        assert isinstance(action, a.AdvanceAttempt)
        assert (action.exit_code, action.rank) == (2, 1)

    def test_the_place_took_it_back(self) -> None:
        assert ends_as(
            decide_attempt(view(seen=gone(preempted=True)), at(10)), AttemptOutcome.PREEMPTED
        )
        assert ends_as(decide_attempt(view(seen=gone()), at(10)), AttemptOutcome.NODE)

    @pytest.mark.parametrize("state", [GangState.ENDED, GangState.STARTING])
    def test_capacity_that_is_missing_after_the_launch_is_no_failure_of_a_node(
        self, state: GangState
    ) -> None:
        late = replace(gone(), state=state, no_capacity=True, reason="none left")
        action = decide_attempt(view(AttemptPhase.BOOTING, claimed=False, seen=late), at(10))
        assert ends_as(action, AttemptOutcome.CAPACITY)
        assert isinstance(action, a.AdvanceAttempt)
        assert action.reason == "none left"

    def test_a_cancelled_gang_was_stopped_even_if_its_agents_took_it_for_a_preemption(self) -> None:
        cancelled = replace(gone(), cancelled=True, reason="cancelled in Slurm")
        assert ends_as(decide_attempt(view(seen=cancelled), at(10)), AttemptOutcome.STOPPED)
        ending = view(AttemptPhase.ENDING, seen=cancelled, outcome=AttemptOutcome.PREEMPTED)
        action = decide_attempt(ending, at(10))
        assert isinstance(action, a.AdvanceAttempt)
        assert (action.phase, action.outcome, action.reason) == (
            AttemptPhase.ENDED,
            AttemptOutcome.STOPPED,
            "cancelled in Slurm",
        )

    def test_an_exit_that_was_reported_counts_more_than_the_gangs_end(self) -> None:
        done = with_exit(view(seen=gone()), 0, AttemptOutcome.SUCCEEDED, 0)
        assert ends_as(decide_attempt(done, at(10)), AttemptOutcome.SUCCEEDED)

    def test_one_lost_node_is_the_gangs_loss_unless_its_work_was_over(self) -> None:
        lost = view(ranks=2, seen=alive(ended_rank=1, ranks=2))
        told = decide_attempt(lost, at(100))
        assert isinstance(told, a.OrderRanks)
        assert (told.ranks, told.kind, told.seconds) == ((0,), "stop", 10)
        saving = with_order(lost, 0, "stop", at(100))
        assert isinstance(decide_attempt(saving, at(114)), a.RecheckAttempt)
        assert ends_as(decide_attempt(saving, at(115)), AttemptOutcome.NODE)
        saved = with_exit(saving, 0, AttemptOutcome.STOPPED, 143, 103)
        action = decide_attempt(saved, at(103))
        assert ends_as(action, AttemptOutcome.NODE)
        assert isinstance(action, a.AdvanceAttempt)
        assert (action.rank, action.reason) == (1, "the node of rank 1 was lost")
        done = with_exit(lost, 1, AttemptOutcome.SUCCEEDED, 0)
        assert isinstance(decide_attempt(done, at(10)), a.RecheckAttempt)

    def test_one_look_that_misses_the_gang_is_counted_and_not_believed(self) -> None:
        absent = view(seen=GangAbsence.ABSENT)
        late = at(1000)
        assert isinstance(decide_attempt(absent, late), a.CountMiss)
        once = view(seen=GangAbsence.ABSENT, missed_looks=1, missed_since=late)
        assert isinstance(decide_attempt(once, late + VISIBILITY_DELAY / 2), a.RecheckAttempt)
        assert isinstance(decide_attempt(once, late + VISIBILITY_DELAY), a.CountMiss)
        twice = view(seen=GangAbsence.ABSENT, missed_looks=2, missed_since=late)
        assert ends_as(decide_attempt(twice, late + VISIBILITY_DELAY), AttemptOutcome.NODE)

    def test_an_agent_that_was_just_heard_is_there_whatever_the_place_says(self) -> None:
        twice = view(seen=GangAbsence.ABSENT, missed_looks=2, missed_since=T0)
        assert isinstance(
            decide_attempt(twice, T0 + HEARD_LATELY - timedelta(seconds=1)), a.RecheckAttempt
        )

    def test_found_again(self) -> None:
        assert isinstance(
            decide_attempt(view(seen=alive(), missed_looks=1, missed_since=T0), at(1)),
            a.ClearMisses,
        )

    def test_silence_longer_than_the_lease(self) -> None:
        quiet = view(seen=alive())
        lease = quiet.job.task.limits.unattended + quiet.job.task.grace + MARGIN
        assert isinstance(
            decide_attempt(quiet, T0 + lease - timedelta(seconds=1)), a.RecheckAttempt
        )
        assert ends_as(decide_attempt(quiet, T0 + lease), AttemptOutcome.NODE)
        pair = view(ranks=2, seen=alive(ranks=2))
        half = replace(pair, nodes=(replace(pair.nodes[0], heard_at=T0 + lease), pair.nodes[1]))
        told = decide_attempt(half, T0 + lease)
        assert isinstance(told, a.OrderRanks)
        assert told.ranks == (0,)
        restarted = replace(quiet, listening_since=T0 + lease)
        assert isinstance(decide_attempt(restarted, T0 + lease), a.RecheckAttempt)

    def test_a_drill_tells_and_then_takes(self) -> None:
        drilled = view(drill_until=at(30))
        told = decide_attempt(drilled, at(1))
        assert isinstance(told, a.OrderRanks)
        assert (told.kind, told.seconds) == ("notice", 29)
        assert ends_as(decide_attempt(drilled, at(30)), AttemptOutcome.PREEMPTED)

    @pytest.mark.parametrize(
        ("moved", "plan_state", "reason"),
        [
            (False, None, "a fire drill reclaims the node"),
            (
                False,
                PlanState(at=T0, mode="idle", reason="cheap"),
                "a fire drill reclaims the node",
            ),
            (True, None, "the work moves to another gang"),
            (
                True,
                PlanState(at=T0, mode="on-demand", reason="cheap"),
                "the work moves to another gang",
            ),
            (
                True,
                PlanState(at=T0, mode="idle", reason="cheap", place="p/r/t"),
                "the work moves to another gang",
            ),
            (
                True,
                PlanState(at=T0, mode="idle", reason="cheap"),
                "the job waits for spot capacity",
            ),
        ],
    )
    def test_why_we_take_a_gang_away_ourselves_is_told(
        self, moved: bool, plan_state: PlanState | None, reason: str
    ) -> None:
        leaving = view(job=make_job(plan_state=plan_state), drill_until=at(30), moved=moved)
        told, end = decide_attempt(leaving, at(1)), decide_attempt(leaving, at(30))
        assert isinstance(told, a.OrderRanks)
        assert isinstance(end, a.AdvanceAttempt)
        assert (told.reason, end.reason) == (reason, reason)
        sooner = replace(leaving, nodes=(replace(leaving.nodes[0], notice_until=at(20)),))
        taken = decide_attempt(sooner, at(20))
        assert isinstance(taken, a.AdvanceAttempt)
        assert taken.reason == "the provider reclaims the node"

    def test_one_nodes_notice_is_every_ranks(self) -> None:
        two = view(ranks=2)
        noticed = replace(two, nodes=(replace(two.nodes[0], notice_until=at(60)), two.nodes[1]))
        action = decide_attempt(noticed, at(1))
        assert isinstance(action, a.OrderRanks)
        assert action.ranks == (0, 1)

    def test_a_stop_is_an_order_then_a_removal(self) -> None:
        job = make_job(JobPhase.STOPPING, stop_reason="enough", stop_cause=StopCause.USER)
        stopping = view(job=job)
        assert isinstance(decide_attempt(stopping, at(1)), a.OrderRanks)
        order = Order(seq=1, kind="stop", seconds=10, reason="enough")
        told = replace(stopping, nodes=(replace(stopping.nodes[0], order=order),))
        assert decide_attempt(told, at(14)) == a.RecheckAttempt(
            after=timedelta(seconds=1)
        )  # its grace and a margin
        assert ends_as(decide_attempt(told, at(15)), AttemptOutcome.STOPPED)
        assert ends_as(
            decide_attempt(with_exit(stopping, 0, AttemptOutcome.STOPPED, 143), at(2)),
            AttemptOutcome.STOPPED,
        )
        assert ends_as(
            decide_attempt(with_exit(stopping, 0, AttemptOutcome.SUCCEEDED, 0), at(2)),
            AttemptOutcome.SUCCEEDED,
        )
        told = with_exit(stopping, 0, AttemptOutcome.STOPPED, 0)
        assert ends_as(decide_attempt(told, at(2)), AttemptOutcome.STOPPED)
        complete = with_progress(told, 0, {"complete": 1})
        assert ends_as(decide_attempt(complete, at(2)), AttemptOutcome.SUCCEEDED)
        limited = replace(told, job=replace(job, stop_cause=StopCause.BUDGET))
        assert ends_as(decide_attempt(limited, at(2)), AttemptOutcome.LIMIT)

    def test_the_rank_whose_gpu_was_idle_is_named(self) -> None:
        idle = with_exit(view(ranks=2), 1, AttemptOutcome.LIMIT, 143)
        action = decide_attempt(with_exit(idle, 0, AttemptOutcome.STOPPED, 143), at(2))
        assert ends_as(action, AttemptOutcome.LIMIT)
        assert isinstance(action, a.AdvanceAttempt)
        assert (action.reason or "").endswith(" on rank 1")
        job = make_job(JobPhase.STOPPING, stop_reason="spent", stop_cause=StopCause.BUDGET)
        spent = with_exit(replace(view(ranks=2), job=job), 1, AttemptOutcome.STOPPED, 143)
        action = decide_attempt(with_exit(spent, 0, AttemptOutcome.STOPPED, 143), at(2))
        assert isinstance(action, a.AdvanceAttempt)
        assert "on rank" not in (action.reason or "")

    @pytest.mark.parametrize(
        ("exited", "outcome"), [(1, AttemptOutcome.EXIT), (3, AttemptOutcome.STOPPED)]
    )
    def test_a_failure_counts_only_if_it_precedes_the_stop_of_the_other_ranks(
        self, exited: float, outcome: AttemptOutcome
    ) -> None:
        job = make_job(
            JobPhase.STOPPING, stop_reason="enough", stop_cause=StopCause.USER, since=at(2)
        )
        gang = with_exit(view(ranks=2, job=job), 0, AttemptOutcome.STOPPED, 143, 4)
        assert ends_as(
            decide_attempt(with_exit(gang, 1, AttemptOutcome.EXIT, 1, exited), at(5)), outcome
        )

    @pytest.mark.parametrize(("pays", "grace"), [(100, 10), (8, 3), (2, 0)])
    def test_a_stop_for_the_budget_leaves_as_much_grace_as_can_be_paid(
        self, pays: float, grace: float
    ) -> None:
        job = make_job(JobPhase.STOPPING, stop_reason="spent", stop_cause=StopCause.BUDGET)
        action = decide_attempt(replace(view(job=job), pays=timedelta(seconds=pays)), at(1))
        assert isinstance(action, a.OrderRanks)
        assert (action.kind, action.seconds) == ("stop", grace)

    def test_the_end_of_a_notice_is_not_missed_between_two_looks(self) -> None:
        gang = view(seen=alive())
        order = Order(seq=1, kind="notice", seconds=60, reason="", at=T0)
        node = replace(gang.nodes[0], notice_until=at(60), order=order, heard_at=at(50))
        told = replace(gang, nodes=(node,))
        left = timedelta(seconds=10)
        assert decide_attempt(told, at(50)) == a.RecheckAttempt(after=left, holds=left)

    @pytest.mark.parametrize(
        ("more", "outcome", "reason"),
        [
            ({"cancelled": True}, AttemptOutcome.STOPPED, "a person cancelled the gang"),
            ({"preempted": True}, AttemptOutcome.PREEMPTED, "the provider reclaimed the gang"),
            (
                {"no_capacity": True},
                AttemptOutcome.CAPACITY,
                "the provider found no capacity after the launch",
            ),
            ({}, AttemptOutcome.NODE, "the gang ended before its work was complete"),
        ],
    )
    def test_the_loss_of_a_gang_has_a_reason_even_if_the_provider_gives_none(
        self, more: dict[str, bool], outcome: AttemptOutcome, reason: str
    ) -> None:
        seen = replace(gone(), **more)  # type: ignore[arg-type]
        action = decide_attempt(view(seen=seen), at(10))
        assert isinstance(action, a.AdvanceAttempt)
        assert (action.outcome, action.reason) == (outcome, reason)
        action = decide_attempt(view(seen=replace(seen, reason="because")), at(10))
        assert isinstance(action, a.AdvanceAttempt)
        assert action.reason.endswith("because")

    def test_a_stop_does_not_wait_for_the_end_of_a_notice(self) -> None:
        job = make_job(JobPhase.STOPPING, stop_reason="enough", stop_cause=StopCause.BUDGET)
        gang = view(ranks=2, job=job)
        gang = replace(gang, nodes=tuple(replace(n, notice_until=at(9e5)) for n in gang.nodes))
        gang = with_exit(gang, 0, AttemptOutcome.PREEMPTED, 143)
        told = decide_attempt(gang, at(2))
        assert isinstance(told, a.OrderRanks)
        assert told.kind == "stop"
        assert ends_as(decide_attempt(gang, at(15)), AttemptOutcome.LIMIT)

    def test_a_failure_before_the_signal_stands(self) -> None:
        job = make_job(JobPhase.STOPPING, stop_reason="enough", stop_cause=StopCause.USER)
        failed = with_exit(view(job=job), 0, AttemptOutcome.EXIT, 3)
        assert ends_as(decide_attempt(failed, at(2)), AttemptOutcome.EXIT)

    def test_an_attempt_that_was_overtaken_goes(self) -> None:
        assert ends_as(decide_attempt(view(job=make_job(attempt=2)), at(1)), AttemptOutcome.STOPPED)


class TestKept:
    def test_nodes_are_kept_after_their_work_if_the_task_says_so(self) -> None:
        task = TaskSpec(name="n", run="x", keep=timedelta(minutes=10))
        gang = with_exit(view(job=make_job(task=task)), 0, AttemptOutcome.SUCCEEDED, 0)
        action = decide_attempt(gang, at(5))
        assert isinstance(action, a.AdvanceAttempt)
        assert (action.phase, action.until) == (AttemptPhase.KEPT, at(605))

    def test_the_user_releases_it_before_its_time(self) -> None:
        kept = view(AttemptPhase.KEPT, seen=alive(), kept_until=at(600))
        action = decide_attempt(replace(kept, job=make_job(released=True)), at(10))
        assert isinstance(action, a.AdvanceAttempt)
        assert (action.phase, action.reason) == (AttemptPhase.ENDING, "released by the user")
        action = decide_attempt(replace(kept, unpaid="no budget pays"), at(10))
        assert isinstance(action, a.AdvanceAttempt)
        assert action.reason == "no budget pays"

    def test_waits_for_the_next_job_no_longer_than_its_time(self) -> None:
        kept = view(AttemptPhase.KEPT, seen=alive(), kept_since=T0, kept_until=at(40))
        waiting = decide_attempt(kept, at(30))
        assert isinstance(waiting, a.RecheckAttempt)
        assert waiting.after <= timedelta(seconds=10)
        over = decide_attempt(kept, at(40))
        assert isinstance(over, a.AdvanceAttempt)
        assert (over.phase, over.reason) == (
            AttemptPhase.ENDING,
            "no job used the gang in time",
        )

    @pytest.mark.parametrize("seen", [alive(ended_rank=0), gone(), gone(preempted=True)])
    def test_a_node_that_is_gone_ends_it(self, seen: GangSeen) -> None:
        kept = with_exit(
            view(AttemptPhase.KEPT, seen=seen, kept_until=at(600)), 0, AttemptOutcome.SUCCEEDED, 0
        )
        action = decide_attempt(kept, at(10))
        assert isinstance(action, a.AdvanceAttempt)
        assert (action.phase, action.outcome) == (AttemptPhase.ENDING, None)
        assert action.reason.startswith("lost while it was warm: ")

    def test_agents_that_do_not_wait_end_it(self) -> None:
        kept = view(AttemptPhase.KEPT, ranks=2, seen=alive(ranks=2), kept_until=at(600))
        silent = replace(kept, nodes=(replace(kept.nodes[0], heard_at=at(59)), kept.nodes[1]))
        assert isinstance(decide_attempt(silent, at(59)), a.RecheckAttempt)
        action = decide_attempt(silent, T0 + HEARD_LATELY)
        assert isinstance(action, a.AdvanceAttempt)
        assert action.reason == "an agent of the warm gang is not waiting for work"

    @pytest.mark.parametrize(
        ("seen", "after"),
        [
            (GangAbsence.UNKNOWN, 2.5),
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
        self, seen: Seen, after: float
    ) -> None:
        """Until then nobody can take it over."""
        kept = view(AttemptPhase.KEPT, ranks=2, seen=seen, kept_since=T0, kept_until=at(600))
        assert decide_attempt(kept, at(10)) == a.RecheckAttempt(after=timedelta(seconds=after))


class TestEnding:
    def test_nobody_waits_for_the_end_of_a_node_that_never_started(self) -> None:
        seen = replace(gone(), nodes=[*gone().nodes, NodeSeen(rank=1, engine_id="1")])
        action = decide_attempt(view(AttemptPhase.ENDING, ranks=2, seen=seen), at(10))
        assert isinstance(action, a.AdvanceAttempt)
        assert action.phase is AttemptPhase.ENDED

    @pytest.mark.parametrize(
        ("outcome", "then"),
        [(AttemptOutcome.SUCCEEDED, None), (AttemptOutcome.PREEMPTED, AttemptOutcome.STOPPED)],
    )
    def test_only_a_reclaimed_gang_can_turn_out_to_have_been_cancelled(
        self, outcome: AttemptOutcome, then: AttemptOutcome | None
    ) -> None:
        seen = replace(gone(), cancelled=True)
        ending = view(AttemptPhase.ENDING, seen=seen, outcome=outcome)
        action = decide_attempt(ending, at(10))
        assert isinstance(action, a.AdvanceAttempt)
        assert (action.phase, action.outcome) == (AttemptPhase.ENDED, then)

    def test_asks_for_the_removal_and_again_if_it_shows_no_effect(self) -> None:
        there = view(AttemptPhase.ENDING, seen=alive())
        assert isinstance(decide_attempt(there, at(1)), a.RemoveGang)
        asked = replace(there, removed_at=at(1))
        assert isinstance(decide_attempt(asked, at(2)), a.RecheckAttempt)
        assert isinstance(decide_attempt(asked, at(1) + a.REMOVE_AGAIN), a.RemoveGang)

    def test_is_over_once_the_place_says_when_each_node_ended(self) -> None:
        action = decide_attempt(view(AttemptPhase.ENDING, seen=gone()), at(10))
        assert isinstance(action, a.AdvanceAttempt)
        assert action.phase is AttemptPhase.ENDED
        vague = view(AttemptPhase.ENDING, seen=gone(told=False))
        assert isinstance(decide_attempt(vague, at(10)), a.RecheckAttempt)
        assert isinstance(decide_attempt(vague, T0 + a.END_TIMES_TIMEOUT), a.AdvanceAttempt)

    @pytest.mark.parametrize(
        ("misses", "outcome", "over"),
        [
            (1, AttemptOutcome.NODE, False),
            (2, AttemptOutcome.NODE, True),
            (1, AttemptOutcome.CAPACITY, True),
            (0, AttemptOutcome.REFUSED, False),
        ],
    )
    def test_absence_is_believed_after_enough_witnesses(
        self, misses: int, outcome: AttemptOutcome, over: bool
    ) -> None:
        launched = None if outcome in (AttemptOutcome.CAPACITY, AttemptOutcome.REFUSED) else T0
        absent = absent_at_end(launched, outcome, misses)
        action = decide_attempt(absent, at(1))
        assert isinstance(action, a.AdvanceAttempt) == over

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
        absent = absent_at_end(launched)
        action = decide_attempt(replace(absent, denied=denied, unsure=unsure), at(1))
        assert isinstance(action, a.AdvanceAttempt) is over

    @pytest.mark.parametrize(("unsure", "over"), [(False, True), (True, False)])
    def test_a_gang_that_was_never_requested_is_believed_absent_at_once(
        self, unsure: bool, over: bool
    ) -> None:
        """Its job was stopped before the launch."""
        absent = absent_at_end(None)
        action = decide_attempt(replace(absent, requested=False, unsure=unsure), at(1))
        assert isinstance(action, a.AdvanceAttempt) is over

    def test_a_place_that_shows_nothing_yet_is_asked_to_remove_all_the_same(self) -> None:
        absent = view(AttemptPhase.ENDING, seen=GangAbsence.ABSENT)
        assert decide_attempt(absent, at(1)) == a.RemoveGang(missed=True)


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
    exit_outcome=st.none() | st.sampled_from(AttemptOutcome),
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
    outcome=st.none() | st.sampled_from(AttemptOutcome),
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
looks = st.sampled_from(GangAbsence) | st.builds(
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
    AttemptSnapshot,
    job=jobs,
    attempt=attempts,
    nodes=st.lists(nodes, min_size=1, max_size=3).map(
        lambda group: tuple(replace(node, rank=rank) for rank, node in enumerate(group))
    ),
    seen=looks,
    visibility_delay=st.sampled_from([timedelta(0), VISIBILITY_DELAY]),
    listening_since=times,
    asked=st.booleans(),
    removed_at=maybe_times,
)


@given(views, times)
def test_every_view_has_a_legal_answer(given_view: AttemptSnapshot, now: datetime) -> None:
    action = decide_attempt(given_view, now)
    phase = given_view.attempt.phase
    match action:
        case a.AdvanceAttempt():
            assert action.phase in ATTEMPT_MOVES[phase]
            assert action.reason
            told = phase is AttemptPhase.KEPT  # its outcome is known already
            assert (action.phase is AttemptPhase.ENDING and not told) == (
                action.outcome is not None
            )
        case a.RecheckAttempt():
            assert action.after > timedelta(0), "nothing to do now means some time later"
        case a.OrderRanks():
            assert action.ranks
            assert all(
                given_view.nodes[rank].phase is not NodePhase.EXITED for rank in action.ranks
            )
        case a.LaunchGang():
            assert phase is AttemptPhase.LAUNCHING
        case a.RemoveGang():
            assert phase is AttemptPhase.ENDING
        case a.CountMiss():
            assert given_view.seen is GangAbsence.ABSENT
        case a.ClearMisses():
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
