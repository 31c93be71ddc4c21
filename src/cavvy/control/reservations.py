"""Reserves hosts and GPUs for projects, and lets work without a right to them leave in time.

Errors, which are subclasses of JobServiceError:

* ReservationRefused: the reservation is impossible as it was asked for
* ReservationClash: another reservation, or work that may run too long, is in the way
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.control.clock import ControlClock
from cavvy.control.decide.maintenance import find_end, make_work
from cavvy.control.job_service import JobServiceError
from cavvy.control.maintenance import MaintenanceService, NodeHolder
from cavvy.control.provider_pool import ProviderPool
from cavvy.control.worklist import QUEUE
from cavvy.domain.allocations import Host
from cavvy.domain.maintenance import Reservation, ReservedPart
from cavvy.domain.units import format_count
from cavvy.domain.values import Struct, replace
from cavvy.scheduler.maintenance import choose_parts, decide_drain, find_overlap, may_use
from cavvy.store.base import NameConflict, RowNotFound, StaleVersion
from cavvy.store.sql import Store

_PREFIX = "reservation:"
_LATE = timedelta(minutes=5)  # by which the begin may be past, as clocks differ and people are slow
_LONGEST = timedelta(days=366)  # of a reservation, and until its begin
_LOOK_AGAIN = timedelta(minutes=1)
_AT_ONCE = timedelta(0)
_USUAL = "default"  # the project of tasks that name none, which needs no row
_TOLD = 4  # jobs or projects that a message names


class ReservationRefused(JobServiceError):
    """Raised if the reservation is impossible as it was asked for."""


class ReservationClash(JobServiceError):
    """Raised if another reservation or running work is in the way."""


class ReservationRequest(Struct, frozen=True, kw_only=True):
    """What to reserve: the whole hosts `nodes`, or `gpus` of any hosts. Without `name`, the server
    chooses one. With `moves`, work that is in the way leaves before the begin.
    """

    project: str
    user: str = ""
    name: str = ""
    nodes: Sequence[str] = ()
    gpus: int = 0
    begins_at: datetime
    length: timedelta
    reason: str = ""
    made_by: str = ""
    moves: bool = False


def reservation_key(name: str) -> str:
    """Return the worklist's key of a reservation."""
    return f"{_PREFIX}{name}"


def is_reservation_key(key: str) -> bool:
    return key.startswith(_PREFIX)


class ReservationService:
    """Handles operators' requests about reservations, and keeps them. `hint` adds a key to the
    worklist."""

    def __init__(
        self,
        store: Store,
        pool: ProviderPool,
        clock: ControlClock,
        maintenance: MaintenanceService,
        hint: Callable[[str], None],
    ) -> None:
        self._store, self._pool, self._clock, self._maintenance = store, pool, clock, maintenance
        self._hint = hint

    async def list(self) -> Sequence[Reservation]:
        """Return the reservations that have not ended, those that begin first first."""
        found = await self._store.maintenance.reservations()
        now = self._clock.now()
        return sorted(
            (each for each in found if each.ends_at > now), key=lambda each: each.begins_at
        )

    async def remove(self, name: str) -> None:
        """Give the reserved parts back. Raises RowNotFound."""
        await self._store.maintenance.delete_reservation(name)
        self._hint(QUEUE)

    async def add(self, ask: ReservationRequest) -> Reservation:
        """Reserve hosts or GPUs. Raises ReservationRefused, ReservationClash, UnknownNode,
        ForeignNode.
        """
        now = self._clock.now()
        _check_times(ask, now)
        parents = (await self._store.policies()).parents
        projects = sorted({*parents, _USUAL})
        if ask.project not in projects:
            known = ", ".join(projects[:_TOLD]) + (", …" if len(projects) > _TOLD else "")
            raise ReservationRefused(
                f"there is no project {ask.project}", f"the projects are {known}"
            )
        begins_at = max(now, ask.begins_at)
        wanted = Reservation(
            name=ask.name,
            project=ask.project,
            user=ask.user,
            parts=(),
            begins_at=begins_at,
            ends_at=begins_at + ask.length,
            made_by=ask.made_by,
            reason=ask.reason,
        )
        others = [each for each in await self.list() if each.begins_at < wanted.ends_at]
        others = [each for each in others if each.ends_at > wanted.begins_at]
        wanted = replace(wanted, parts=await self._choose(ask, wanted, others, parents))
        for other in others:
            if host := find_overlap(wanted, other):
                raise ReservationClash(
                    f"{host} is {other.describe()} (reservation {other.name})",
                    f"choose another time or node; "
                    f"`cavvy nodes reservations rm {other.name}` gives it "
                    "back",
                )
        if not ask.moves:
            await self._check_free(wanted, parents)
        return await self._store_named(wanted)

    async def _store_named(self, wanted: Reservation) -> Reservation:
        taken = {each.name for each in await self._store.maintenance.reservations()}
        names = (f"{wanted.project}-{number}" for number in range(1, len(taken) + 2))
        name = wanted.name or next(each for each in names if each not in taken)
        try:
            stored = await self._store.maintenance.add_reservation(replace(wanted, name=name))
        except NameConflict as error:
            raise ReservationClash(str(error), "choose another --name") from error
        self._hint(reservation_key(stored.name))
        self._hint(QUEUE)
        return stored

    async def _choose(
        self,
        ask: ReservationRequest,
        wanted: Reservation,
        others: Sequence[Reservation],
        parents: Mapping[str, str | None],
    ) -> tuple[ReservedPart, ...]:
        if bool(ask.nodes) == bool(ask.gpus):
            raise ReservationRefused("expected nodes or a number of GPUs, and not both")
        if ask.nodes:
            found = [await self._maintenance.find(name) for name in ask.nodes]
            return tuple(ReservedPart(name) for name in dict.fromkeys(each.name for each in found))
        market = (await self._pool.market()).market
        hosts = [host for host in market.hosts if host.ready]
        total = sum(len(host.devices) for host in hosts)
        if not 0 < ask.gpus <= total:
            raise ReservationRefused(
                f"{format_count(ask.gpus, 'GPU')} cannot be reserved: the own hosts of this server "
                f"have {format_count(total, 'GPU')} that can be used",
                "`cavvy nodes hosts` lists them",
            )
        busy = await self._find_busy(hosts, wanted, parents)
        taken = [part for other in others for part in other.parts]
        parts = choose_parts(hosts, ask.gpus, taken, busy)
        if not parts:
            names = ", ".join(each.name for each in others)
            raise ReservationClash(
                f"fewer than {format_count(ask.gpus, 'GPU')} are left at this time, because of the "
                f"reservations {names}",
                "choose another time; `cavvy nodes reservations list` lists them",
            )
        return tuple(parts)

    async def _find_busy(
        self, hosts: Sequence[Host], wanted: Reservation, parents: Mapping[str, str | None]
    ) -> Collection[tuple[str, str]]:
        """Return the devices on which work without a right may still run at the begin."""
        holders = await self._maintenance.list_on([host.name for host in hosts])
        return {
            (each.allocation.host, device)
            for each in holders
            if _stays(each, wanted, parents)
            for device in each.allocation.devices
        }

    async def _check_free(self, wanted: Reservation, parents: Mapping[str, str | None]) -> None:
        holders = await self._maintenance.list_on({part.host for part in wanted.parts})
        staying = [
            each for each in holders if _touches(each, wanted) and _stays(each, wanted, parents)
        ]
        if not staying:
            return
        names = list(dict.fromkeys(each.job.name for each in staying))
        told = ", ".join(names[:_TOLD]) + (", …" if len(names) > _TOLD else "")
        raise ReservationClash(
            f"{format_count(len(names), 'job')} may still run there at the begin: {told}",
            "--drain lets them leave before the begin; other nodes, or a later begin, keep them",
        )

    # Keeping reservations

    async def unfinished(self) -> Sequence[str]:
        """Return the keys of all reservations."""
        found = await self._store.maintenance.reservations()
        return [reservation_key(each.name) for each in found]

    async def reconcile(self, key: str) -> timedelta | None:
        """Let work without a right leave before the begin, and delete a reservation that has
        ended."""
        name, now = key.removeprefix(_PREFIX), self._clock.now()
        stored = await self._store.maintenance.reservations()
        found = next((each for each in stored if each.name == name), None)
        if found is None:
            return None
        try:
            if found.ends_at <= now:
                await self.remove(name)
                return None
            return min(await self._clear(found, now), _LOOK_AGAIN, found.ends_at - now)
        except StaleVersion:
            return _AT_ONCE
        except RowNotFound:
            return None

    async def _clear(self, found: Reservation, now: datetime) -> timedelta:
        parents = (await self._store.policies()).parents
        holders = {
            each.attempt.gang: each
            for each in await self._maintenance.list_on({part.host for part in found.parts})
            if _touches(each, found)
            and not may_use(found, each.job.project, each.job.user, parents)
        }
        # The work may stay until the begin, so work that saves checkpoints does not leave earlier.
        work = [
            replace(make_work(each.attempt, each.job), saves=False) for each in holders.values()
        ]
        step = decide_drain(work, found.begins_at, now)
        if found.begins_at > now + _LOOK_AGAIN:
            step = replace(step, release=())
        own = [each for each in holders.values() if each.job.project == found.project]
        others = [each for each in holders.values() if each.job.project != found.project]
        for some, reader in ((own, found.project), (others, "")):
            why = f"its nodes are {found.describe(reader)}"
            after = await self._maintenance.leave(step, some, why, now)
        if now < found.begins_at:
            return min(after, found.begins_at - now)
        self._hint(QUEUE)
        return after if holders else _LOOK_AGAIN


def _check_times(ask: ReservationRequest, now: datetime) -> None:
    if ask.length <= timedelta(0) or ask.length > _LONGEST:
        raise ReservationRefused(
            f"the length of a reservation is more than 0 and at most {_LONGEST.days} days"
        )
    if ask.begins_at < now - _LATE:
        raise ReservationRefused(
            f"the reservation begins in the past, at {ask.begins_at:%Y-%m-%d %H:%M} UTC",
            f"now is {now:%Y-%m-%d %H:%M} UTC",
        )
    if ask.begins_at > now + _LONGEST:
        raise ReservationRefused(f"the reservation begins in more than {_LONGEST.days} days")


def _touches(holder: NodeHolder, reservation: Reservation) -> bool:
    """Return whether the holder uses what is reserved."""
    held = holder.allocation
    parts = (part for part in reservation.parts if part.host == held.host)
    return any(not part.devices or {*part.devices} & {*held.devices} for part in parts)


def _stays(holder: NodeHolder, wanted: Reservation, parents: Mapping[str, str | None]) -> bool:
    """Return whether the holder has no right to the reservation and may run when it begins."""
    if may_use(wanted, holder.job.project, holder.job.user, parents):
        return False
    until, _ = find_end(holder.attempt, holder.job)
    return until is None or until > wanted.begins_at
