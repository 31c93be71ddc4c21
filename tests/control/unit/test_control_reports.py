"""What agents' messages and claims mean for the rows, and how long what is left of a budget lets
an agent go on.
"""

import json
from dataclasses import fields
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.records import make_attempt_record, make_job_record

from cavvy.agent.documents import TransferConfig
from cavvy.api.reported import FIELDS, ReportedBatch, read_batch
from cavvy.control.agents.checkpoints import find_objection
from cavvy.control.agents.leases import first_lease, lease_paid_by
from cavvy.control.agents.reports import (
    ReportOutcome,
    apply_messages,
    find_target,
    note_clock,
    step_of,
)
from cavvy.control.agents.work import make_assignment
from cavvy.domain.jobs import (
    Attempt,
    AttemptOutcome,
    AttemptPhase,
    FailureKind,
    JobPhase,
    Node,
    NodePhase,
    SentData,
    SentKind,
)
from cavvy.domain.messages import AgentMessage, MessageKind
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import CheckpointPolicy, JobLimits, TaskSpec, Transfer
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace

NOW = datetime(2030, 1, 1, tzinfo=UTC)
SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)
OFFER = Offer(provider="p", region="r", instance_type="t", rate=HourlyRate(1_000_000))
TASK = TaskSpec(name="n", run="x", grace=10 * SECOND, limits=JobLimits(unattended=10 * HOUR))
JOB = make_job_record(NOW, task=TASK, phase=JobPhase.RUNNING, attempt=1)
ATTEMPT = make_attempt_record(NOW, OFFER, phase=AttemptPhase.RUNNING, reason="because")
NODE = Node(
    attempt_id="j-1",
    project="p",
    rank=0,
    phase=NodePhase.RUNNING,
    claim="n",
    claimed_at=NOW - HOUR,
    last_seq=4,
)


def message(kind: str, seq: int = 5, **fields: object) -> AgentMessage:
    made = AgentMessage(seq=seq, at=NOW - SECOND, kind=kind)
    return replace(made, **fields)  # type: ignore[arg-type]


def applied(
    *messages: AgentMessage, node: Node = NODE, attempt: Attempt = ATTEMPT
) -> ReportOutcome:
    return apply_messages(JOB, attempt, node, messages, NOW)


def test_a_node_says_which_output_is_that_of_its_setup() -> None:
    begun = applied(message(MessageKind.PREPARING, log_bytes=14)).node
    assert (begun.setup_from, begun.setup_to) == (14, None)
    runs = applied(message(MessageKind.RUNNING, 6, log_bytes=90), node=begun).node
    assert (runs.setup_from, runs.setup_to) == (14, 90)
    old = applied(message(MessageKind.RUNNING)).node  # an agent that does not tell
    assert (old.setup_from, old.setup_to) == (None, None)


def test_messages_are_applied_once_in_order_and_up_to_a_gap() -> None:
    many = [message(MessageKind.PROGRESS, seq, values={"step": seq}) for seq in (8, 6, 5, 4, 3)]
    report = applied(*many)
    assert (report.node.progress, report.node.last_seq, report.node.heard_at) == (
        {"step": 6},
        6,
        NOW,
    )
    again = applied(*many, node=report.node)
    assert (again.node, again.moved, again.saved) == (report.node, False, False)


@pytest.mark.parametrize(
    ("said", "failure", "fact"),
    [
        ("gpu-fault", FailureKind.GPU, "gpu-fault"),
        ("slow-link", FailureKind.LINK, "slow-link"),
        ("network", FailureKind.NETWORK, "network"),
        ("program", FailureKind.PROGRAM, "node"),  # the outcome says it already
        ("quota", None, "node"),  # no agent can know it
        ("poem", None, "node"),
        (None, None, "node"),  # of an older agent, whatever its sentence says
    ],
)
def test_an_agent_tells_by_a_field_what_failed(
    said: str | None, failure: FailureKind | None, fact: str
) -> None:
    exit_ = message(MessageKind.EXITED, outcome="node", reason="GPU fault: Xid 79", failure=said)
    report = applied(exit_)
    assert (report.node.exit_failure, report.events[-1].fact) == (failure, fact)


def test_a_warning_about_files_stays_until_a_checkpoint_without_it() -> None:
    checkpoint, event = MessageKind.CHECKPOINT, MessageKind.EVENT
    warned = applied(message(event, name="unsafe", text="a is torn")).attempt
    assert warned.unsafe is not None
    assert (warned.unsafe.reason, warned.unsafe.rank) == ("a is torn", 0)
    kept = applied(message(checkpoint, text="a is torn"), attempt=warned).attempt
    assert kept.unsafe == warned.unsafe  # since the same time
    other = applied(message(checkpoint), attempt=warned, node=replace(NODE, rank=1)).attempt
    assert other.unsafe == warned.unsafe
    assert applied(message(checkpoint), attempt=warned).attempt.unsafe is None
    assert applied(message(event, name="note", text="x")).attempt.unsafe is None


def test_what_a_newer_agent_says_beyond_our_words_counts_as_heard() -> None:
    report = applied(message("poem"), message(MessageKind.PROGRESS, 6, values={"step": 1}))
    assert (report.node.last_seq, report.node.progress, report.events) == (6, {"step": 1}, [])


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        *(
            (each.value, each)
            for each in AttemptOutcome
            if each not in (AttemptOutcome.CAPACITY, AttemptOutcome.REFUSED, AttemptOutcome.TIMEOUT)
        ),
        ("capacity", AttemptOutcome.NODE),  # what no agent can know
        ("refused", AttemptOutcome.NODE),
        ("timeout", AttemptOutcome.NODE),
        ("poem", AttemptOutcome.NODE),
        (None, AttemptOutcome.NODE),
    ],
)
def test_an_exit_is_what_an_agent_can_know(said: str | None, outcome: AttemptOutcome) -> None:
    report = applied(message(MessageKind.EXITED, outcome=said, exit_code=3))
    assert (report.node.phase, report.node.exit_outcome, report.node.exit_code) == (
        NodePhase.EXITED,
        outcome,
        3,
    )
    assert (report.node.exited_at, report.node.exit_reason, report.moved) == (
        NOW - SECOND,
        "exit code 3",
        True,
    )


def test_nothing_follows_an_exit() -> None:
    over = replace(NODE, phase=NodePhase.EXITED, exit_code=0, exit_outcome=AttemptOutcome.SUCCEEDED)
    later = applied(
        message(MessageKind.EXITED, 5, outcome="exit", exit_code=1),
        message(MessageKind.RUNNING, 6),
        node=over,
    )
    assert later.node == replace(over, last_seq=6, heard_at=NOW)
    assert (later.events, later.moved) == ([], False)


@pytest.mark.parametrize(
    ("at", "kept"), [(NOW - 2 * HOUR, NOW - HOUR), (NOW - SECOND, NOW - SECOND), (NOW + HOUR, NOW)]
)
def test_a_nodes_clock_moves_no_time_before_its_claim_or_after_now(
    at: datetime, kept: datetime
) -> None:
    report = applied(replace(message(MessageKind.RUNNING), at=at))
    assert (report.node.phase, report.node.running_at, report.moved) == (
        NodePhase.RUNNING,
        kept,
        True,
    )


@given(
    skew=st.floats(-1.8e9, 9e9).map(lambda seconds: seconds * SECOND),
    claimed_s=st.floats(0, 1000),
    # of each request: when it was sent after the claim, and how long it took
    requests=st.lists(st.tuples(st.floats(0, 1000), st.floats(0, 30)), min_size=1, max_size=5),
    held_s=st.floats(0, 1000),
)
def test_times_of_a_clock_that_is_wrong_are_exact_to_the_quickest_request(
    skew: timedelta, claimed_s: float, requests: list[tuple[float, float]], held_s: float
) -> None:
    claimed = NOW + claimed_s * SECOND
    node = replace(NODE, claimed_at=claimed)
    for sent_s, took_s in sorted(requests):
        sent = claimed + sent_s * SECOND
        node = note_clock(node, sent + skew, sent + took_s * SECOND)
    quickest = min(took_s for _, took_s in requests) * SECOND
    now = claimed + (held_s + 1000) * SECOND + quickest
    true = now - quickest - held_s * SECOND  # when the message was written
    exit = replace(message(MessageKind.EXITED, outcome="exit", exit_code=0), at=true + skew)
    found = apply_messages(JOB, ATTEMPT, node, [exit], now).node.exited_at
    assert found is not None
    assert claimed <= found <= now
    assert abs(found - true - quickest) < timedelta(milliseconds=1)


def test_a_clock_that_is_set_between_requests_moves_no_later_time() -> None:
    node, found = replace(NODE, claimed_at=NOW), []
    for seconds, skew in ((1, -7200), (2, 0), (3, 7200), (4, 0), (5, -7200), (6, 0)):
        now = NOW + seconds * SECOND
        node = note_clock(node, now + skew * SECOND, now)
        began = replace(message(MessageKind.RUNNING), at=now + skew * SECOND)
        found.append(apply_messages(JOB, ATTEMPT, node, [began], now).node.running_at)
    assert found == [NOW + seconds * SECOND for seconds in range(1, 7)]


def test_work_whose_start_came_with_a_slow_request_does_not_end_before_it_starts() -> None:
    node = replace(NODE, claimed_at=NOW)
    for took_s, sent_s, told in (
        (20, 1, message(MessageKind.RUNNING)),
        (0, 22, message(MessageKind.EXITED, 6, outcome="exit", exit_code=0)),
    ):
        now = NOW + (sent_s + took_s) * SECOND
        node = note_clock(node, NOW + sent_s * SECOND, now)
        at = NOW + (1 if told.kind == MessageKind.RUNNING else 6) * SECOND
        node = apply_messages(JOB, ATTEMPT, node, [replace(told, at=at)], now).node
    assert node.running_at is not None
    assert node.exited_at is not None
    assert node.running_at <= node.exited_at <= NOW + 22 * SECOND


@pytest.mark.parametrize("at", ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "x", 5, None, {}])
def test_a_batch_with_an_absurd_time_is_read(at: object) -> None:
    body = {"gang": "g", "rank": 0, "nonce": "n", "at": at, "messages": []}
    batch, _ = read_batch(msgspec.json.encode(body), NOW, ReportedBatch)
    node = note_clock(NODE, batch.sent_at, NOW)
    saved = message(MessageKind.CHECKPOINT, number=1, newest_at=NOW)
    report = apply_messages(JOB, ATTEMPT, node, [message(MessageKind.RUNNING), saved], NOW)
    assert report.node.running_at is not None
    assert NOW - HOUR <= report.node.running_at <= NOW
    assert report.node.refused == 0


def test_a_notice_counts_from_now_and_advice_from_when_it_was_first_heard() -> None:
    noticed = applied(message(MessageKind.NOTICE, seconds=120.0, source="EC2"))
    assert (noticed.node.notice_until, noticed.moved) == (NOW + 120 * SECOND, True)
    advised = applied(message(MessageKind.EVENT, name="advice", text="at risk"))
    assert (advised.node.risk_at, advised.moved) == (NOW - SECOND, True)
    known = replace(NODE, risk_at=NOW - HOUR)
    assert applied(message(MessageKind.EVENT, name="advice"), node=known).node.risk_at == NOW - HOUR
    other = applied(message(MessageKind.EVENT, name="note", text="hello"))
    assert (other.node.risk_at, other.moved, other.events[0].text) == (None, False, "hello")


def test_a_checkpoint_tells_of_itself_and_leaves_what_it_does_not_tell() -> None:
    known = replace(ATTEMPT, checkpoint_cost=3 * SECOND, checkpoint_rate=7.0)
    plain = applied(message(MessageKind.CHECKPOINT, newest_at=NOW - HOUR, bytes=100), attempt=known)
    assert (plain.attempt.checkpoint_at, plain.attempt.checkpoint_bytes) == (NOW - HOUR, 100)
    assert (plain.attempt.checkpoint_cost, plain.attempt.checkpoint_rate, plain.saved) == (
        3 * SECOND,
        7.0,
        True,
    )
    told = message(
        MessageKind.CHECKPOINT, newest_at=NOW + HOUR, bytes=100, sent=50, seconds=2.0, cost_s=0.5
    )
    measured = applied(told, attempt=known).attempt
    assert (measured.checkpoint_at, measured.checkpoint_rate) == (NOW, 25.0), (
        "nothing was saved in the future"
    )
    assert measured.checkpoint_cost == SECOND / 2
    assert applied(replace(told, cost_s=-1.0), attempt=known).attempt.checkpoint_cost == 3 * SECOND
    assert applied(replace(told, seconds=0.0), attempt=known).attempt.checkpoint_rate == 7.0
    assert (
        applied(replace(told, newest_at=None), attempt=known).attempt.checkpoint_at == NOW - SECOND
    )


def test_uploads_are_added_up_and_copies_to_a_folder_are_not() -> None:
    sent = [
        replace(message(MessageKind.CHECKPOINT, bytes=9, sent=size, number=number), seq=seq)
        for seq, (size, number) in enumerate([(70, 1), (30, 2), (1000, None), (-5, 3)], 5)
    ]
    assert applied(*sent).node.sent == (SentData(kind=SentKind.CHECKPOINTS, bytes=100),)


def test_sent_data_counts_only_as_far_as_a_network_can_carry_it() -> None:
    flood = [
        message(MessageKind.CHECKPOINT, bytes=9, sent=1 << 50, number=seq, seq=seq)
        for seq in (5, 6)
    ]
    young = replace(NODE, claimed_at=NOW - SECOND)
    report = applied(*flood, node=young)
    assert total_sent(report) == 12_500_000_000  # 100 Gbit/s
    log = message(MessageKind.EXITED, log_bytes=1 << 50, seq=7)
    assert total_sent(applied(*flood, log, node=young)) == 12_500_000_000  # of all kinds
    later = apply_messages(JOB, ATTEMPT, report.node, [replace(flood[0], seq=7)], NOW + SECOND)
    assert total_sent(later) == 25_000_000_000
    known = SentData(kind=SentKind.CHECKPOINTS, bytes=8)
    early = replace(NODE, claimed_at=NOW + SECOND, sent=(known,))  # the clock went back
    assert applied(*flood, node=early).node.sent == (known,)


def total_sent(report: ReportOutcome) -> int:
    return sum(each.bytes for each in report.node.sent)


def test_outputs_and_the_log_are_added_up_for_each_output() -> None:
    outputs = (Transfer(source="a", target="gs://b/a"), Transfer(source="c", target="s3://b/c"))
    job = replace(JOB, task=replace(JOB.task, outputs=outputs))
    sent = [
        replace(message(MessageKind.UPLOAD, sent=size, number=number), seq=seq)
        for seq, (size, number) in enumerate([(70, 1), (30, 0), (5, 1), (0, 0), (9, 2), (9, -1)], 5)
    ]
    told = [*sent, replace(message(MessageKind.EXITED, log_bytes=11), seq=11)]
    report = apply_messages(job, ATTEMPT, NODE, told, NOW)
    assert report.node.sent == (
        SentData(kind=SentKind.OUTPUT, output=1, bytes=75),
        SentData(kind=SentKind.OUTPUT, output=0, bytes=30),
        SentData(kind=SentKind.LOG, bytes=11),
    )
    assert report.node.refused == 2  # the task has two outputs
    targets = [find_target(job.task, each) for each in report.node.sent]
    assert targets == ["s3://b/c", "gs://b/a", None]


@pytest.mark.parametrize(
    ("said", "length"),
    [
        (250.0, SECOND / 4),
        (None, 2 * SECOND),
        (0, 2 * SECOND),
        (-1.0, 2 * SECOND),
        ("fast", 2 * SECOND),
        (9e7, 2 * SECOND),
    ],
)
def test_a_step_is_as_long_as_the_work_says_else_as_its_author_expects(
    said: float | str | None, length: timedelta
) -> None:
    node = NODE if said is None else replace(NODE, progress={"step_ms": said})
    job = replace(JOB, task=replace(TASK, checkpoint=CheckpointPolicy(path="c", step=2 * SECOND)))
    assert step_of(job, node) == length
    bare = timedelta(0) if length == 2 * SECOND else length
    assert step_of(JOB, node) == bare


def test_who_claimed_a_rank_is_heard_until_its_attempt_is_over() -> None:
    assert find_objection(ATTEMPT, NODE, "n") is None
    assert find_objection(replace(ATTEMPT, phase=AttemptPhase.ENDING), NODE, "n") is None, (
        "its exit is on its way"
    )
    for attempt, nonce, told in (
        (ATTEMPT, "other", "rank 0 is claimed by another agent"),
        (replace(ATTEMPT, phase=AttemptPhase.ENDED), "n", "attempt 1 is over: because"),
    ):
        objection = find_objection(attempt, NODE, nonce)
        assert objection is not None
        assert objection.reason == told
    assert find_objection(ATTEMPT, replace(NODE, claim=None), "n") is not None


@pytest.mark.parametrize(
    ("budget", "spent", "nodes", "lease"),
    [
        (None, None, 1, 10 * HOUR),
        (1_000_000, None, 1, HOUR - 15 * SECOND),  # less its grace and the margin
        (1_000_000, 400_000, 1, 0.6 * HOUR - 15 * SECOND),
        (1_000_000, 400_000, 2, 0.3 * HOUR - 15 * SECOND),
        (1_000_000, 1_000_000, 1, timedelta(0)),
        (1_000_000, 2_000_000, 1, timedelta(0)),
        (20_000_000, 0, 1, 10 * HOUR),
        (5_000, 0, 1, 9 * SECOND),  # the end takes half of what is next to nothing
    ],
)
def test_a_gang_is_launched_with_no_more_time_than_the_rest_of_the_budget_pays(
    budget: int | None, spent: int | None, nodes: int, lease: timedelta
) -> None:
    limits = replace(TASK.limits, budget=None if budget is None else Money(budget))
    job, attempt = replace(JOB, task=replace(TASK, limits=limits)), replace(ATTEMPT, nodes=nodes)
    assert first_lease(job, attempt, None if spent is None else Money(spent)) == lease
    free = replace(attempt, offer=replace(OFFER, rate=HourlyRate(0)))
    assert first_lease(job, free, None if spent is None else Money(spent)) == 10 * HOUR


def test_a_budget_of_ages_is_no_length_that_cannot_be_counted() -> None:
    assert lease_paid_by(Money(10**18), HourlyRate(1), JOB) < timedelta(days=5000)


def test_an_agent_is_told_which_outputs_to_send_while_the_work_runs_and_which_inputs_to_stream() -> (
    None
):
    outputs = (
        Transfer(source="out", target="s3://b/out"),
        Transfer(source="log", target="s3://b/log", every=90 * SECOND),
    )
    inputs = (
        Transfer(source="s3://b/in", target="in"),
        Transfer(source="s3://b/x", target="x", stream=True),
    )
    job = replace(JOB, task=replace(TASK, inputs=inputs, outputs=outputs))
    work = make_assignment(job, ATTEMPT, [NODE], accelerators=0, secrets={})
    assert list(work.outputs) == [
        TransferConfig(source="out", target="s3://b/out"),
        TransferConfig(source="log", target="s3://b/log", every_s=90.0),
    ]
    assert list(work.inputs) == [
        TransferConfig(source="s3://b/in", target="in"),
        TransferConfig(source="s3://b/x", target="x", mode="stream"),
    ]


def test_every_field_of_a_message_is_read_from_the_wire() -> None:
    body = {
        "gang": "g",
        "rank": 0,
        "nonce": "n",
        "messages": [{"seq": 1, "kind": "exited", "outcome": "node", "failure": "gpu"}],
    }
    _, [message] = read_batch(msgspec.json.encode(body), NOW, ReportedBatch)
    assert (message.outcome, message.failure) == ("node", "gpu")
    known = {each.name for each in fields(AgentMessage)}
    assert set(FIELDS) | {"seq", "kind", "fault"} == known


def test_no_text_of_a_node_controls_a_terminal() -> None:
    evil = "\x1b[31mred\x1b[0m \x1b]0;title\x07\x1b[2J\x9b5n\r\u202eback\x7f\x1b"
    texts = {"text": evil, "reason": evil, "source": evil, "name": evil, "outcome": evil}
    more = {"values": {evil: evil}, "stacks": [{"rank": 0, "place": evil, "call": evil}]}
    said = [{"seq": 1, "kind": evil, **texts, **more}]
    body = {"gang": "g", "rank": 0, "nonce": "n", "messages": said}
    _, [message] = read_batch(json.dumps(body).encode(), NOW, ReportedBatch)
    shown = r"red \x1b]0;title\x07\x1b[2J\x9b5n\r\u202eback\x7f\x1b"
    assert [getattr(message, each) for each in ("kind", *texts)] == [shown] * (len(texts) + 1)
    assert message.values == {shown: shown}
    assert (message.stacks[0].place, message.stacks[0].call) == (shown, shown)
    assert not message.fault


def test_a_rank_that_reports_without_end_does_not_fill_the_disk_with_events() -> None:
    many = [message(MessageKind.EVENT, seq, name="x", text="y" * 8192) for seq in range(5, 3005)]
    report = applied(*many, message(MessageKind.EXITED, 3005, outcome="succeeded", exit_code=0))
    assert report.node.last_seq == 3005
    assert sum(len(event.text) for event in report.events) <= 16 << 20
    assert [event.kind for event in report.events[-2:]] == ["refused", "exited"]
