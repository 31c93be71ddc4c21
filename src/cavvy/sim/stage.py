"""Plays a story: the production control plane, a made-up cloud and a clock that jumps."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from random import Random

from cavvy.control.clock import VirtualClock, run_virtual
from cavvy.control.desk import DeskError, JobIds
from cavvy.control.plant import Plant, Surroundings
from cavvy.domain.jobs import JOB_ENDS, AttemptPhase, Job, Origin
from cavvy.domain.units import Money
from cavvy.providers.base import Carrier
from cavvy.providers.fake import MANIFEST
from cavvy.providers.fake.cloud import FakeCloud
from cavvy.sim.shaky import Fuse, ShakyProvider, ShakyStore
from cavvy.sim.story import Ending, Intervention, Story, Submission, Tale, Wish
from cavvy.store.base import StoreError
from cavvy.store.memory import MemoryStore

START = datetime(2030, 1, 1, tzinfo=UTC)
_LOOK = timedelta(minutes=1)  # how often the stage looks whether the story is over


def play(story: Story) -> Ending:
    """Play a story from its start to its end, on virtual time."""
    return run_virtual(_Stage(story).play())


class _Stage:
    def __init__(self, story: Story) -> None:
        self._story = story
        self._clock = VirtualClock(START)
        self._ids: list[str | None] = [None] * len(story.submissions)
        self._plant: Plant | None = None

    async def play(self) -> Ending:
        story = self._story
        self._cloud = FakeCloud(MANIFEST, story.script, self._clock.now)
        self._memory = MemoryStore(make_id=lambda: "sim")
        self._fuse = Fuse(story.crashes)
        self._store = ShakyStore(self._memory, self._fuse, story.stale, story.store_s, story.broken)
        self._job_ids = JobIds(self._clock, Random(0).getrandbits)
        await self._open()
        hands = [
            asyncio.create_task(self._submit(i, item)) for i, item in enumerate(story.submissions)
        ]
        hands += [asyncio.create_task(self._intervene(item)) for item in story.interventions]
        keeper = asyncio.create_task(self._keep_alive())
        finished = await self._wait_for_the_end(hands)
        for task in (keeper, *hands):
            task.cancel()
        outcomes = await asyncio.gather(keeper, *hands, return_exceptions=True)
        if self._plant is not None:
            await self._plant.stop()
        await self._cloud.close()
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return await self._ending(finished)

    async def _open(self) -> None:
        """Start a server on what the last one left in the store."""
        self._plant = Plant(
            self._store.as_store(),
            {"fake": ShakyProvider(self._cloud, self._fuse)},
            self._clock,
            installation="sim",
            surroundings=Surroundings(
                carrier=lambda gang: Carrier(address="call", token=gang),
                open_secrets=_no_secrets,
                storage=_storage,
                egress=self._egress,
            ),
            ids=self._job_ids,
        )
        await self._plant.start()

    async def _egress(self) -> Mapping[str, Money]:
        return self._story.egress

    async def _keep_alive(self) -> None:
        while True:
            crash = await self._fuse.blown.get()
            if self._plant is not None:
                await self._plant.stop()
            self._plant = None
            await self._clock.sleep_until(self._clock.now() + timedelta(seconds=crash.down_s))
            await self._open()

    async def _wait_for_the_end(self, hands: Sequence[asyncio.Task[None]]) -> bool:
        while self._clock.now() < START + self._story.longest:
            await self._clock.sleep_until(self._clock.now() + _LOOK)
            if all(hand.done() for hand in hands) and not await self._memory.unfinished():
                return True
        return False

    async def _submit(self, index: int, item: Submission) -> None:
        await self._clock.sleep_until(START + timedelta(seconds=item.at_s))
        plant = await self._server()
        job = await plant.jobs.submit(
            item.task, Origin(), item.task.project, consented=item.consented, ceiling=item.ceiling
        )
        self._ids[index] = job.id

    async def _intervene(self, item: Intervention) -> None:
        await self._clock.sleep_until(START + timedelta(seconds=item.at_s))
        plant = await self._server()
        job_id = self._ids[item.job]
        if job_id is None:
            return
        job = await self._memory.job(job_id)
        try:
            async with asyncio.timeout(60):  # a user whose server dies in the middle walks away
                await _wish(plant, job, item)
        except (DeskError, StoreError, TimeoutError):
            return

    async def _server(self) -> Plant:
        while self._plant is None:
            await self._clock.sleep_until(self._clock.now() + timedelta(seconds=1))
        return self._plant

    async def _ending(self, finished: bool) -> Ending:
        tales = []
        for job_id in self._ids:
            if job_id is not None:
                attempts = await self._memory.attempts(job_id)
                tales.append(
                    Tale(
                        job=await self._memory.job(job_id),
                        attempts=attempts,
                        nodes=[await self._memory.nodes(attempt.id) for attempt in attempts],
                        events=await self._memory.events(job_id),
                        charges=await self._memory.charges(job_id),
                        sights=await self._memory.observations(
                            {each.offer.key for each in attempts}, START
                        ),
                    )
                )
        closed = all(
            tale.job.phase in JOB_ENDS and all(a.phase is AttemptPhase.ENDED for a in tale.attempts)
            for tale in tales
        )
        return Ending(
            finished=finished and closed,
            at=self._clock.now(),
            tales=tales,
            cloud=self._cloud,
            calls=self._fuse.calls,
        )


async def _wish(plant: Plant, job: Job, item: Intervention) -> None:
    match item.wish:
        case Wish.STOP:
            await plant.jobs.stop(job.project, job.id)
        case Wish.RETRY:
            await plant.jobs.retry(job.project, job.id)
        case Wish.DRILL:
            await plant.jobs.drill_preempt(job.project, job.id, timedelta(seconds=item.notice_s))


async def _no_secrets(project: str, names: Sequence[str]) -> dict[str, str]:
    return dict.fromkeys(names, "")


def _storage(job: Job) -> str:
    return "/storage"
