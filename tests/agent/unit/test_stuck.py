"""Work that makes no progress: what agents see of it, which rank is behind, and how it is ended."""

import io
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.agent.unit.test_agent_idle import Watched
from tests.control.unit.test_control_reports import NODE as REPORTED
from tests.control.unit.test_control_reports import applied, message
from tests.control.unit.test_decide_attempts import T0, at, view, with_exit
from tests.records import make_job_record
from tests.waits import PATIENCE_S, wait_until

from cavvy.agent.work import stacks
from cavvy.agent.work import stacks as taken
from cavvy.agent.work.monitor import NET_FLOW_MIB_S
from cavvy.agent.work.stacks import TOOL, describe, find_call, is_helper, parse_dump, take_stacks
from cavvy.control.decide import attempt as a
from cavvy.control.decide.attempt import decide_attempt
from cavvy.control.decide.attempt_snapshot import HEARD_LATELY, AttemptSnapshot
from cavvy.control.decide.failures import STACKS, STACKS_WAIT, STILL, find_behind
from cavvy.control.decide.rows import JobRows
from cavvy.control.decide.transitions import adjust_attempt
from cavvy.domain.jobs import (
    AttemptOutcome,
    AttemptPhase,
    FailureKind,
    JobPhase,
    Order,
    RankCollective,
    RankStack,
    StackReport,
    StuckWork,
)
from cavvy.domain.messages import MessageKind
from cavvy.domain.tasks import JobLimits, TaskSpec
from cavvy.domain.values import replace

LIMIT = timedelta(minutes=10)
TASK = TaskSpec(name="n", run="x", grace=timedelta(seconds=30), limits=JobLimits(stuck=LIMIT))
JOB = make_job_record(T0, task=TASK, phase=JobPhase.RUNNING, attempt=1)


def silent(*still_s: float | None, heard: float = 1000, **changes: Any) -> AttemptSnapshot:
    """Running ranks that have seen no progress for these seconds; None: the agent does not say."""
    made = view(ranks=len(still_s), job=JOB, **changes)
    nodes = [
        replace(node, heard_at=at(heard), telemetry={} if still is None else {STILL: float(still)})
        for node, still in zip(made.nodes, still_s, strict=True)
    ]
    return replace(made, nodes=tuple(nodes))


def ordered(old: AttemptSnapshot, kind: str = STACKS, seconds: float = 1000) -> AttemptSnapshot:
    order = Order(seq=1, kind=kind, seconds=60, reason="no progress", at=at(seconds))
    return replace(old, nodes=tuple(replace(node, order=order) for node in old.nodes))


def answered(old: AttemptSnapshot, *places: str, seconds: float = 1005) -> AttemptSnapshot:
    """Each rank has answered with one process, at a place such as "all_reduce train.py:1"."""
    nodes = []
    for node, place in zip(old.nodes, places, strict=True):
        call, _, where = place.rpartition(" ")
        stack = RankStack(rank=node.rank, place=where, call=call)
        nodes.append(replace(node, stacks=StackReport(at=at(seconds), stacks=(stack,))))
    return replace(old, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("found", "seconds"),
    [
        (silent(599), 1000),
        (silent(900, 0), 1000),
        (silent(900, None), 1000),
        (silent(900, 900), 1000 + HEARD_LATELY.total_seconds()),
        (silent(900, phase=AttemptPhase.BOOTING), 1000),
        (replace(silent(299), job=replace(JOB, task=replace(TASK, limits=JobLimits()))), 1000),
        (
            replace(
                silent(900), job=replace(JOB, task=replace(TASK, limits=JobLimits(), session=True))
            ),
            1000,
        ),
    ],
    ids=["below", "another moves", "unknown", "agents are silent", "starts", "no limit", "session"],
)
def test_work_that_may_make_progress_is_left_alone(found: AttemptSnapshot, seconds: float) -> None:
    action = decide_attempt(found, at(seconds))
    assert not isinstance(action, a.OrderRanks | a.EndStuck)
    assert not (isinstance(action, a.AdvanceAttempt) and action.failure is FailureKind.STUCK)


def test_the_next_look_is_when_the_limit_may_be_reached() -> None:
    action = decide_attempt(silent(595), at(1000))
    left = timedelta(seconds=6)
    assert action == a.RecheckAttempt(after=left, holds=left)


def test_silent_ranks_are_asked_where_they_are_and_then_stopped() -> None:
    asks = decide_attempt(silent(700, 650), at(1000))
    assert isinstance(asks, a.OrderRanks)
    assert (asks.ranks, asks.kind) == ((0, 1), STACKS)
    waits = ordered(silent(700, 650))
    left = STACKS_WAIT - timedelta(seconds=5)
    assert decide_attempt(waits, at(1005)) == a.RecheckAttempt(after=left)
    found = answered(waits, "all_reduce train.py:9", "train.py:4")
    ends = decide_attempt(found, at(1006))
    assert isinstance(ends, a.EndStuck)
    assert (ends.work.ranks, ends.work.node, ends.ranks) == ((1,), 1, (0, 1))
    assert ends.work.reason == (
        "no progress for 10m00s (limits.stuck): rank 1 has not reached all_reduce, but is at "
        "train.py:4"
    )


def test_the_silence_goes_on_since_the_last_report() -> None:
    assert isinstance(decide_attempt(silent(598, heard=998), at(1000)), a.OrderRanks)
    left = timedelta(seconds=2)
    action = decide_attempt(silent(598, heard=999), at(1000))
    assert action == a.RecheckAttempt(after=left, holds=left)


def test_ranks_that_have_ended_are_not_asked_and_hide_no_hang() -> None:
    found = with_exit(silent(700, 700, 700), 1, AttemptOutcome.SUCCEEDED, 0, 900)
    asks = decide_attempt(found, at(1000))
    assert isinstance(asks, a.OrderRanks)
    assert (asks.ranks, asks.kind) == ((0, 2), STACKS)


def test_no_rank_is_named_before_all_have_answered_or_had_their_time() -> None:
    first, second = ordered(silent(700, 700)).nodes
    second = replace(second, order=replace(second.order, at=at(1004)))  # type: ignore[type-var]  # it has one
    half = replace(silent(700, 700), nodes=(first, second))
    half = replace(half, nodes=(answered(half, "t.py:4", "t.py:4").nodes[0], second))
    assert decide_attempt(half, at(1006)) == a.RecheckAttempt(
        after=STACKS_WAIT - timedelta(seconds=2)
    )


def test_old_answers_and_orders_do_not_count_for_a_new_silence() -> None:
    old = answered(ordered(silent(700), seconds=200), "train.py:4", seconds=210)
    action = decide_attempt(old, at(1000))
    assert isinstance(action, a.OrderRanks)
    assert action.kind == STACKS
    again = answered(ordered(silent(700), seconds=999), "train.py:4", seconds=210)
    assert isinstance(decide_attempt(again, at(1000)), a.RecheckAttempt)


def test_work_whose_agents_do_not_answer_is_named_and_goes_on() -> None:
    late = 1000 + STACKS_WAIT.total_seconds()
    found = replace(
        ordered(silent(700)),
        nodes=tuple(replace(n, heard_at=at(late)) for n in ordered(silent(700)).nodes),
    )
    noted = note(found, late)
    assert noted.attempt.silent is not None
    assert noted.attempt.silent.reason == "no progress for 10m00s (limits.stuck)"
    assert isinstance(decide_attempt(noted, at(late + 1)), a.RecheckAttempt), "noted once"


def test_work_that_only_waits_is_named_and_goes_on() -> None:
    """A coordinator, a server or a loop that sleeps looks like a hang, but no rank waits for it."""
    found = answered(ordered(silent(700, 700)), "serve.py:4", "serve.py:9")
    noted = note(found, 1006)
    assert noted.attempt.silent is not None
    assert "rank 1 is at serve.py:9" in noted.attempt.silent.reason


def test_work_that_nothing_can_wake_is_ended() -> None:
    """Each of its processes waits for itself, on each node."""
    found = answered(ordered(silent(700, 700)), "t.py:4", "t.py:4")

    def tell(*deadlocked: bool) -> AttemptSnapshot:
        nodes = [
            replace(node, stacks=replace(node.stacks, deadlocked=each))  # type: ignore[type-var]  # they have answered
            for node, each in zip(found.nodes, deadlocked, strict=True)
        ]
        return replace(found, nodes=tuple(nodes))

    assert isinstance(decide_attempt(tell(True, True), at(1006)), a.EndStuck)
    note(tell(True, False), 1006)


def working(old: AttemptSnapshot, *stacks: RankStack, seconds: float) -> AttemptSnapshot:
    """The only node has answered that some of its ranks work."""
    [node] = old.nodes
    report = StackReport(at=at(seconds), stacks=stacks, moved=any(each.works for each in stacks))
    return replace(old, nodes=(replace(node, stacks=report),))


LOOP = RankStack(rank=1, place="t.py:4 in spin", works=True)
WAITS = RankStack(rank=0, place="t.py:9", call="all_reduce", mark=7)


def note(found: AttemptSnapshot, seconds: float) -> AttemptSnapshot:
    """Apply the decision, which must be a note; decide again, which must be none."""
    action = decide_attempt(found, at(seconds))
    assert isinstance(action, a.NoteSilent)
    rows = JobRows(job=JOB, attempts={1: found.attempt}, nodes={"j-1": found.nodes})
    (attempt,) = adjust_attempt(rows, found.attempt, action, at(seconds)).attempts
    noted = replace(found, attempt=attempt)
    assert isinstance(decide_attempt(noted, at(seconds)), a.RecheckAttempt)
    return noted


def test_a_rank_that_computes_alone_is_named_and_never_ended() -> None:
    alone = replace(LOOP, rank=0)
    noted = note(working(ordered(silent(700)), alone, seconds=1005), 1006)
    assert noted.attempt.silent is not None
    assert noted.attempt.silent.reason == (
        "no progress for 10m00s (limits.stuck): rank 0 computes at t.py:4 in spin"
    )
    later = replace(noted, nodes=silent(90_000, heard=91_000).nodes)
    assert isinstance(decide_attempt(later, at(91_000)), a.OrderRanks)
    later = working(ordered(later, seconds=91_000), alone, seconds=91_005)
    note(later, 91_006)


def test_a_rank_that_computes_while_others_wait_is_ended_once_they_have_waited_for_long() -> None:
    noted = note(working(ordered(silent(700)), LOOP, WAITS, seconds=1005), 1006)
    assert noted.attempt.silent is not None
    assert noted.attempt.silent.reason.endswith(
        "rank 1 has not reached all_reduce, but is at t.py:4 in spin and computes"
    )

    def look(waits: RankStack, seconds: float) -> AttemptSnapshot:
        again = ordered(
            replace(noted, nodes=silent(seconds - 300, heard=seconds).nodes), seconds=seconds
        )
        return working(again, LOOP, waits, seconds=seconds + 5)

    note(look(WAITS, 2000), 2006)
    note(look(replace(WAITS, mark=8), 3500), 3506)  # they have met between the looks
    ends = decide_attempt(look(WAITS, 3500), at(3506))
    assert isinstance(ends, a.EndStuck)
    assert ends.work.ranks == (1,)


def test_without_the_limit_nothing_is_ended() -> None:
    free = replace(JOB, task=replace(TASK, limits=JobLimits()))
    still = replace(silent(400), job=free)
    assert isinstance(decide_attempt(still, at(1000)), a.OrderRanks)
    told = working(ordered(still), RankStack(rank=0, place="t.py:3"), seconds=1005)
    noted = note(told, 1006)
    assert noted.attempt.silent is not None
    assert noted.attempt.silent.reason == "no progress for 5m00s: rank 0 is at t.py:3"


STUCK = StuckWork(at=at(1000), reason="no progress: rank 1", ranks=(9,), node=1)


def test_stopped_ranks_end_the_attempt_as_stuck_with_the_rank_that_is_behind() -> None:
    found = ordered(silent(700, 700, stuck=STUCK), "stop")
    assert decide_attempt(found, at(1001)) == a.RecheckAttempt(after=timedelta(seconds=34))
    for outcome in (AttemptOutcome.STOPPED, AttemptOutcome.EXIT):
        one = with_exit(found, 0, outcome, 1, 1003)
        both = with_exit(one, 1, AttemptOutcome.STOPPED, 137, 1004)
        ends = decide_attempt(both, at(1005))
        assert isinstance(ends, a.AdvanceAttempt)
        assert (ends.phase, ends.outcome) == (AttemptPhase.ENDING, AttemptOutcome.NODE)
        assert (ends.failure, ends.rank, ends.reason) == (FailureKind.STUCK, 1, STUCK.reason)


def test_ranks_that_do_not_stop_are_removed_after_their_grace_period() -> None:
    found = ordered(silent(700, 700, stuck=STUCK), "stop")
    ends = decide_attempt(found, at(1036))
    assert isinstance(ends, a.AdvanceAttempt)
    assert (ends.failure, ends.rank) == (FailureKind.STUCK, 1)


def test_work_that_succeeds_before_the_stop_has_succeeded() -> None:
    found = with_exit(silent(700, stuck=STUCK), 0, AttemptOutcome.SUCCEEDED, 0, 1001)
    ends = decide_attempt(found, at(1002))
    assert isinstance(ends, a.AdvanceAttempt)
    assert ends.outcome is AttemptOutcome.SUCCEEDED


def test_the_end_is_stored_with_the_orders_and_an_event() -> None:
    found = answered(ordered(silent(700)), "all_reduce train.py:4")
    action = decide_attempt(found, at(1001))
    assert isinstance(action, a.EndStuck)
    rows = JobRows(job=JOB, attempts={1: found.attempt}, nodes={"j-1": found.nodes})
    changes = adjust_attempt(rows, found.attempt, action, at(1001))
    [attempt], [node], [event] = changes.attempts, changes.nodes, changes.events
    assert attempt.stuck == action.work
    assert node.order is not None
    assert (node.order.kind, node.order.seq, node.order.seconds) == ("stop", 2, 30)
    assert (event.kind, event.fact) == ("stuck", "0")


@pytest.mark.parametrize(
    ("places", "world", "ranks", "text"),
    [
        (["all_reduce t.py:1"] * 3 + ["t.py:9"], 4, (3,), "rank 3 has not reached all_reduce"),
        (["all_reduce t.py:1"] * 3, 4, (3,), "rank 3 has no process any more"),
        (
            ["all_reduce t.py:1", "all_reduce t.py:1", "broadcast t.py:2"],
            3,
            (2,),
            "rank 2 waits in broadcast at t.py:2, but each of ranks 0, 1 waits in all_reduce",
        ),
        (["all_reduce t.py:1", "broadcast t.py:2"], 2, (1,), "rank 1 waits in broadcast"),
        (
            ["all_reduce t.py:1", "all_reduce t.py:7"],
            2,
            (1,),
            "rank 1 waits in all_reduce at t.py:7",
        ),
        (["all_reduce t.py:1"] * 2, 2, (), "all 2 ranks: each waits in all_reduce at t.py:1"),
        (["t.py:1", "t.py:2", "t.py:1"], 0, (1,), "rank 1 is at t.py:2, but each of ranks 0, 2 is"),
        (
            ["broadcast t.py:2", "all_reduce t.py:1", "all_reduce t.py:1"],
            3,
            (0,),
            "rank 0 waits in broadcast at t.py:2, but each of ranks 1, 2 waits in all_reduce",
        ),
        (["t.py:1"], 0, (0,), "rank 0 is at t.py:1"),
        (["all_reduce t.py:1"], 10**12, (0,), "rank 0 waits in all_reduce"),
    ],
)
def test_the_rank_that_differs_is_behind(
    places: list[str], world: int, ranks: tuple[int, ...], text: str
) -> None:
    processes = []
    for rank, place in enumerate(places):
        call, _, where = place.rpartition(" ")
        processes.append(RankStack(rank=rank, world=world, place=where, call=call))
    [node] = ordered(silent(700)).nodes
    node = replace(node, stacks=StackReport(at=at(1001), stacks=tuple(processes)))
    found = find_behind([node], "no progress", at(1002))
    assert found.ranks == ranks
    assert text in found.reason
    assert found.node == 0


def test_thousands_of_lost_ranks_are_named_briefly() -> None:
    [node] = ordered(silent(700)).nodes
    stack = RankStack(rank=0, world=5000, place="t.py:1", call="all_reduce")
    node = replace(node, stacks=StackReport(at=at(1001), stacks=(stack,)))
    found = find_behind([node], "no progress", at(1002))
    assert len(found.ranks) == 64
    assert "and 4991 more" in found.reason


def test_a_missing_tool_is_part_of_the_reason() -> None:
    [node] = ordered(silent(700)).nodes
    node = replace(node, stacks=StackReport(at=at(1001), text="no stacks: py-spy is missing"))
    assert find_behind([node], "no progress", at(1002)).reason == (
        "no progress; no stacks: py-spy is missing"
    )


def test_answers_of_agents_become_reports_and_progress_ends_a_silence() -> None:
    stack = RankStack(rank=3, world=4, place="p" * 999, call="all_reduce")
    still = replace(REPORTED, telemetry={STILL: 700.0})
    found = applied(message(MessageKind.STACKS, stacks=[stack]), node=still)
    assert found.moved
    assert found.node.stacks is not None
    assert len(found.node.stacks.stacks[0].place) == 200
    assert found.node.telemetry == {STILL: 700.0}
    moved = applied(message(MessageKind.STACKS, moved=True), node=still)
    assert moved.node.telemetry == {STILL: 700.0}, "work without a sign of it is silent still"
    told = applied(message(MessageKind.PROGRESS, values={"step": 2}), node=still)
    assert told.node.telemetry == {STILL: 0}
    same = replace(still, progress={"step": 2.0})
    told = applied(message(MessageKind.PROGRESS, values={"step": 2}), node=same)
    assert told.node.telemetry == {STILL: 700.0}, "the same step again is no progress"


# What the agent sees


def still_of(watched: Watched) -> float:
    return [fields["values"]["still_s"] for kind, fields in watched.said if kind == "telemetry"][-1]


def test_output_reports_and_data_count_as_progress_and_busy_cpus_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, idle_s=None, stuck_s=600)
    watched.run(5, cpu=800, gpu=100)
    assert still_of(watched) >= 290
    watched.monitor.wrote(b"a line\n")
    watched.run(1, cpu=800)
    assert 50 <= still_of(watched) <= 70
    watched.monitor.wrote(b'CAVVY_PROGRESS {"step": 1}\n')
    watched.usage.rates = {"disk_read_mib_s": 0.2}
    watched.run(3)
    assert still_of(watched) <= 10
    watched.usage.rates = {"net_in_mib_s": NET_FLOW_MIB_S, "disk_read_mib_s": 0.05}
    watched.run(3)
    assert still_of(watched) >= 170, "other jobs use the network too"


def test_a_job_that_has_the_node_alone_makes_progress_by_its_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, idle_s=None, stuck_s=600, alone=True)
    watched.usage.rates = {"net_out_mib_s": NET_FLOW_MIB_S}
    watched.run(3)
    assert still_of(watched) <= 10


def test_without_the_limit_the_silence_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, idle_s=None)
    watched.run(3)
    assert still_of(watched) >= 170


def frame(name: str, file: str, line: int = 1) -> dict[str, Any]:
    return {"name": name, "file": file, "line": line}


TORCH = "/x/site-packages/torch"


@pytest.mark.parametrize(
    ("frames", "call", "place"),
    [
        (
            [
                frame("wait", f"{TORCH}/distributed/distributed_c10d.py", 7),
                frame("all_reduce", f"{TORCH}/distributed/distributed_c10d.py", 3),
                frame("wrapper", f"{TORCH}/distributed/c10d_logger.py"),
                frame("step", "/work/train.py", 12),
            ],
            "all_reduce",
            "train.py:12 in step",
        ),
        (
            [
                frame("_engine_run_backward", f"{TORCH}/autograd/graph.py"),
                frame("backward", f"{TORCH}/_tensor.py"),
                frame("main", "train.py", 5),
            ],
            "backward",
            "train.py:5 in main",
        ),
        (
            [
                frame("wait", "/usr/lib/python3.12/threading.py"),
                frame("_next_data", f"{TORCH}/utils/data/dataloader.py"),
                frame("<module>", "/work/train.py", 9),
            ],
            "",
            "train.py:9 in <module>",
        ),
        ([frame("run", "/usr/lib/python3.12/x.py", 3)], "", "x.py:3 in run"),
    ],
)
def test_a_stack_shows_the_own_line_and_the_wait(
    frames: list[dict[str, Any]], call: str, place: str
) -> None:
    assert find_call(frames) == call
    assert describe(frames) == {"call": call, "place": place}
    assert not is_helper(frames)


def test_helpers_and_launchers_are_no_ranks() -> None:
    assert is_helper(
        [frame("get", "x.py"), frame("_worker_loop", f"{TORCH}/utils/data/_utils/worker.py")]
    )
    assert is_helper([frame("run", f"{TORCH}/distributed/elastic/agent/server/api.py")])


HUNG = """
import sys, threading
def hang():
    print("ready", flush=True)
    threading.Event().wait()
hang()
"""
BUSY = """
import time
print("ready", flush=True)
def work():
    number = 0
    while True: number += 1; time.sleep(0.01)
work()
"""


@contextmanager
def program(text: str, *, ready: str = "S", **env: str) -> Iterator[int]:
    """A running Python program, from when it waits (or runs: R) on."""
    with subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, env={**os.environ, **env}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        stat = Path(f"/proc/{process.pid}/stat")
        try:
            wait_until(lambda: f") {ready} " in stat.read_text())
            yield process.pid
        finally:
            process.kill()


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> str:
    """The path with the real py-spy, without pauses that a test need not wait for."""
    path = os.path.dirname(sys.executable)
    if not taken.find_tool(path):
        pytest.skip("the extra `stacks` is not installed: make setup-dev")
    monkeypatch.setattr(taken, "PAUSE_S", 0.3)
    monkeypatch.setattr(taken, "ROUNDS", 8)
    monkeypatch.setattr(taken, "LIMIT_S", PATIENCE_S)  # a busy machine is no hang
    return path


def test_the_real_tool_finds_where_real_programs_hang(tool: str) -> None:
    with (
        program(HUNG, RANK="1", WORLD_SIZE="2") as one,
        program(HUNG, RANK="0") as zero,
        subprocess.Popen(["sleep", "300"]) as other,  # which is no Python program
    ):
        found = take_stacks(tool, [one, zero, other.pid], rank=0)
        other.kill()
    if "Permission" in found["text"] or "ptrace" in found["text"]:
        pytest.skip(f"this machine forbids py-spy: {found['text']}")
    assert not found["moved"]
    stacks = sorted(found["stacks"], key=lambda each: each["rank"])
    assert [(each["rank"], each["world"]) for each in stacks] == [(0, 0), (1, 2)]
    assert all(each["place"] == "<string>:5 in hang" for each in stacks)
    assert f"process {one}, rank 1" in found["text"]
    json.dumps(found)


def test_a_stopped_program_is_named_beside_others(tool: str) -> None:
    with program(HUNG, RANK="1", WORLD_SIZE="2") as one, program(HUNG, RANK="0") as zero:
        os.kill(zero, signal.SIGSTOP)
        wait_until(lambda: ") T " in Path(f"/proc/{zero}/stat").read_text())
        found = take_stacks(tool, [one, zero], rank=0)
        os.kill(zero, signal.SIGCONT)
    if not found["stacks"]:
        pytest.skip(f"this machine forbids py-spy: {found['text']}")
    places = {each["rank"]: each["place"] for each in found["stacks"]}
    assert places[1] == "<string>:5 in hang"
    assert places[0] in ("an unknown line in a stop by a signal", "<string>:5 in hang")


def test_a_real_program_that_works_is_seen_to_move(tool: str) -> None:
    with program(BUSY) as pid:
        found = take_stacks(tool, [pid], rank=3)
    if "Permission" in found["text"] or "ptrace" in found["text"]:
        pytest.skip(f"this machine forbids py-spy: {found['text']}")
    assert found["moved"]
    assert [each["rank"] for each in found["stacks"]] == [3]


SPIN = """
print("ready", flush=True)
while True: pass
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print("ready", flush=True)
def wait():
    try: child.wait()
    finally: child.kill()
wait()
"""


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_programs_that_compute_in_one_line_or_in_a_child_are_seen_to_work(tool: str) -> None:
    with program(SPIN, ready="R") as loop, program(PARENT, ready="S") as parent:
        [child] = children(parent)
        try:
            found = [take_stacks(tool, pids, rank=0) for pids in ([loop], [parent, child])]
            bare = take_stacks("/nowhere", [loop], rank=0)
        finally:
            os.kill(child, signal.SIGKILL)
    if any("ptrace" in each["text"] or "Permission" in each["text"] for each in found):
        pytest.skip("this machine forbids py-spy")
    assert [each["moved"] for each in found] == [True, True]
    assert [each["stacks"][0]["works"] for each in found] == [True, True]
    assert found[0]["stacks"][0]["place"] == "<string>:3 in <module>"
    assert bare["moved"] or bare["stacks"] == []


def test_a_process_that_holds_a_gpu_or_waits_in_a_collective_does_not_work_by_its_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = [frame("all_reduce", f"{TORCH}/distributed/distributed_c10d.py")]
    main = {5: [frame("step", "t.py")], 6: waits}
    monkeypatch.setattr(taken, "read_process", lambda pid: None)
    assert taken.find_working({5, 6}, main, {6}, {5, 6}) == {5}
    monkeypatch.setattr(taken, "has_gpu", lambda pid: True)
    assert taken.find_working({5, 6}, main, set(), {5, 6}) == set()
    assert taken.find_working({5, 6}, main, {5}, set()) == {5}


def test_a_stuck_data_loader_is_named_with_the_line_of_its_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = [frame("_next", f"{TORCH}/utils/data/dataloader.py"), frame("<module>", "t.py", 33)]
    worker = [
        frame("__getitem__", "t.py", 31),
        frame("_worker_loop", f"{TORCH}/utils/data/_utils/worker.py"),
        frame("<module>", "t.py", 33),
    ]
    monkeypatch.setattr(taken, "read_process", lambda pid: [b"S", b"5"] if pid == 7 else None)
    seen = {5: loop, 7: worker}
    assert describe(loop, taken.list_workers(5, seen)) == {
        "call": "",
        "place": "t.py:33 in <module>, waiting for a data worker at t.py:31 in __getitem__",
    }


def test_work_that_is_kept_apart_does_not_choose_the_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    for folder in (tmp_path, own):
        folder.mkdir(exist_ok=True)
        (folder / TOOL).write_text("#!/bin/sh\n")
        (folder / TOOL).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/nowhere/python3")
    monkeypatch.setenv("PATH", "/usr/nowhere")
    path = str(own)
    assert taken.find_tool(taken.choose_path(path, apart=False)) == str(own / TOOL)
    assert taken.find_tool(taken.choose_path(path, apart=True)) == ""
    for relative in ("", ".", "own", ":own:"):  # of a folder that the work can write
        assert taken.find_tool(relative) == ""


def test_without_the_tool_or_a_program_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taken, "find_tool", lambda path: "")
    found = take_stacks("", [os.getpid()], 0)
    assert (found["stacks"], found["moved"]) == ([], False)
    assert TOOL in found["text"]
    monkeypatch.setattr(taken, "find_tool", lambda path: "/nowhere/py-spy")
    assert "runs no Python program" in take_stacks("", [1 << 30], 0)["text"]
    assert "no stacks: py-spy: " in take_stacks("", [os.getpid()], 0)["text"]


def last(number: int, call: str = "all_reduce", group: str = "0", *, done: bool = False) -> Any:
    return RankCollective(group=group, number=number, call=call, done=done)


@pytest.mark.parametrize(
    ("collectives", "ranks", "text"),
    [
        (
            [[last(7)], [last(6, done=True)], [last(7)]],
            (1,),
            "rank 1 has called all_reduce as number 6 of group 0, which has ended, and is at t.py:1; "
            "rank 0 has called all_reduce as number 7 of group 0, which has not ended",
        ),
        ([[last(7)], [last(7, "broadcast")], [last(7)]], (1,), "rank 1 has called broadcast"),
        ([[last(7)], [last(7, "broadcast")]], (1,), "rank 1 has called broadcast"),
        ([[last(7, done=True)], [last(6, done=True)]], (), "all 2 ranks"),
        ([[last(7)], [last(7)]], (), "all 2 ranks"),
        # ranks of different groups are not compared, and a group that is finished says nothing
        ([[last(9, group="a")], [last(3, group="b")]], (), "all 2 ranks"),
        (
            [[last(9, group="a", done=True), last(5)], [last(2, group="a", done=True), last(4)]],
            (1,),
            "rank 1 has called all_reduce as number 4 of group 0",
        ),
    ],
)
def test_flight_recorders_tell_which_rank_has_called_less(
    collectives: list[list[RankCollective]], ranks: tuple[int, ...], text: str
) -> None:
    processes = [
        RankStack(rank=rank, place="t.py:1", call="synchronize", collectives=tuple(each))
        for rank, each in enumerate(collectives)
    ]
    [node] = ordered(silent(700)).nodes
    node = replace(node, stacks=StackReport(at=at(1001), stacks=tuple(processes)))
    found = find_behind([node], "no progress", at(1002))
    assert found.ranks == ranks
    assert text in found.reason


ENTRY: dict[str, Any] = {
    "frames": [
        {"name": "all_reduce", "filename": "/x/site-packages/torch/d.py", "line": 9},
        {"name": "step", "filename": "/home/me/train.py", "line": 12},
    ],
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 4,
    "profiling_name": "nccl:all_reduce",
    "state": "started",
    "is_p2p": False,
}


class Attack:
    def __reduce__(self) -> Any:
        return os.mkdir, ("attacked",)


def test_a_dump_is_read_and_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    others = [
        {**ENTRY, "collective_seq_id": 3, "state": "completed"},
        {**ENTRY, "collective_seq_id": 99, "is_p2p": True},
        {**ENTRY, "process_group": ("1", "x"), "collective_seq_id": 8, "retired": True},
    ]
    assert parse_dump(pickle.dumps({"entries": [*others, ENTRY]}, protocol=2)) == {
        "collectives": [
            {"group": "0", "number": 4, "call": "all_reduce", "done": False},
            {"group": "1", "number": 8, "call": "all_reduce", "done": True},
        ],
        "place": "train.py:12 in step",
    }
    many = [{**ENTRY, "process_group": (str(n), ""), "frames": None} for n in range(50)]
    found = parse_dump(pickle.dumps({"entries": many}))
    assert (len(found["collectives"]), found["place"]) == (stacks.MOST_GROUPS, "")
    typed = b"ctorch.jit._pickle\nbuild_intlist\n(](K\x01K\x02etR."
    assert stacks.PlainUnpickler(io.BytesIO(typed)).load() == [1, 2]
    for bad in (
        pickle.dumps({"entries": [ENTRY], "x": Attack()}),
        pickle.dumps({"entries": [Attack()]}),
        pickle.dumps({"entries": [{**ENTRY, "collective_seq_id": "x"}]}),
        pickle.dumps([1]),
        pickle.dumps({"entries": {"a": 1}}),
        b"",
        b"cos\nsystem\n(S'touch attacked'\ntR.",
        b"\x80\x02" + b"(" * 100_000,
    ):
        assert parse_dump(bad) == {}
    assert not [*tmp_path.iterdir()]


def test_a_few_bytes_of_a_dump_take_little_memory_and_time() -> None:
    memo = b"Nr" + (1 << 30).to_bytes(4, "little") + b"."
    deep: list[object] = []
    for _ in range(60):
        deep = [deep, deep]  # its text would have 2 ** 60 brackets
    named = pickle.dumps({"entries": [ENTRY | {"process_group": (deep,)}]})
    before = resource.getrlimit(resource.RLIMIT_AS)
    for hostile in (memo, named, pickle.dumps({"entries": [ENTRY | {"profiling_name": deep}]})):
        assert parse_dump(hostile) == {}
    assert resource.getrlimit(resource.RLIMIT_AS) == before


RECORDER = """
import os, select, threading, time
import torch
import torch.distributed as dist
import torch._C._distributed_c10d as c10d
rank = os.environ["RANK"]
def serve():  # as NCCL's watchdog does, which needs GPUs
    pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + rank + ".pipe"
    os.mkfifo(pipe + ".new")
    asked = os.open(pipe + ".new", os.O_RDONLY | os.O_NONBLOCK)
    os.rename(pipe + ".new", pipe)  # whoever sees it finds a reader
    select.select([asked], [], [])
    with open(os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] + rank, "wb") as out:
        out.write(c10d._dump_fr_trace())
print("ready", flush=True)
dist.init_process_group("gloo", os.environ["STORE"], rank=int(rank), world_size=2)
dist.all_reduce(torch.ones(3))
late = dist.all_reduce(torch.ones(3), async_op=True) if rank == "0" else None
threading.Thread(target=serve, daemon=True).start()
late.wait() if late else time.sleep(600)
"""


def test_the_recorder_of_real_torch_names_the_rank_without_py_spy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(taken, "find_tool", lambda path: "")
    monkeypatch.setattr(stacks, "WAIT_S", PATIENCE_S)  # as torch names the frames of a busy machine
    env = {
        "WORLD_SIZE": "2",
        "TORCH_FR_BUFFER_SIZE": "100",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(tmp_path / "pipe_"),
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tmp_path / "dump_"),
        "STORE": f"file://{tmp_path}/store",
    }
    with program(RECORDER, RANK="0", **env) as zero, program(RECORDER, RANK="1", **env) as one:
        while not all((tmp_path / f"pipe_{rank}.pipe").exists() for rank in (0, 1)):
            time.sleep(0.05)
        found = take_stacks("", [zero, one], 0)
    ranks = {each["rank"]: each for each in found["stacks"]}
    assert [ranks[n]["collectives"][0]["number"] for n in (0, 1)] == [2, 1]
    assert (ranks[0]["call"], ranks[1]["call"]) == ("all_reduce", "")


def test_dumps_of_others_and_of_earlier_processes_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dump = tmp_path / "dump_0"
    dump.write_bytes(pickle.dumps({"entries": [ENTRY]}))
    env = {"RANK": "0", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(tmp_path / "dump_")}
    with program(HUNG, **env) as pid:
        os.utime(dump)
        assert stacks.read_flight(pid)["collectives"][0]["number"] == 4
        os.utime(dump, (1, 1))
        assert stacks.read_flight(pid) == {}, "of an earlier process with this rank"
        dump.unlink()
        os.mkfifo(dump)
        assert stacks.read_flight(pid) == {}, "a pipe does not block"
        dump.unlink()
        dump.symlink_to("/etc/passwd")
        assert stacks.read_flight(pid) == {}
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    (tmp_path / "pipe_0.pipe").symlink_to(victim)
    with program(HUNG, RANK="0", TORCH_NCCL_DEBUG_INFO_PIPE_FILE=str(tmp_path / "pipe_")) as pid:
        assert not stacks.ask_for_dumps([pid])
        (tmp_path / "pipe_0.pipe").unlink()
        os.mkfifo(tmp_path / "pipe_0.pipe")
        assert not stacks.ask_for_dumps([pid]), "nobody reads it"
    assert victim.read_text() == "as it was"


def test_ranks_that_stay_slower_than_others_are_told_once() -> None:
    def look(old: AttemptSnapshot, seconds: float, *step_ms: float) -> tuple[AttemptSnapshot, str]:
        """Decide at a time at which the ranks report these steps; the row afterwards, the event."""
        nodes = tuple(
            replace(node, progress={"step_ms": ms}, heard_at=at(seconds))
            for node, ms in zip(old.nodes, step_ms, strict=True)
        )
        seen = replace(old, nodes=nodes)
        action = decide_attempt(seen, at(seconds))
        if isinstance(action, a.RecheckAttempt):
            return seen, ""
        assert isinstance(action, a.NoteSlow)
        changes = adjust_attempt(
            JobRows(job=JOB, attempts={}, nodes={}), seen.attempt, action, at(seconds)
        )
        (kept,) = changes.attempts
        return replace(seen, attempt=kept), " ".join(each.text for each in changes.events)

    row = silent(0, 0, 0, 0)
    row, told = look(row, 1000, 100, 100, 100, 300)
    assert told == "", "one slow step is usual"
    row, told = look(row, 1010, 100, 100, 100, 100)
    row, told = look(row, 1020, 100, 100, 100, 300)
    row, told = look(row, 1079, 100, 100, 100, 300)
    assert told == ""
    row, told = look(row, 1081, 100, 100, 100, 250)
    assert told == "steps take longer than the median: rank 3 (2.5 times)"
    row, told = look(row, 1200, 100, 100, 100, 300)
    assert told == "", "each rank is told once"
    row, _ = look(row, 1500, 100, 300, 100, 100)
    row, told = look(row, 1600, 100, 300, 100, 100)
    assert "rank 1 (3.0 times)" in told
    assert row.attempt.slow is not None
    assert row.attempt.slow.told == (3, 1)
    # a rank that is slow now and then hides no rank that stays slow
    for seconds, second in enumerate((100, 300) * 40, 1700):
        row, told = look(row, seconds, 300, 100, second, 100)
        assert bool(told) == (seconds == 1760), seconds
        assert not told or told == "steps take longer than the median: rank 0 (3.0 times)"


@pytest.mark.parametrize(
    "threads",
    [
        [{"os_thread_id": 9, "frames": []}, {"os_thread_id": 7, "main": True}],
        [{"thread_name": "Thread-1"}, {"thread_name": "MainThread", "main": True}],
        # a program that never imports threading: its threads have no names
        [{"thread_name": None, "frames": [{"name": "work"}, {"name": "<module>"}], "main": True}],
        [
            {"frames": [{"name": "read"}, {"name": "_bootstrap"}]},
            {"frames": [{"name": "<module>"}], "main": True},
        ],
        [{"frames": [{"name": "work"}], "main": True}],
    ],
)
def test_the_main_thread_is_found_with_or_without_names(threads: list[dict[str, Any]]) -> None:
    assert stacks.find_main(threads, 7).get("main")


def test_the_main_thread_of_a_pid_namespace_has_its_number_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stacks, "read_own_numbers", lambda pid: [7, 2])
    found = stacks.find_main([{"os_thread_id": 9}, {"os_thread_id": 2, "main": True}], 7)
    assert found.get("main")


def test_a_process_has_its_own_number_in_each_namespace() -> None:
    assert os.getpid() in stacks.read_own_numbers(os.getpid())
    assert stacks.read_own_numbers(1 << 30) == []
