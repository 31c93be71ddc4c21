"""Gangs as batch jobs: noted before they are submitted, found again by name, remembered when
they are over.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cavvy.providers.base import (
    GangSeen,
    GangSpec,
    GangState,
    ProviderContext,
    ProviderError,
    Refused,
    TryAgain,
)
from cavvy.providers.batch import sight
from cavvy.providers.batch.carry import carry_mail
from cavvy.providers.batch.ground import Began, Ended, Ground, Record, as_seen, list_nodes
from cavvy.providers.batch.rows import JobRow, Phase, Queue, Unsure
from cavvy.providers.batch.seat import Seat

_DELIVERY_S = 45.0  # an agent that only delivers waits 15 s for a lock and tries for 20 s
_SUBMISSION = timedelta(
    seconds=60
)  # a submission whose answer was lost has arrived by then, or never will


@dataclass(frozen=True, slots=True, kw_only=True)
class Taking:
    """How a batch system takes its nodes back: the time after SIGTERM, and between its warning
    and its limit.
    """

    source: str
    seconds: float
    warning_s: float


Submit = Callable[[Ground, str], Awaitable[str]]  # with the folder of what nodes run; the job's id


class Gangs:
    """One installation's gangs in one batch system."""

    def __init__(self, seat: Seat, queue: Queue, context: ProviderContext) -> None:
        self._seat = seat
        self._queue = queue
        self._context = context
        self._ground: Ground | None = None
        self._ended: dict[str, Ended] | None = None
        self._launching: dict[str, asyncio.Lock] = {}
        self._looking = asyncio.Lock()
        self._looks = 0
        self._last: tuple[int, dict[str, GangSeen]] = (0, {})
        self._couriers: dict[str, asyncio.Task[None]] = {}

    async def launch(self, gang: GangSpec, taking: Taking, submit: Submit) -> None:
        """As Provider.launch. `submit` is called at most once, after the gang was noted."""
        async with self._launching.setdefault(gang.name, asyncio.Lock()):
            try:
                await self._launch(gang, taking, submit)
            finally:
                self._launching.pop(gang.name, None)

    async def knows_end(self, name: str) -> bool:
        """Whether the gang is over already."""
        return name in await self._remembered(await self._grounded())

    async def gangs(self, name: str | None) -> Sequence[GangSeen]:
        """As Provider.gangs; those who ask while a look is under way share the next."""
        asked = self._looks
        async with self._looking:
            if self._last[0] <= asked:  # the last look began before this question
                self._looks += 1
                self._last = (self._looks, await self._look())
            found = self._last[1]
        if name is not None and name not in found:  # another server may have seen its end
            self._ended = None
            ended = (await self._remembered(await self._grounded())).get(name)
            return [as_seen(ended)] if ended is not None else []
        return [seen for seen in found.values() if name in (None, seen.name)]

    async def remove(self, name: str) -> None:
        """As Provider.remove."""
        ground = await self._grounded()
        if name in await self._remembered(ground):
            return
        if await ground.record(name) is not None:
            await ground.note_removal(name)
        rows = [row for row in await self._jobs(ground) if row.name == name]
        await self._queue.cancel([row.id for row in rows if row.phase is not Phase.OVER])

    async def carry(self) -> None:
        """As Carries.carry."""
        ground = await self._grounded()
        await carry_mail(self._seat, ground.mail, self._context.server_address)

    async def close(self) -> None:
        """Let go of what is under way; whoever comes next begins it again."""
        for courier in self._couriers.values():
            courier.cancel()
        if self._couriers:
            await asyncio.wait(self._couriers.values())

    async def _launch(self, gang: GangSpec, taking: Taking, submit: Submit) -> None:
        ground = await self._grounded()
        if self._context.agent_archive is None:
            raise Refused("no agent can be started here: the server did not say how")
        agent = await ground.place_agent(self._context.agent_archive())
        now = self._context.now()
        fresh = await ground.note_intent(gang, now, taking.seconds, taking.warning_s, taking.source)
        if not fresh and await self._was_submitted(ground, gang.name, now):
            return
        try:
            job = await submit(ground, agent)
        except Unsure:
            raise
        except ProviderError:
            await ground.forget(gang.name, gang.nodes)
            raise
        await ground.note_job(gang.name, job)

    async def _was_submitted(self, ground: Ground, name: str, now: datetime) -> bool:
        """Whether a gang that was noted has its job, or needs none any more. Raises TryAgain
        while nobody can know.
        """
        record = await ground.record(name)
        if (
            record is None or record.job or record.removing
        ):  # without a record it has ended meanwhile
            return True
        found = [row for row in await self._jobs(ground) if row.name == name]
        if found:
            await ground.note_job(name, found[0].id)
            return True
        if record.intent is not None and now - record.intent.asked_at < _SUBMISSION:
            raise TryAgain(f"{name}: an earlier submission may still be under way")
        return False

    async def _look(self) -> dict[str, GangSeen]:
        ground = await self._grounded()
        ended = await self._remembered(ground)
        records = (
            await ground.records()
        )  # before the jobs: what is noted here is in the queue by then, or over
        rows: dict[str, JobRow] = {}
        for row in await self._jobs(ground):
            if row.name not in rows or rows[row.name].phase is Phase.OVER:
                rows[row.name] = row
        found = {name: as_seen(each) for name, each in ended.items()}
        for name in {*rows, *records} - set(ended):
            seen = await self._see(ground, rows.get(name), records.get(name))
            if seen is not None:
                found[name] = seen
        return found

    async def _see(
        self, ground: Ground, row: JobRow | None, record: Record | None
    ) -> GangSeen | None:
        if row is None:
            assert record is not None
            if not record.job and not record.removing:
                # noted, and never submitted as far as anybody knows: a launch will find out
                return None
            if record.job and not await self._has_delivered(ground, record):
                return _delivering(record, record.job, record.seen)
            return as_seen(await self._close_forgotten(ground, record))
        if row.phase is Phase.OVER:
            if record is None:
                return None  # nobody can have waited for it since the folder was lost
            if not await self._has_delivered(ground, record):
                return _delivering(record, row.id, sight.began_of(row, record))
            return as_seen(await self._close(ground, row, record))
        seen = sight.see(row, record)
        began = sight.began_of(row, record)
        if record is not None and record.seen is None and began is not None:
            await ground.note_seen(row.name, began)
        return seen

    async def _has_delivered(self, ground: Ground, record: Record) -> bool:
        """Whether nothing is left of what killed agents had to say; has it delivered from the
        login node.
        """
        if record.removing or record.refusal or record.end.startswith("0 "):
            return True
        if record.name not in self._couriers:
            begun = await ground.begun_ranks(record.name, _count(record))
            if not begun or self._context.agent_archive is None:
                return True
            agent = await ground.place_agent(self._context.agent_archive())
            self._couriers[record.name] = asyncio.create_task(
                self._deliver(ground, record, agent, begun)
            )
        return self._couriers[record.name].done()

    async def _deliver(
        self, ground: Ground, record: Record, agent: str, begun: Sequence[int]
    ) -> None:
        with suppress(ProviderError):  # what cannot be delivered is lost, as it is elsewhere
            python = str(self._context.settings.get("python", "python3"))
            command = [python, "-I", "-S", f"{agent}/agent/__main__.py", "--deliver"]
            homes = [f"{ground.gang(record.name)}/{rank}" for rank in begun]
            runs = (
                self._seat.run([*command, f"{home}/config.json"], timeout_s=_DELIVERY_S)
                for home in homes
            )
            await asyncio.gather(*runs)

    async def _close(self, ground: Ground, row: JobRow, record: Record) -> Ended:
        now, nodes = self._context.now(), _count(record)
        exits = await ground.exits(row.name, nodes)
        words = await ground.last_words(row.name) if row.broke else ""
        over = sight.judge(row, record, words, now)
        return await self._remember(ground, sight.close(record, row.id, over, exits, now), nodes)

    async def _close_forgotten(self, ground: Ground, record: Record) -> Ended:
        """Batch systems forget ended jobs after minutes; their accounting, or the job's own
        record, knows more.
        """
        accounted = await self._queue.accounted(record.job) if record.job else None
        if accounted is not None and accounted.phase is Phase.OVER:
            return await self._close(ground, accounted, record)
        now, nodes = self._context.now(), _count(record)
        exits = await ground.exits(record.name, nodes)
        ended_at = min(_epoch(record.end, 1) or now, now)
        over = sight.judge_forgotten(record, exits, _epoch(record.begun, 0), ended_at)
        return await self._remember(
            ground, sight.close(record, record.job, over, exits, now), nodes
        )

    async def _remember(self, ground: Ground, ended: Ended, nodes: int) -> Ended:
        await ground.close(ended, nodes)
        (await self._remembered(ground))[ended.name] = ended
        self._couriers.pop(ended.name, None)
        return ended

    async def _remembered(self, ground: Ground) -> dict[str, Ended]:
        if self._ended is None:
            self._ended = await ground.remembered(self._context.now())
        return self._ended

    async def _jobs(self, ground: Ground) -> Sequence[JobRow]:
        return await self._queue.jobs((await self._seat.hello()).uid, mark_of(ground))

    async def _grounded(self) -> Ground:
        if self._ground is None:
            self._ground = Ground(
                self._seat, self._context.installation, (await self._seat.hello()).folder
            )
        return self._ground


def mark_of(ground: Ground) -> str:
    """What all jobs of this installation carry, and no others."""
    return f"cavvy:{ground.mark}"


def _delivering(record: Record, job: str, began: Began | None) -> GangSeen:
    """A gang whose job is over while its last words are on their way: its end is told when they
    have arrived.
    """
    reason = "its last words are being delivered"
    nodes = list_nodes(job, began)
    return GangSeen(
        name=record.name, state=GangState.RUNNING, engine_id=job, reason=reason, nodes=nodes
    )


def _count(record: Record) -> int:
    return record.intent.nodes if record.intent is not None else 1


def _epoch(text: str, at: int) -> datetime | None:
    """A time among the words of a record."""
    words = text.split()
    return (
        datetime.fromtimestamp(int(words[at]), UTC)
        if len(words) > at and words[at].isdigit()
        else None
    )
