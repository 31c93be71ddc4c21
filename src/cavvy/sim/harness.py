"""Runs a scenario: the production control plane with a fake cloud, on virtual time."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from random import Random

from cavvy.control.budgets import BUDGETS
from cavvy.control.clock import VirtualClock, run_virtual
from cavvy.control.control_plane import ControlPlane, ControlPlaneDependencies
from cavvy.control.job_service import JobIds, JobServiceError, TaskSubmission
from cavvy.control.reservations import ReservationClash, ReservationRequest
from cavvy.domain.arrays import is_array
from cavvy.domain.jobs import JOB_ENDS, AttemptPhase, JobRecord, RunOrigin
from cavvy.domain.units import Money
from cavvy.providers.base import AgentEndpoint, ProviderError
from cavvy.providers.fake import MANIFEST
from cavvy.providers.fake.cloud import FakeCloud
from cavvy.sim.fault_injection import CrashPoint, FaultyProvider, FaultyStore
from cavvy.sim.scenario import (
    JobTrace,
    ScenarioResult,
    SimScenario,
    SimSubmission,
    UserAction,
    UserIntervention,
)
from cavvy.store.base import StoreError
from cavvy.store.open import MemoryStore

START = datetime(2030, 1, 1, tzinfo=UTC)
_TRIES = 20  # of a user's request for an array
_LOOK = timedelta(minutes=1)  # virtual time between two checks of whether the scenario has ended


def play(scenario: SimScenario) -> ScenarioResult:
    """Run a scenario from start to end on virtual time."""
    return run_virtual(_Harness(scenario).play())


class _Harness:
    def __init__(self, scenario: SimScenario) -> None:
        self._scenario = scenario
        self._clock = VirtualClock(START)
        self._ids: list[str | None] = [None] * len(scenario.submissions)
        self._arrays: dict[int, str] = {}  # IDs of arrays by the index of their submission
        self._control_plane: ControlPlane | None = None

    async def play(self) -> ScenarioResult:
        scenario = self._scenario
        self._cloud = FakeCloud(MANIFEST, scenario.script, self._clock.now)
        self._memory = MemoryStore(make_id=lambda: "sim")
        await self._add_rows()
        self._crash_point = CrashPoint(scenario.crashes)
        self._store = FaultyStore(
            self._memory, self._crash_point, scenario.stale, scenario.store_s, scenario.broken
        )
        self._job_ids = JobIds(self._clock, Random(0).getrandbits)
        await self._open()
        hands = [
            asyncio.create_task(self._submit(i, item))
            for i, item in enumerate(scenario.submissions)
        ]
        hands += [asyncio.create_task(self._intervene(item)) for item in scenario.interventions]
        hands.append(asyncio.create_task(self._end_budgets()))
        keeper = asyncio.create_task(self._keep_alive())
        finished = await self._wait_for_the_end(hands)
        for task in (keeper, *hands):
            task.cancel()
        outcomes = await asyncio.gather(keeper, *hands, return_exceptions=True)
        if self._control_plane is not None:
            await self._control_plane.stop()
        await self._cloud.close()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return await self._ending(finished)

    async def _open(self) -> None:
        """Start a server that uses the store of the previous server."""
        self._control_plane = ControlPlane(
            self._store.as_store(),
            {"fake": FaultyProvider(self._cloud, self._crash_point)},
            self._clock,
            installation="sim",
            dependencies=ControlPlaneDependencies(
                agent_endpoint=lambda gang: AgentEndpoint(address="call", token=gang),
                open_secrets=_no_secrets,
                storage=_storage,
                egress=self._egress,
            ),
            ids=self._job_ids,
        )
        await self._control_plane.start()

    async def _egress(self) -> Mapping[str, Money]:
        return self._scenario.egress

    async def _keep_alive(self) -> None:
        while True:
            crash = await self._crash_point.blown.get()
            if self._control_plane is not None:
                await self._control_plane.stop()
            self._control_plane = None
            await self._clock.sleep_until(self._clock.now() + timedelta(seconds=crash.down_s))
            await self._open()

    async def _wait_for_the_end(self, hands: Sequence[asyncio.Task[None]]) -> bool:
        while self._clock.now() < START + self._scenario.longest:
            await self._clock.sleep_until(self._clock.now() + _LOOK)
            if all(hand.done() for hand in hands) and not await self._memory.unfinished():
                return True
        return False

    async def _submit(self, index: int, item: SimSubmission) -> None:
        await self._clock.sleep_until(START + timedelta(seconds=item.at_s))
        control_plane = await self._server()
        if item.others:
            await self._submit_group(control_plane, index, item)
            return
        if is_array(item.task) or item.task.group is not None:
            ask = TaskSubmission(
                task=item.task,
                origin=RunOrigin(),
                id=control_plane.jobs.make_id(),
                consented=item.consented,
                group=next(iter(self._arrays.values())) if item.task.group else None,
            )
            array = await control_plane.jobs.enqueue(ask, item.task.project)
            if item.task.group is None:
                self._arrays[index] = array.id
            return
        job = await control_plane.jobs.submit(
            item.task,
            RunOrigin(),
            item.task.project,
            consented=item.consented,
            ceiling=item.ceiling,
        )
        self._ids[index] = job.id

    async def _submit_group(
        self, control_plane: ControlPlane, index: int, item: SimSubmission
    ) -> None:
        asks = [
            TaskSubmission(
                task=task,
                origin=RunOrigin(),
                id=control_plane.jobs.make_id(),
                consented=item.consented,
            )
            for task in (item.task, *item.others)
        ]
        await control_plane.jobs.submit_all(asks, item.task.project)
        self._arrays[index] = str((await self._memory.job(asks[0].id)).array_id)

    async def _intervene(self, item: UserIntervention) -> None:
        await self._clock.sleep_until(START + timedelta(seconds=item.at_s))
        control_plane = await self._server()
        if item.node:
            await self._maintain(control_plane, item)
            return
        job_id = self._ids[item.job]
        if job_id is None:
            array = self._arrays.get(item.job)
            if array is not None:
                await self._intervene_array(control_plane, array, item)
            return
        job = await self._memory.job(job_id)
        try:
            # The simulated user stops waiting if the server dies during a call.
            async with asyncio.timeout(60):
                await _wish(control_plane, job, item)
        except (JobServiceError, StoreError, TimeoutError):
            return

    async def _maintain(self, control_plane: ControlPlane, item: UserIntervention) -> None:
        """Act on a host. The operator repeats a request that was not answered."""
        for _ in range(_TRIES):
            with suppress(StoreError, ProviderError, TimeoutError):
                async with asyncio.timeout(60):
                    await _maintain(control_plane, item, self._clock.now())
                    return
            control_plane = await self._server()

    async def _intervene_array(
        self, control_plane: ControlPlane, array_id: str, item: UserIntervention
    ) -> None:
        """Stop or retry all jobs of an array. The user repeats a request that was not answered."""
        project = (await self._memory.arrays.get(array_id)).project
        for _ in range(_TRIES):
            with suppress(StoreError, TimeoutError):
                async with asyncio.timeout(60):
                    if item.action is UserAction.STOP:
                        await control_plane.jobs.stop_array(project, array_id)
                    elif item.action is UserAction.DRILL:
                        first = await self._memory.job(
                            (await self._memory.arrays.jobs(array_id))[0]
                        )
                        await _wish(control_plane, first, item)
                    else:
                        await control_plane.jobs.retry_array(project, array_id)
                    return
            control_plane = await self._server()

    async def _add_rows(self) -> None:
        for project in self._scenario.projects:
            await self._memory.add_project(project, adopt=False)
        for bound in self._scenario.policies:
            await self._memory.put_policy(bound.project, bound.policy)
        for budget in self._scenario.budgets:
            await self._memory.budgets.put(budget)
        for pool in self._scenario.pools:
            await self._memory.node_pools.put(pool)

    async def _end_budgets(self) -> None:
        if self._scenario.budgets_end_s is None:
            return
        await self._clock.sleep_until(START + timedelta(seconds=self._scenario.budgets_end_s))
        for budget in self._scenario.budgets:
            await self._memory.budgets.delete(budget.name)
        control_plane = await self._server()
        control_plane.budgets.expire()
        control_plane.hint(BUDGETS)

    async def _server(self) -> ControlPlane:
        while self._control_plane is None:
            await self._clock.sleep_until(self._clock.now() + timedelta(seconds=1))
        return self._control_plane

    async def _ending(self, finished: bool) -> ScenarioResult:
        traces = []
        members = [
            each.job.id
            for array_id in self._arrays.values()
            for each in await self._memory.arrays.members(array_id)
        ]
        for job_id in [*self._ids, *members]:
            if job_id is not None:
                attempts = await self._memory.attempts(job_id)
                traces.append(
                    JobTrace(
                        job=await self._memory.job(job_id),
                        attempts=attempts,
                        nodes=[await self._memory.nodes(attempt.id) for attempt in attempts],
                        events=await self._memory.events(job_id),
                        charges=await self._memory.charges(job_id),
                        observations=await self._memory.observations(
                            {each.offer.key for each in attempts}, START
                        ),
                    )
                )
        closed = all(
            trace.job.phase in JOB_ENDS
            and all(a.phase is AttemptPhase.ENDED for a in trace.attempts)
            for trace in traces
        )
        return ScenarioResult(
            finished=finished and closed,
            at=self._clock.now(),
            traces=traces,
            cloud=self._cloud,
            calls=self._crash_point.calls,
        )


async def _wish(control_plane: ControlPlane, job: JobRecord, item: UserIntervention) -> None:
    match item.action:
        case UserAction.STOP:
            await control_plane.jobs.stop(job.project, job.id)
        case UserAction.STOP_MACHINE:
            await control_plane.jobs.stop(job.project, job.id, release=True)
        case UserAction.RETRY:
            await control_plane.jobs.retry(job.project, job.id)
        case UserAction.RESIZE:
            await control_plane.jobs.resize(job.project, job.id, item.nodes)
        case UserAction.LOSE_NODE:
            notice = timedelta(seconds=item.notice_s)
            await control_plane.jobs.drill_preempt(job.project, job.id, notice, item.rank)
        case UserAction.DRILL:
            await control_plane.jobs.drill_preempt(
                job.project, job.id, timedelta(seconds=item.notice_s)
            )


async def _maintain(control_plane: ControlPlane, item: UserIntervention, now: datetime) -> None:
    within = timedelta(seconds=item.notice_s)
    match item.action:
        case UserAction.DRAIN:
            await control_plane.maintenance.cordon(item.node, within=within)
        case UserAction.CLOSE_GPU:
            await control_plane.maintenance.cordon(item.node, gpus=(0,))
        case UserAction.UNCORDON:
            await control_plane.maintenance.uncordon(item.node)
        case UserAction.RESERVE:
            ask = ReservationRequest(
                project=item.project,
                name="r",
                nodes=(item.node,),
                begins_at=now + within,
                length=timedelta(hours=1),
                moves=True,
            )
            with suppress(ReservationClash):  # an earlier request had its effect
                await control_plane.reservations.add(ask)


async def _no_secrets(project: str, names: Sequence[str]) -> dict[str, str]:
    return dict.fromkeys(names, "")


def _storage(job: JobRecord) -> str:
    return "/storage"
