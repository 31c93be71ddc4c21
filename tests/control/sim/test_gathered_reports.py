"""Reports that only tell figures are taken at once and written later, together: nothing is lost
when the server or the agent ends in between, and no change is missed meanwhile."""

import asyncio
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from tests.contract.store_suite import make_attempt, make_job, make_node
from tests.control.sim.test_control_services import HOST, ControlHarness, in_harness

from cavvy.control.agents import gathered
from cavvy.control.agents.dependencies import AgentDependencies
from cavvy.control.agents.pauses import FigurePauses
from cavvy.control.agents.sessions import AgentSessions
from cavvy.domain.elastic import NodeRange
from cavvy.domain.jobs import AttemptOutcome, JobPhase, NodePhase, Order
from cavvy.domain.messages import AgentMessage, ClaimLost, MessageKind, MessagesStored
from cavvy.domain.services import SERVICE_TAG
from cavvy.domain.tasks import JobLimits
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite, JobReading, StoreUnusable


@dataclass
class Rank:
    """An agent that keeps its messages until they are stored, as the real one does."""

    harness: ControlHarness
    gang: str
    rank: int = 0
    unacknowledged: list[AgentMessage] = field(default_factory=list)
    taken: int = 0
    last: int = 0

    def note(self, kind: MessageKind = MessageKind.TELEMETRY, **fields: object) -> None:
        self.last += 1
        self.unacknowledged.append(self.harness.message(self.last, kind, **fields))

    def note_minute(self, ago_s: float, **figures: float) -> None:
        """Note the figures of the minute that ended `ago_s` before now."""
        self.note(
            MessageKind.MINUTE,
            seconds=60.0,
            figures={name: (value, value, value) for name, value in figures.items()},
        )
        at = self.harness.clock.now() - timedelta(seconds=ago_s)
        self.unacknowledged[-1] = replace(self.unacknowledged[-1], at=at)

    async def send(self, sessions: AgentSessions | None = None) -> MessagesStored | ClaimLost:
        to = sessions or self.harness.control_plane.agents
        new = [each for each in self.unacknowledged if each.seq > self.taken]
        answer = await to.messages(self.gang, self.rank, f"n{self.rank}", new, keeps=True)
        if isinstance(answer, MessagesStored):
            self.taken = max(answer.seq, answer.taken or 0)
            self.unacknowledged = [each for each in self.unacknowledged if each.seq > answer.seq]
        return answer

    async def tell(self, **values: float) -> MessagesStored:
        self.note(values=values)
        answer = await self.send()
        assert isinstance(answer, MessagesStored)
        return answer

    async def telemetry(self) -> dict[str, float]:
        attempt = await self.harness.store.attempt_of_gang(self.gang)
        return (await self.harness.store.node(attempt.id, self.rank)).telemetry


async def start(harness: ControlHarness, nodes: int = 1) -> list[Rank]:
    """The agents of a job, whose work runs."""
    job = await harness.submit(nodes=nodes)
    await harness.wait()
    gang = await harness.gang(job)
    ranks = [Rank(harness, gang, rank) for rank in range(nodes)]
    for each in ranks:
        await harness.control_plane.agents.claim(gang, each.rank, f"n{each.rank}", "a", HOST)
    for each in ranks:
        each.note(MessageKind.RUNNING)
        await each.send()
    await harness.wait(10)
    for each in ranks:  # after the job's phase has changed, its rows are read once
        await each.tell(gpu_percent=0)
    return ranks


def another_server(harness: ControlHarness) -> AgentSessions:
    async def nothing(*_: object) -> dict[str, str]:
        return {}

    dependencies = AgentDependencies(
        open_secrets=nothing,
        checkpoint=None,
        accelerators=lambda *_: 0,  # type: ignore[arg-type]
    )
    return AgentSessions(harness.store, harness.clock, lambda job: None, dependencies)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The gangs whose rows were read for one request each."""
    from cavvy.control.unit_of_work import GangReads

    found: list[str] = []
    real = GangReads.read

    async def read(self: GangReads, gang: str, rank: int | None) -> object:
        found.append(gang)
        return await real(self, gang, rank)

    monkeypatch.setattr(GangReads, "read", read)
    return found


def test_reports_of_figures_need_no_rows_and_are_written_together(reads: list[str]) -> None:
    async def scenario(harness: ControlHarness) -> None:
        ranks = await start(harness, nodes=3)
        before = await asyncio.gather(*(each.telemetry() for each in ranks))
        assert before == [{"gpu_percent": 0}] * 3
        reads.clear()
        for value in (50, 60):
            for each in ranks:
                told = await each.tell(gpu_percent=value + each.rank)
                assert told.taken == each.last > told.seq
        assert [await each.telemetry() for each in ranks] == before
        await harness.wait(3)
        assert [await each.telemetry() for each in ranks] == [
            {"gpu_percent": 60 + rank} for rank in range(3)
        ]
        answers = [await each.tell(gpu_percent=1) for each in ranks]
        assert [each.seq for each in answers] == [each.last - 1 for each in ranks]
        assert not reads
        assert all(len(each.unacknowledged) == 1 for each in ranks)

    in_harness(scenario)


def test_a_message_that_changes_the_work_is_written_at_once_with_those_before_it() -> None:
    async def scenario(harness: ControlHarness) -> None:
        [rank] = await start(harness)
        await rank.tell(gpu_percent=70)
        rank.note(MessageKind.PROGRESS, values={"loss": 0.5})
        await rank.send()
        exits = {"outcome": AttemptOutcome.SUCCEEDED, "exit_code": 0}
        rank.note(MessageKind.EXITED, **exits)
        answer = await rank.send()
        assert isinstance(answer, MessagesStored)
        assert (answer.seq, answer.taken) == (rank.last, None)
        attempt = await harness.store.attempt_of_gang(rank.gang)
        node = await harness.store.node(attempt.id, 0)
        assert (node.phase, node.telemetry, node.progress) == (
            NodePhase.EXITED,
            {"gpu_percent": 70},
            {"loss": 0.5},
        )
        await harness.wait(30)
        assert (await harness.store.job(attempt.job_id)).phase is JobPhase.DONE

    in_harness(scenario)


def test_what_cannot_be_applied_and_what_comes_after_the_end_is_answered_at_once() -> None:
    async def scenario(harness: ControlHarness) -> None:
        first, second = await start(harness, nodes=2)
        first.note(values={"gpu_percent": 5}, fault="it is too long")
        second.note(MessageKind.EXITED, outcome=AttemptOutcome.SUCCEEDED, exit_code=0)
        await second.send()
        second.note(values={"gpu_percent": 6})
        await second.send()
        second.note(values={"gpu_percent": 7})
        for each in (first, second):
            answer = await each.send()
            assert isinstance(answer, MessagesStored)
            assert answer.seq == each.last

    in_harness(scenario)


def test_what_a_server_has_taken_is_sent_again_when_it_ends_before_the_write() -> None:
    async def scenario(harness: ControlHarness) -> None:
        [rank] = await start(harness)
        await harness.wait(300)
        await rank.tell(gpu_percent=1)
        for high in (3, 4, 5):
            rank.note_minute(360 - 60 * high, loss=high)
            answer = await rank.send()
            assert isinstance(answer, MessagesStored)
            assert answer.taken == rank.last > answer.seq
        # the server is killed: another one knows only what is stored
        second = another_server(harness)
        rank.note_minute(0, loss=6)
        answer = await rank.send(second)
        assert isinstance(answer, MessagesStored)
        assert answer.seq < rank.last, "there is a gap"
        answer = await rank.send(second)
        assert isinstance(answer, MessagesStored)
        await second.close()
        # the first server was only slow: what it writes now was applied before
        await harness.control_plane.agents.close()
        attempt = await harness.store.attempt_of_gang(rank.gang)
        assert (await harness.store.node(attempt.id, 0)).last_seq == rank.last
        now = harness.clock.now()
        day = timedelta(days=1)
        blocks = await harness.store.figures.list(attempt.id, 0, since=now - day, until=now + day)
        assert [high for each in blocks for high in each.columns["loss"].high] == [3, 4, 5, 6]

    in_harness(scenario)


def test_a_server_that_stops_writes_what_it_has_taken() -> None:
    async def scenario(harness: ControlHarness) -> None:
        [rank] = await start(harness)
        await rank.tell(gpu_percent=33)
        await harness.control_plane.agents.close()
        assert await rank.telemetry() == {"gpu_percent": 33}

    in_harness(scenario)


def test_an_agent_that_starts_again_sends_what_was_taken_once_more() -> None:
    async def scenario(harness: ControlHarness) -> None:
        [rank] = await start(harness)
        rank.note(MessageKind.POINTS)
        await rank.tell(gpu_percent=44)
        rank.taken = 0  # the next agent reads the outbox, which does not say what was taken
        answer = await rank.send()
        assert isinstance(answer, MessagesStored)
        assert answer.seq == rank.last
        assert await rank.telemetry() == {"gpu_percent": 44}
        assert not rank.unacknowledged

    in_harness(scenario)


def test_an_order_reaches_an_agent_whose_rank_is_known(reads: list[str]) -> None:
    async def scenario(harness: ControlHarness) -> None:
        [rank] = await start(harness)
        sessions = harness.control_plane.agents
        assert await sessions.order(rank.gang, 0, 0) is None
        attempt = await harness.store.attempt_of_gang(rank.gang)
        await harness.control_plane.jobs.stop("default", attempt.job_id, "enough")
        await harness.wait()
        order = await sessions.order(rank.gang, 0, 0)
        assert order is not None
        assert order.kind == "stop"

    in_harness(scenario)


def test_a_job_is_stopped_at_once_also_while_it_is_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(harness: ControlHarness) -> None:
        [rank] = await start(harness)
        await harness.wait(60)
        await rank.tell(gpu_percent=1)
        job_id = (await harness.store.attempt_of_gang(rank.gang)).job_id
        read_job, stops = harness.store.read_job, ["enough"]

        async def read_before_the_stop(job: str) -> JobReading:
            found = await read_job(job)
            if stops:
                await harness.control_plane.jobs.stop("default", job_id, stops.pop())
            return found

        monkeypatch.setattr(harness.store, "read_job", read_before_the_stop)
        harness.control_plane.hint(job_id)
        await harness.wait()
        assert not stops
        order = await harness.control_plane.agents.order(rank.gang, 0, 0)
        assert order is not None
        assert order.kind == "stop"

    in_harness(scenario)


def test_an_order_of_another_server_whose_signal_was_lost_is_found_by_the_next_report() -> None:
    async def scenario(harness: ControlHarness) -> None:
        [rank] = await start(harness)
        await harness.wait(3)
        await rank.tell(gpu_percent=1)
        attempt = await harness.store.attempt_of_gang(rank.gang)
        node = await harness.store.node(attempt.id, 0)
        order = Order(seq=1, kind="stacks", seconds=1, reason="")
        await harness.store.commit(AtomicWrite(nodes=[replace(node, order=order)]))
        sessions = harness.control_plane.agents
        assert await sessions.order(rank.gang, 0, 0) is None, "nobody said that it has changed"
        waiting = asyncio.create_task(sessions.wait_order(rank.gang, 0, 0, timedelta(hours=1)))
        await harness.wait(3)
        assert waiting.done()
        assert await sessions.order(rank.gang, 0, 0) == order
        assert await rank.telemetry() == {"gpu_percent": 1}

    in_harness(scenario)


def test_an_attempt_that_another_server_has_changed_is_read_again_after_a_report() -> None:
    async def scenario(harness: ControlHarness) -> None:
        [rank] = await start(harness)
        await rank.tell(gpu_percent=5)
        attempt = await harness.store.attempt_of_gang(rank.gang)
        await harness.store.commit(AtomicWrite(attempts=[replace(attempt, reason="changed")]))
        assert harness.control_plane.agents.find_attempt(rank.gang, 0) is not None
        await harness.wait(3)
        found = harness.control_plane.agents.find_attempt(rank.gang, 0)
        assert found is None or found.reason == "changed"

    in_harness(scenario)


def test_the_agent_of_an_attempt_that_has_ended_elsewhere_learns_it_with_its_next_report() -> None:
    async def scenario(harness: ControlHarness) -> None:
        [rank] = await start(harness)
        await rank.tell(gpu_percent=5)
        attempt = await harness.store.attempt_of_gang(rank.gang)
        node = await harness.store.node(attempt.id, 0)
        await harness.store.commit(AtomicWrite(nodes=[replace(node, claim="n9")]))
        await harness.wait(3)
        rank.note(values={"gpu_percent": 6})
        assert isinstance(await rank.send(), ClaimLost)

    in_harness(scenario)


def test_while_the_database_is_away_figures_wait_in_memory_and_then_the_agent_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(harness: ControlHarness) -> None:
        [rank] = await start(harness)
        await harness.wait(3)
        with monkeypatch.context() as broken:

            async def fail(*_: object) -> JobReading:
                raise StoreUnusable("the database does not answer")

            for name in ("read_ranks", "read_gang"):
                broken.setattr(harness.store, name, fail)
            for value in range(gathered._MOST_EACH):
                assert (await rank.tell(gpu_percent=value)).taken == rank.last
            rank.note(values={"gpu_percent": 99})
            with pytest.raises(StoreUnusable):
                await rank.send()
        await rank.send()
        await rank.send()
        assert await rank.telemetry() == {"gpu_percent": 99}
        assert not rank.unacknowledged

    in_harness(scenario)


def test_few_agents_are_written_at_once_and_many_in_two_seconds() -> None:
    async def scenario(harness: ControlHarness) -> None:
        ranks = await start(harness)
        reports = harness.control_plane.agents.gathered
        assert reports.pause.total_seconds() == pytest.approx(0.01)
        known = reports.find(ranks[0].gang, 0, harness.clock.now())
        assert known is not None
        for number in range(1, 500):
            attempt = replace(known.attempt, gang=f"g{number}", id=f"g-{number}")
            node = replace(known.node, attempt_id=attempt.id)
            reports.learn(reports.moment, attempt, known.job, node, harness.clock.now())
        assert reports.pause.total_seconds() == 2
        await harness.wait(300)
        await ranks[0].tell(gpu_percent=1)
        await ranks[0].tell(gpu_percent=1)
        await harness.wait(3)
        assert reports.pause.total_seconds() == pytest.approx(0.01), "the others report no more"

    in_harness(scenario)


def test_figures_of_many_nodes_may_wait_unless_something_is_decided_by_them() -> None:
    async def scenario(harness: ControlHarness) -> None:
        rank = (await start(harness))[0]
        reports = harness.control_plane.agents.gathered
        assert (await rank.tell(gpu_percent=1)).pause is None
        reports.agents = 1000
        assert (await rank.tell(gpu_percent=1)).pause == timedelta(seconds=30)
        rank.note(MessageKind.EVENT, name="note", text="applied at once")
        answer = await rank.send()
        assert isinstance(answer, MessagesStored)
        assert answer.pause == timedelta(seconds=30)
        reports.agents = 10_000
        assert (await rank.tell(gpu_percent=1)).pause == timedelta(minutes=1)
        reports.is_alone = lambda: False
        assert (await rank.tell(gpu_percent=1)).pause == timedelta(seconds=10)

    in_harness(scenario)


def test_figures_at_which_somebody_looks_do_not_wait() -> None:
    async def scenario(harness: ControlHarness) -> None:
        ranks = await start(harness, nodes=2)
        sessions, gang = harness.control_plane.agents, ranks[0].gang
        sessions.gathered.agents = 1000
        job_id = (await harness.store.attempt_of_gang(gang)).job_id
        polls = [
            asyncio.create_task(sessions.wait_order(gang, rank, 0, timedelta(hours=1)))
            for rank in range(2)
        ]
        await asyncio.sleep(0)
        sessions.look_at("another", [0])
        assert not sessions.is_looked_at(gang, 0)
        sessions.look_at(job_id, [0])
        assert await asyncio.gather(*polls) == [None, None], "the agents are told at once"
        assert [sessions.is_looked_at(gang, rank) for rank in range(2)] == [True, False]
        assert [(await each.tell(gpu_percent=1)).pause for each in ranks] == [
            None,
            timedelta(seconds=30),
        ]
        await harness.wait(50)
        sessions.look_at(job_id, [0])
        await harness.wait(50)
        assert (await ranks[0].tell(gpu_percent=2)).pause is None
        await harness.wait(11)
        sessions.gathered.agents = 1000
        assert (await ranks[0].tell(gpu_percent=3)).pause == timedelta(seconds=30)

    in_harness(scenario)


def test_what_is_decided_by_figures() -> None:
    def pause(limits: JobLimits | None = None, **task: Any) -> timedelta | None:
        changed = replace(job.task, limits=limits or job.task.limits, **task)
        other = replace(job, task=changed)
        return FigurePauses().find(other, node, 1000, job.submitted_at, alone=True)

    job = make_job("j")
    node = make_node(make_attempt(job), phase=NodePhase.RUNNING)
    assert pause() == timedelta(seconds=30)
    assert pause(JobLimits(duration=timedelta(hours=1))) == timedelta(seconds=30)
    assert pause(JobLimits(stuck=timedelta(hours=1))) is None
    assert pause(JobLimits(idle=timedelta(hours=1))) is None
    assert pause(JobLimits(deadline_after=timedelta(hours=1))) is None
    assert pause(elastic=NodeRange(least=1, most=4)) is None
    assert pause(tags={SERVICE_TAG: "chat"}) is None
    node = replace(node, phase=NodePhase.SETUP)
    assert pause() is None
