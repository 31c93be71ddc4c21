"""The desks: what users may wish, what agents may claim and report, what a sweep finds, and who
is told.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import TypeVar

import pytest
from tests.records import make_gang_spec

from cavvy.agent.documents import CheckpointConfig
from cavvy.control.agents.dependencies import AgentDependencies
from cavvy.control.agents.sessions import AgentSessions
from cavvy.control.clock import VirtualClock, run_virtual
from cavvy.control.control_plane import ControlPlane, ControlPlaneDependencies
from cavvy.control.job_service import JobIds, TooLate, UnsupportedTask, gang_name
from cavvy.control.worklist import WIDTH
from cavvy.domain.accounts import Account
from cavvy.domain.jobs import (
    Attempt,
    AttemptOutcome,
    AttemptPhase,
    JobPhase,
    JobRecord,
    Node,
    NodePhase,
    RunOrigin,
)
from cavvy.domain.messages import (
    AgentMessage,
    ClaimGranted,
    ClaimLost,
    ClaimRefused,
    ClaimWait,
    HostFacts,
    MessageKind,
    MessagesStored,
)
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import (
    CheckpointPolicy,
    JobLimits,
    JobSchedule,
    ResourceSpec,
    SpotPolicy,
    StartWindow,
    TaskSpec,
    WebhookTarget,
    WindowSpan,
)
from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.providers.base import AgentEndpoint, GangState, Manifest
from cavvy.providers.fake import MANIFEST
from cavvy.providers.fake.cloud import FakeCloud
from cavvy.providers.fake.script import DEFAULT, CloudScript, FaultScript
from cavvy.providers.fake.script import TimeSpan as Blackout
from cavvy.sim.harness import START
from cavvy.store.base import AtomicWrite
from cavvy.store.open import MemoryStore

T = TypeVar("T")


async def no_secrets(project: str, names: Sequence[str]) -> dict[str, str]:
    return {}


HOST = HostFacts(hostname="h")
ORPHAN = make_gang_spec(
    DEFAULT.offers[2],
    name="rm-x-stray",
    installation="test",
    agent_endpoint=AgentEndpoint(address="a", token="t"),
)


@dataclass(slots=True)
class ControlHarness:
    """A running control plane over a cloud whose own agents never start: the test is the agent."""

    control_plane: ControlPlane
    store: MemoryStore
    cloud: FakeCloud
    clock: VirtualClock
    posts: list[tuple[str, dict[str, object]]]

    async def submit(self, account: str = "", /, **changes: object) -> JobRecord:
        task = replace(TaskSpec(name="digits", run="x", secrets=("TOKEN",)), **changes)  # type: ignore[arg-type]
        return await self.control_plane.jobs.submit(
            task, RunOrigin(), "default", account=account, consented=True
        )

    async def wait(self, seconds: float = 2) -> None:
        await self.clock.sleep_until(self.clock.now() + timedelta(seconds=seconds))

    async def gang(self, job: JobRecord) -> str:
        return (await self.store.attempts(job.id))[-1].gang

    async def node(self, job: JobRecord, rank: int = 0) -> Node:
        return await self.store.node((await self.store.attempts(job.id))[-1].id, rank)

    async def report(
        self, gang: str, *messages: AgentMessage, rank: int = 0, nonce: str = "n"
    ) -> MessagesStored | ClaimLost:
        return await self.control_plane.agents.messages(gang, rank, nonce, messages)

    def message(self, seq: int, kind: MessageKind, **fields: object) -> AgentMessage:
        return AgentMessage(seq=seq, at=self.clock.now(), kind=kind, **fields)  # type: ignore[arg-type]


def in_harness(
    scenario: Callable[[ControlHarness], Awaitable[T]],
    fault_scripts: Sequence[FaultScript] = (FaultScript(boots=False),) * 9,
    manifest: Manifest = MANIFEST,
    offers: tuple[Offer, ...] = DEFAULT.offers,
) -> T:
    async def main() -> T:
        clock = VirtualClock(START)
        store = MemoryStore(make_id=lambda: "test")
        cloud = FakeCloud(
            manifest, CloudScript(offers=offers, launches=tuple(fault_scripts)), clock.now
        )
        posts: list[tuple[str, dict[str, object]]] = []

        async def post(url: str, body: bytes) -> str:
            posts.append((url, json.loads(body)))
            if "silent" in url:
                await asyncio.sleep(1e6)
            return "refused" if "down" in url and len(posts) < 4 else ""

        async def secrets(project: str, names: Sequence[str]) -> dict[str, str]:
            return {name: f"secret of {project}" for name in names}

        control_plane = ControlPlane(
            store,
            {"fake": cloud},
            clock,
            installation="test",
            dependencies=ControlPlaneDependencies(
                agent_endpoint=lambda gang: AgentEndpoint(address="a", token=gang),
                open_secrets=secrets,
                storage=lambda job: f"/storage/{job.id}",
                post=post,
            ),
        )
        await control_plane.start()
        try:
            return await scenario(ControlHarness(control_plane, store, cloud, clock, posts))
        finally:
            await control_plane.stop()

    return run_virtual(main())


def test_a_claim_is_granted_once_and_the_same_nonce_gets_the_same_answer() -> None:
    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit(nodes=2)
        await harness.wait()
        gang, sessions = await harness.gang(job), harness.control_plane.agents
        assert isinstance(await sessions.claim(gang, 0, "n0", "1.1.1.1", HOST), ClaimWait)
        assert isinstance(await sessions.claim(gang, 0, "other", "6.6.6.6", HOST), ClaimRefused)
        assert isinstance(await sessions.claim(gang, 2, "n2", "x", HOST), ClaimRefused)
        assert isinstance(await sessions.claim("nobody", 0, "n", "x", HOST), ClaimRefused)
        go = await sessions.claim(gang, 1, "n1", "2.2.2.2", HOST)
        assert isinstance(go, ClaimGranted)
        assert go == await sessions.claim(gang, 1, "n1", "2.2.2.2", HOST)
        assert list(go.work.addresses) == ["1.1.1.1", "2.2.2.2"]
        assert go.work.secrets == {"TOKEN": "secret of default"}
        assert "secret of" not in repr(go)
        assert go.lease == job.task.limits.unattended

    in_harness(scenario)


def test_a_claim_is_answered_before_a_large_checkpoint_is_where_the_work_starts() -> None:
    """An agent that hears nothing for half a minute takes the server for dead."""
    brought: list[str] = []

    async def slow(job: JobRecord, attempt: Attempt) -> CheckpointConfig:
        await asyncio.sleep(100)
        brought.append(attempt.id)
        return CheckpointConfig(path="c", sync=True)

    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit(secrets=(), checkpoint=CheckpointPolicy(path="c"))
        await harness.wait()
        gang, plain = await harness.gang(job), harness.control_plane.agents
        agent_dependencies = AgentDependencies(
            open_secrets=no_secrets, checkpoint=slow, accelerators=lambda job, attempt: 0
        )
        sessions = AgentSessions(
            harness.store, harness.clock, harness.control_plane.hint, agent_dependencies
        )
        answer: ClaimGranted | ClaimWait | ClaimRefused | None = None
        while not isinstance(answer, ClaimGranted):
            asked = harness.clock.now()
            answer = await sessions.claim(gang, 0, "n", "1.1.1.1", HOST)
            assert harness.clock.now() - asked < timedelta(seconds=20)
            await harness.wait(1)
        assert answer.work.checkpoint == CheckpointConfig(path="c", sync=True)
        assert len(brought) == 1, "it went on between the claims"
        unheard = asyncio.create_task(sessions.claim(gang, 0, "n", "1.1.1.1", HOST))
        await harness.wait()
        await sessions.close()
        assert isinstance(await unheard, ClaimWait), "the next server is asked"
        assert isinstance(await plain.claim(gang, 0, "n", "1.1.1.1", HOST), ClaimGranted)

    in_harness(scenario)


def test_two_agents_that_claim_at_the_same_moment() -> None:
    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit()
        await harness.wait()
        gang = await harness.gang(job)
        claims = [harness.control_plane.agents.claim(gang, 0, f"n{i}", "a", HOST) for i in range(5)]
        answers = await asyncio.gather(*claims)
        assert [type(answer) for answer in answers].count(ClaimGranted) == 1

    in_harness(scenario)


def test_each_message_is_applied_once_and_in_order() -> None:
    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit()
        await harness.wait()
        gang = await harness.gang(job)
        await harness.control_plane.agents.claim(gang, 0, "n", "a", HOST)
        running = harness.message(1, MessageKind.RUNNING)
        event = harness.message(2, MessageKind.EVENT, name="note", text="hello")
        lease = job.task.limits.unattended
        assert await harness.report(gang, event) == MessagesStored(seq=0, lease=lease), (
            "there is a gap before it"
        )
        assert await harness.report(gang, event, running) == MessagesStored(seq=2, lease=lease)
        assert await harness.report(gang, running, event) == MessagesStored(seq=2, lease=lease)
        told = [e.text for e in await harness.store.events(job.id) if e.kind == "note"]
        assert told == ["hello"]
        assert isinstance(await harness.report(gang, event, nonce="other"), ClaimLost)
        assert isinstance(await harness.report("nobody", event), ClaimLost)

    in_harness(scenario)


def test_an_exit_is_done_at_once_and_then_the_claim_is_over() -> None:
    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit()
        await harness.wait()
        gang = await harness.gang(job)
        await harness.control_plane.agents.claim(gang, 0, "n", "a", HOST)
        progress = harness.message(2, MessageKind.PROGRESS, values={"loss": 0.5})
        exited = harness.message(
            3, MessageKind.EXITED, outcome=AttemptOutcome.SUCCEEDED, exit_code=0
        )
        await harness.report(gang, harness.message(1, MessageKind.RUNNING), progress, exited)
        await harness.wait(0.001)
        assert (await harness.store.job(job.id)).phase is JobPhase.DONE
        node = await harness.node(job)
        assert (node.phase, node.progress) == (NodePhase.EXITED, {"loss": 0.5})
        await harness.wait(60)
        assert isinstance(await harness.report(gang, exited), ClaimLost)
        assert isinstance(
            await harness.control_plane.agents.claim(gang, 0, "n", "a", HOST), ClaimRefused
        )
        assert await harness.control_plane.idle()

    in_harness(scenario)


def test_an_order_wakes_who_waits_for_it() -> None:
    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit()
        await harness.wait()
        gang, sessions = await harness.gang(job), harness.control_plane.agents
        await sessions.claim(gang, 0, "n", "a", HOST)
        assert await sessions.wait_order(gang, 0, 0, timedelta(seconds=5)) is None
        waiting = asyncio.create_task(sessions.wait_order(gang, 0, 0, timedelta(hours=1)))
        await harness.wait(1)
        before = harness.clock.now()
        await harness.control_plane.jobs.stop("default", "digits")
        order = await waiting
        assert order is not None
        assert (order.kind, order.seconds) == ("stop", 10)
        assert harness.clock.now() - before < timedelta(milliseconds=1)
        assert await sessions.order(gang, 0, order.seq) is None

    in_harness(scenario)


def test_a_wrong_clock_on_a_node_moves_no_times() -> None:
    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit()
        await harness.wait()
        gang = await harness.gang(job)
        await harness.control_plane.agents.claim(gang, 0, "n", "a", HOST)
        claimed_at = (await harness.node(job)).claimed_at
        early = replace(harness.message(1, MessageKind.RUNNING), at=START - timedelta(days=9))
        late = replace(
            harness.message(2, MessageKind.EXITED, exit_code=1), at=START + timedelta(days=9)
        )
        await harness.report(gang, early, late)
        node = await harness.node(job)
        assert node.running_at == claimed_at
        assert node.exited_at == harness.clock.now()
        assert node.exit_outcome is AttemptOutcome.NODE, (
            "an exit without an outcome is the node's fault"
        )

    in_harness(scenario)


def test_a_stop_of_a_queued_job_is_immediate_and_stopping_twice_is_no_error() -> None:
    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit(schedule=JobSchedule(at=START + timedelta(days=1)))
        stopped = await harness.control_plane.jobs.stop("default", job.name)
        assert stopped.phase is JobPhase.STOPPED
        again = await harness.control_plane.jobs.stop("default", job.id)
        assert (again.phase, again.reason) == (JobPhase.STOPPED, "stopped by the user")
        retried = await harness.control_plane.jobs.retry("default", job.name)
        assert (retried.phase, retried.stop_reason) == (JobPhase.QUEUED, None)
        with pytest.raises(TooLate):
            await harness.control_plane.jobs.retry("default", job.name)
        with pytest.raises(TooLate):
            await harness.control_plane.jobs.drill_preempt(
                "default", job.name, timedelta(seconds=5)
            )

    in_harness(scenario)


def test_a_schedule_that_never_comes_is_refused_with_its_reason() -> None:
    async def scenario(harness: ControlHarness) -> None:
        with pytest.raises(UnsupportedTask, match=r"schedule\.cron"):
            await harness.submit(schedule=JobSchedule(cron="0 0 31 2 *"))

    in_harness(scenario)


def test_names_are_unique_and_ids_sort_by_time() -> None:
    async def scenario(harness: ControlHarness) -> list[JobRecord]:
        return [await harness.submit() for _ in range(50)]

    jobs = in_harness(scenario)
    assert [job.name for job in jobs[:3]] == ["digits", "digits-2", "digits-3"]
    assert [job.id for job in jobs] == sorted({job.id for job in jobs})
    assert all(len(job.id) == 16 for job in jobs)
    assert len(gang_name("installation", f"{jobs[0].id}-1000")) <= 63


def test_ids_made_in_one_moment_still_grow() -> None:
    async def main() -> list[str]:
        ids = JobIds(VirtualClock(START), Random(1).getrandbits)
        return [ids.make() for _ in range(1000)]

    made = run_virtual(main())
    assert made == sorted(set(made))


def test_a_sweep_wants_two_witnesses() -> None:
    async def scenario(harness: ControlHarness) -> None:
        await harness.cloud.launch(ORPHAN)
        job = await harness.submit()
        await harness.wait()
        garbage_collector = harness.control_plane.garbage_collector
        first = await garbage_collector.sweep(remove=True)
        assert [(found.gang, found.sure, found.removed) for found in first.orphans] == [
            ("rm-x-stray", False, False)
        ]
        await harness.wait(150)
        dry = await garbage_collector.sweep(remove=False)
        assert [(found.sure, found.removed) for found in dry.orphans] == [(True, False)]
        wet = await garbage_collector.sweep(remove=True)
        assert [(found.sure, found.removed) for found in wet.orphans] == [(True, True)]
        await harness.wait(60)
        wanted = await harness.gang(job)
        living = [
            seen.name for seen in await harness.cloud.gangs() if seen.state is not GangState.ENDED
        ]
        assert living == [wanted]

    in_harness(scenario)


def test_what_is_left_of_an_attempt_that_is_over_goes_when_two_looks_agree() -> None:
    """The age of its nodes is no witness, for it was wanted a moment ago; a look that misses it
    begins anew.
    """

    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit()
        await harness.wait()
        await harness.control_plane.down()
        await harness.wait(60)
        (over,) = await harness.store.attempts(job.id)
        assert over.phase is AttemptPhase.ENDED
        await harness.store.commit(AtomicWrite(attempts=[replace(over, gang="rm-x-late")]))
        late = make_gang_spec(
            DEFAULT.offers[2],
            name="rm-x-late",
            installation="test",
            agent_endpoint=AgentEndpoint(address="a", token="t"),
        )
        await harness.cloud.launch(late)
        await harness.wait(150)  # longer than its place may hide it

        async def look() -> list[tuple[str, bool, bool]]:
            swept = await harness.control_plane.garbage_collector.sweep(remove=True)
            return [(found.gang, found.sure, found.removed) for found in swept.orphans]

        script = harness.cloud.script
        assert await look() == [("rm-x-late", False, False)]
        harness.cloud.script = replace(script, blackouts=(Blackout(at_s=0, for_s=10_000),))
        assert await look() == []
        harness.cloud.script = script
        await harness.wait(130)
        for _ in range(2):  # the second look comes while its place might still hide a gang
            assert await look() == [("rm-x-late", False, False)]
            await harness.wait(65)
        assert await look() == [("rm-x-late", True, True)]

    in_harness(scenario)


def test_leases_end_before_the_budget_does_whatever_was_spent_before() -> None:
    """40 cents an hour: the budget pays for an hour, and the end takes 15 s of it."""

    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit(limits=JobLimits(budget=Money(400_000)))
        await harness.wait(900)
        first, second = await harness.store.attempts(job.id)
        assert first.outcome is AttemptOutcome.PREEMPTED
        used, bought = (life.started_at for life in harness.cloud.lives())
        assert first.ended_at is not None
        left = timedelta(seconds=3585) - (first.ended_at - used)
        leases = [gang.spec.lease for gang in harness.cloud.gang_list]
        assert leases[0] == timedelta(seconds=3585)
        assert abs(leases[1] - left) < timedelta(seconds=2)
        until = harness.clock.now() + await harness.control_plane.agents.lease(second.gang)
        assert abs(until - (bought + left)) < timedelta(seconds=2)
        charges = await harness.store.charges(job.id)
        told = max(charge.until for charge in charges if charge.attempt_id == second.id)
        assert harness.clock.now() - told <= timedelta(
            seconds=60
        )  # what is spent is told while it is spent

    in_harness(
        scenario,
        (FaultScript(boots=False, preempted_after_s=600), FaultScript(boots=False)),
        offers=DEFAULT.offers[2:],
    )


def test_a_gang_that_is_kept_waits_when_all_of_its_agents_do() -> None:
    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit(nodes=2, keep=timedelta(minutes=10))
        await harness.wait()
        gang = await harness.gang(job)
        for rank in (0, 1):
            await harness.control_plane.agents.claim(gang, rank, "n", "a", HOST)
        for rank in (0, 1):
            over = harness.message(
                2, MessageKind.EXITED, outcome=AttemptOutcome.SUCCEEDED, exit_code=0
            )
            await harness.report(gang, harness.message(1, MessageKind.RUNNING), over, rank=rank)
        await harness.wait()
        (kept,) = await harness.store.attempts(job.id)
        assert kept.phase is AttemptPhase.KEPT
        for rank, all_wait in ((0, False), (1, True)):
            assert isinstance(
                await harness.control_plane.agents.claim(gang, rank, "next", "a", HOST), ClaimWait
            )
            assert harness.control_plane.agents.waits(kept) is all_wait

    in_harness(scenario)


def test_down_stops_every_job_and_removes_what_nobody_knows() -> None:
    async def scenario(harness: ControlHarness) -> None:
        await harness.cloud.launch(ORPHAN)
        for _ in range(3):
            await harness.submit()
        await harness.wait()
        report = await harness.control_plane.down()
        assert [(found.gang, found.removed) for found in report.orphans] == [("rm-x-stray", True)]
        await harness.wait(300)
        assert await harness.control_plane.idle()
        assert all(seen.state is GangState.ENDED for seen in await harness.cloud.gangs())

    in_harness(scenario)


def test_webhooks_are_told_once_and_tried_again() -> None:
    async def scenario(harness: ControlHarness) -> None:
        hooks = (
            WebhookTarget(url="https://up.example/path?key=hidden"),
            WebhookTarget(url="https://down.example/", on=("finish", "failure")),
            WebhookTarget(url="https://not.example/", on=("budget",)),
        )
        job = await harness.submit(
            webhooks=hooks,
            env={"PASSWORD": "hidden"},
            schedule=JobSchedule(at=START + timedelta(days=1)),
        )
        late = await harness.submit(webhooks=hooks)
        await harness.wait()
        gang = await harness.gang(late)
        await harness.control_plane.agents.claim(gang, 0, "n", "a", HOST)
        await harness.report(
            gang, harness.message(1, MessageKind.EXITED, outcome=AttemptOutcome.EXIT, exit_code=3)
        )
        await harness.wait(300)
        assert [url for url, _ in harness.posts].count("https://up.example/path?key=hidden") == 1
        assert [url for url, _ in harness.posts].count("https://down.example/") >= 2
        assert {payload["event"] for _, payload in harness.posts} == {"failure"}
        assert {payload["exit_code"] for _, payload in harness.posts} == {3}
        assert "hidden" not in json.dumps([payload for _, payload in harness.posts])
        told = [
            event.text for event in await harness.store.events(late.id) if event.kind == "webhook"
        ]
        assert sorted(told) == ["failure: down.example was told", "failure: up.example was told"]
        assert not [
            event for event in await harness.store.events(job.id) if event.kind == "webhook"
        ]

    in_harness(scenario)


def test_receivers_that_do_not_answer_delay_no_job() -> None:
    async def scenario(harness: ControlHarness) -> None:
        hooks = (WebhookTarget(url="https://silent.example/", on=("finish",)),)
        late = JobSchedule(at=START + timedelta(days=1))
        for number in range(2 * WIDTH):
            job = await harness.submit(name=f"t{number}", webhooks=hooks, schedule=late)
            await harness.control_plane.jobs.stop("default", job.id, "enough")
        await harness.wait()
        assert len(harness.posts) == WIDTH
        other = await harness.submit()
        await harness.wait()
        assert await harness.gang(other)

    in_harness(scenario)


def test_how_often_to_save_follows_what_a_checkpoint_costs_and_what_the_market_loses() -> None:
    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit(checkpoint=CheckpointPolicy(path="c", auto=True))
        await harness.wait()
        gang, sessions = await harness.gang(job), harness.control_plane.agents
        go = await sessions.claim(gang, 0, "n", "a", HOST)
        assert isinstance(go, ClaimGranted)
        assert go.work.checkpoint is not None
        first = go.work.checkpoint.every_s
        assert first is not None
        seq = 0

        async def save(cost_s: float) -> timedelta | None:
            nonlocal seq
            seq += 1
            told = {
                "bytes": 10**9,
                "files": 2,
                "cost_s": cost_s,
                "sent": 10**9,
                "seconds": 10.0,
                "number": seq,
            }
            ack = await harness.report(gang, harness.message(seq, MessageKind.CHECKPOINT, **told))
            assert isinstance(ack, MessagesStored)
            return ack.every

        cheap = await save(0.3)
        assert cheap is not None
        assert cheap.total_seconds() < first  # dearer was assumed
        assert await save(0.31) == cheap  # which is no news
        dear = await save(120)
        assert dear is not None
        assert dear > 10 * cheap
        attempt = (await harness.store.attempts(job.id))[-1]
        measured = (attempt.checkpoint_bytes, attempt.checkpoint_rate, attempt.checkpoint_cost)
        assert measured == (10**9, 1e8, timedelta(minutes=2))
        told = [event.text for event in await harness.store.events(job.id) if event.kind == "pace"]
        assert len(told) == 2
        assert "each takes 2m" in told[1]

    in_harness(scenario)


def test_a_job_that_repeats_starts_a_run_each_time_and_leaves_out_those_that_would_overlap() -> (
    None
):
    async def scenario(harness: ControlHarness) -> None:
        head = await harness.submit(
            schedule=JobSchedule(cron="0 * * * *", time_zone="Europe/Berlin")
        )
        assert head.held_until is not None
        assert head.held_until > harness.clock.now()
        await harness.wait(300)
        assert (await harness.store.job(head.id)).phase is JobPhase.QUEUED
        assert not await harness.store.attempts(head.id)  # it is no work of its own
        await harness.wait((head.held_until - harness.clock.now()).total_seconds() + 5)

        async def runs() -> list[JobRecord]:
            ids = [key for key in await harness.store.unfinished() if key != head.id]
            return [await harness.store.job(key) for key in sorted(ids)]

        (first,) = await runs()
        assert first.task == replace(head.task, schedule=None, name=first.name)
        assert first.name.startswith("digits-2")
        assert first.consented
        assert await harness.store.attempts(first.id)
        await harness.wait(3600)  # the next is due, and the first still works
        assert await runs() == [await harness.store.job(first.id)]
        told = [event.text for event in await harness.store.events(head.id)]
        assert any("skipped" in text for text in told)
        await harness.control_plane.jobs.stop(first.project, first.name)
        await harness.wait(3600)
        last = (await runs())[-1]
        assert last.id > first.id
        assert last.submitted_at - first.submitted_at == timedelta(hours=2)
        await harness.control_plane.jobs.stop(head.project, head.name)
        await harness.control_plane.jobs.stop(last.project, last.name)
        await harness.wait(7200)
        assert await runs() == []

    in_harness(scenario, fault_scripts=(FaultScript(boots=False),) * 30)


def test_a_schedule_starts_no_runs_while_its_account_is_disabled_or_removed() -> None:
    async def scenario(harness: ControlHarness) -> None:
        now = harness.clock.now()
        await harness.store.add_account(Account(name="ada", created_at=now))
        head = await harness.submit("ada", schedule=JobSchedule(cron="0 * * * *"))

        async def wait_for_next() -> JobRecord:
            job = await harness.store.job(head.id)
            assert job.held_until is not None
            await harness.wait((job.held_until - harness.clock.now()).total_seconds() + 5)
            return await harness.store.job(head.id)

        async def count_runs() -> int:
            return len([key for key in await harness.store.unfinished() if key != head.id])

        await harness.store.disable_account("ada", now)
        for _ in range(3):
            job = await wait_for_next()
            assert job.reason.startswith("no run starts, because the account ada is disabled; next")
            assert (job.phase, job.barred) == (JobPhase.QUEUED, True)
        assert await count_runs() == 0
        events = await harness.store.events(head.id)
        assert [each.kind for each in events].count("account") == 1, "not one for each time"
        await harness.store.disable_account("ada", None)
        assert not (await wait_for_next()).barred
        assert await count_runs() == 1, "it goes on once the account is enabled"
        (run,) = [key for key in await harness.store.unfinished() if key != head.id]
        await harness.control_plane.jobs.stop("default", run)
        await harness.store.remove_account("ada")
        assert "because the account ada was removed" in (await wait_for_next()).reason
        later = Account(name="ada", created_at=harness.clock.now())
        await harness.store.add_account(later)  # perhaps another person
        assert "because the account ada was removed" in (await wait_for_next()).reason
        await harness.control_plane.jobs.stop("default", head.id)
        await harness.store.add_account(Account(name="bob", created_at=harness.clock.now()))
        await harness.control_plane.jobs.retry("default", head.id, "bob")
        assert not (await wait_for_next()).barred
        assert await count_runs() == 1, "the schedule now belongs to another account"

    in_harness(scenario, fault_scripts=(FaultScript(boots=False),) * 30)


def test_a_job_that_has_not_started_waits_while_its_account_is_disabled() -> None:
    async def scenario(harness: ControlHarness) -> None:
        now = harness.clock.now()
        for name in ("ada", "bob"):
            await harness.store.add_account(Account(name=name, created_at=now))
        started = await harness.submit("ada")
        await harness.wait(60)
        before = len(await harness.store.attempts(started.id))
        await harness.store.disable_account("ada", harness.clock.now())
        at = harness.clock.now() + timedelta(minutes=10)
        soon = await harness.submit("ada", schedule=JobSchedule(at=at))
        held = await harness.submit("ada")
        other = await harness.submit("bob")
        await harness.wait(3600)
        for job in (soon, held):
            assert not await harness.store.attempts(job.id)
            reason = (await harness.store.job(job.id)).reason
            assert reason == "the job does not start, because the account ada is disabled"
        assert await harness.store.attempts(other.id)
        assert len(await harness.store.attempts(started.id)) > before >= 1, "it is tried again"
        await harness.store.disable_account("ada", None)
        await harness.wait(120)
        for job in (soon, held):
            assert await harness.store.attempts(job.id)
            texts = [each.text for each in await harness.store.events(job.id)]
            assert "the account ada may start jobs again" in texts

    in_harness(scenario, fault_scripts=(FaultScript(boots=False),) * 30)


def test_a_job_with_a_window_starts_when_it_opens() -> None:
    async def scenario(harness: ControlHarness) -> None:
        now = harness.clock.now()
        minute = now.hour * 60 + now.minute + 90
        days = tuple(range(7))
        span = WindowSpan(days=days, start_minute=minute % 1440, end_minute=(minute + 60) % 1440)
        job = await harness.submit(window=StartWindow(spans=(span,)))
        await harness.wait(3600)
        held = await harness.store.job(job.id)
        assert "window opens" in held.reason
        assert not await harness.store.attempts(job.id)
        await harness.wait(2400)
        (attempt,) = await harness.store.attempts(job.id)
        assert timedelta(minutes=89) < attempt.created_at - now < timedelta(minutes=92)

    in_harness(scenario)


@pytest.mark.parametrize(("rate", "told"), [(1e8, True), (1e9, False)])
def test_a_checkpoint_that_takes_longer_than_the_places_notice_is_told_of_once(
    rate: float, told: bool
) -> None:
    async def scenario(harness: ControlHarness) -> None:
        spot = ResourceSpec(spot=SpotPolicy.ONLY)
        job = await harness.submit(checkpoint=CheckpointPolicy(path="c"), resources=spot)
        await harness.wait()
        gang = await harness.gang(job)
        assert isinstance(
            await harness.control_plane.agents.claim(gang, 0, "n", "a", HOST), ClaimGranted
        )
        size = 20 * 10**9
        for seq in (1, 2):
            fields = {
                "bytes": size,
                "files": 2,
                "sent": size,
                "seconds": size / rate,
                "number": seq,
            }
            await harness.report(gang, harness.message(seq, MessageKind.CHECKPOINT, **fields))
        warned = [
            event.text for event in await harness.store.events(job.id) if event.kind == "unsafe"
        ]
        assert len(warned) == told
        assert all("took 3m20s" in text and "2m00s of notice" in text for text in warned)

    in_harness(scenario, manifest=replace(MANIFEST, notice=timedelta(minutes=2)))


def test_what_a_stopped_job_never_bought_is_free_for_the_next_at_once() -> None:
    async def scenario(harness: ControlHarness) -> None:
        job = await harness.submit()
        while not await harness.store.attempts(job.id):
            await asyncio.sleep(0)
        await harness.control_plane.jobs.stop("default", job.id, "changed my mind")
        next_one = await harness.submit(name="next")
        await harness.wait(10)
        assert harness.cloud.gang_list[0].spec.name == await harness.gang(next_one), (
            "the first was never launched"
        )

    in_harness(scenario, offers=(replace(DEFAULT.offers[0], capacity=1),))
