"""Launches gangs on one Ray cluster, reads the state of these gangs, and removes gangs."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import Any

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, replace
from cavvy.providers.base import GangSeen, GangSpec, NoCapacity, NodeEndpoint, Refused
from cavvy.providers.batch.shapes import is_of, say_accelerators
from cavvy.providers.ledger import LaunchLedger
from cavvy.providers.project_caches import ProjectCaches
from cavvy.providers.ray import status
from cavvy.providers.ray.calls import DashboardRefused, Object, RayDashboard
from cavvy.providers.ray.cluster import RayNode, list_offers, promise, read_nodes
from cavvy.providers.ray.entry import RayOptions, job_name, make_job, make_plan
from cavvy.providers.ray.status import KEPT, RayGangRecord

_MISSED = timedelta(
    seconds=60
)  # a job counts as gone if Ray has not listed it for this long and no nodes are reserved for it
_LONELY = timedelta(minutes=10)  # a launch that Ray has not listed for this long counts as failed
_NO_WAY = (
    "nodes of Ray clusters call the server, but `server.tls_listen` is not set; see "
    "docs/guides/ray.md"
)


class RayTerms(Struct, frozen=True, kw_only=True):
    """The values that all Ray clusters of this installation share."""

    mark: str  # the installation's mark
    options: RayOptions
    node_endpoint: NodeEndpoint | None
    caches: ProjectCaches
    now: Callable[[], datetime]


class RayCluster:
    """One cluster. Methods raise the same errors as the methods of `Provider`."""

    def __init__(
        self, api: RayDashboard, ledger: LaunchLedger[RayGangRecord], terms: RayTerms
    ) -> None:
        self.api, self._ledger, self._terms = api, ledger, terms
        self.name = api.address.name
        # gang -> the time since which Ray has not listed its job
        self._missed: dict[str, datetime] = {}
        # gang -> when its job was first found ended without a readable log
        self._mute: dict[str, datetime] = {}

    def _records(self) -> list[RayGangRecord]:
        return [each for each in self._ledger.records.values() if each.cluster == self.name]

    async def nodes(self) -> Sequence[RayNode]:
        """Return the nodes, without the resources that are reserved for gangs still waiting for
        placement.
        """
        async with self._sorted():
            nodes, usage, groups = await asyncio.gather(
                self.api.nodes(), self.api.usage(), self.api.groups()
            )
        found = read_nodes(nodes, usage, groups)
        there = {str(group.get("name")) for group in groups if group.get("state") == "CREATED"}
        for record in self._records():
            if record.offer is None or record.ended_at or record.placed or not record.launched:
                continue
            if job_name(self._terms.mark, record.name) not in there:
                found = promise(found, record.offer, record.nodes)
        return found

    async def offers(
        self, gpu_rate: Callable[[str], HourlyRate], node_rate: HourlyRate
    ) -> Sequence[Offer]:
        waits = self._terms.options.wait
        return list_offers(
            await self.nodes(),
            region=self.name,
            gpu_rate=gpu_rate,
            node_rate=node_rate,
            waits=waits,
        )

    # Launching

    async def launch(self, gang: GangSpec) -> None:
        """Launch the gang; see `Provider.launch`. The caller must hold the gang's lock."""
        node_endpoint = self._terms.node_endpoint
        if node_endpoint is None:
            raise Refused(_NO_WAY)
        record = self._ledger.get(gang.name)
        if record is not None and (
            record.launched or record.removed or record.ended_at is not None
        ):
            return
        async with self._sorted():
            job = await self.api.job(job_name(self._terms.mark, gang.name))
            if job is not None:  # an earlier request succeeded, but its reply was lost
                await self._ledger.put(
                    replace(
                        record or status.recall(job, self.name, self._terms.now()),
                        launched=True,
                        offer=gang.offer,
                    )
                )
                return
            nodes = await self.nodes()
            node = self._choose(gang, nodes)
            session = str((await self.api.version()).get("session_name", ""))
            record = record or RayGangRecord(
                name=gang.name,
                cluster=self.name,
                nodes=gang.nodes,
                intended_at=self._terms.now(),
                offer=gang.offer,
                session=session,
            )
            await self._ledger.put(record)
            await self._submit(
                gang, node, node_endpoint, mixed=len({each.spot for each in nodes}) > 1
            )
        await self._ledger.put(replace(self._ledger.get(gang.name) or record, launched=True))

    async def _submit(
        self, gang: GangSpec, node: RayNode, node_endpoint: NodeEndpoint, *, mixed: bool
    ) -> None:
        terms = self._terms
        cache = await terms.caches.name(gang)

        def make() -> Mapping[str, Any]:
            plan = make_plan(
                gang, terms.mark, node, node_endpoint, terms.options, cache=cache, mixed=mixed
            )
            return make_job(gang, terms.mark, plan, node_endpoint, terms.options.python)

        job = await asyncio.to_thread(make)
        try:
            await self.api.submit(dict(job))
        except DashboardRefused as error:
            if error.status < 500:  # nothing was started
                await self._ledger.drop(gang.name)
            raise

    def _choose(self, gang: GangSpec, nodes: Sequence[RayNode]) -> RayNode:
        """Return one of the offer's nodes. Raises NoCapacity if the gang does not fit on the
        offer's nodes now.
        """
        alike = [node for node in nodes if is_of(node.shape, gang.offer, spot=node.spot)]
        if not alike:
            raise NoCapacity(
                f"{gang.offer.key}: the cluster {self.name} no longer has nodes of this kind"
            )
        if not self._terms.options.wait:
            rooms = [node.fits(gang.offer) for node in alike]
            room = sum(map(bool, rooms)) if self._terms.options.spread else sum(rooms)
            if room < gang.nodes:
                raise NoCapacity(f"{gang.offer.key}: only {room} of {gang.nodes} nodes fit now")
        return alike[0]

    # Polling

    async def gangs(self, name: str | None) -> Sequence[GangSeen]:
        async with self._sorted():
            jobs = {
                gang: job
                for job in await self._jobs(name)
                if (gang := status.gang_of(job, self._terms.mark))
            }
            names = {
                *jobs,
                *(record.name for record in self._records() if name in (None, record.name)),
            }
            found = await asyncio.gather(
                *(self._see(each, jobs.get(each)) for each in sorted(names))
            )
        return [seen for seen in found if seen is not None]

    async def _jobs(self, name: str | None) -> Sequence[Object]:
        if name is None:
            return await self.api.jobs()
        job = await self.api.job(job_name(self._terms.mark, name))
        return [job] if job is not None else []

    async def _see(self, name: str, job: Object | None) -> GangSeen | None:
        record = self._ledger.get(name)
        if record is not None and record.ended_at is not None:
            if self._terms.now() - record.ended_at >= KEPT:
                await self._forget(record, job)
                return None
            return status.as_seen(record)
        if job is None:
            return await self._see_missing(record) if record is not None else None
        self._missed.pop(name, None)
        record = record or status.recall(job, self.name, self._terms.now())
        if record.removed and not status.is_over(job):
            await self.api.stop(
                str(job["submission_id"])
            )  # the job was submitted after the removal
        told = await self._read_output(name, job)
        if told is None:
            # report no end yet, because only the log shows how the gang ended and which times are
            # billed
            return status.as_seen(record)
        latest = self._ledger.get(name)  # another call may have changed the record
        # the stored record is newer than this call's data
        if latest is not None and latest.ended_at is not None:
            return status.as_seen(latest)
        record = replace(record, removed=record.removed or bool(latest and latest.removed))
        record = status.judge(record, job, told, self._terms.now())
        await self._ledger.put(record)
        return status.as_seen(record, status.explain_wait(job, told))

    async def _read_output(self, name: str, job: Object) -> status.DriverOutput | None:
        """Read the driver's messages. Return None if the log of an ended job cannot be read. After
        a minute in which the log could not be read, return an output without messages.
        """
        begun = job.get("status") not in ("PENDING", None)
        log = await self.api.log(str(job["submission_id"])) if begun else ""
        if (
            log is None
            and status.is_over(job)
            and self._terms.now() - self._mute_since(name) < _MISSED
        ):
            return None
        self._mute.pop(name, None)
        return status.read_log(log or "")

    def _mute_since(self, name: str) -> datetime:
        return self._mute.setdefault(name, self._terms.now())

    async def _see_missing(self, record: RayGangRecord) -> GangSeen | None:
        """Derive the state of a gang whose job is not listed. The gang counts as ended only if the
        head node has a new session, or if no nodes are reserved for the gang.
        """
        now = self._terms.now()
        if not record.launched:
            if now - record.intended_at >= _LONELY and not self._ledger.lock(record.name).locked():
                await self._ledger.drop(record.name)
            return None
        since = self._missed.setdefault(record.name, now)
        session = str((await self.api.version()).get("session_name", ""))
        if record.session and session and session != record.session:
            why = "the Ray cluster's head node was restarted"
        elif now - since >= _MISSED and not await self._allocations(record.name):
            why = "Ray no longer lists the gang's job, and no nodes are reserved for it"
        else:
            return status.as_seen(record)
        self._missed.pop(record.name, None)
        latest = self._ledger.get(record.name)  # another call may have changed the record
        if latest is None or latest.ended_at is not None:
            return status.as_seen(latest) if latest is not None else None
        record = status.end(latest, since, "removed" if latest.removed else why, True)
        await self._ledger.put(record)
        return status.as_seen(record)

    async def _allocations(self, name: str) -> bool:
        groups = await self.api.groups()
        ours = job_name(self._terms.mark, name)
        return any(
            group.get("name") == ours and group.get("state") != "REMOVED" for group in groups
        )

    async def _forget(self, record: RayGangRecord, job: Object | None) -> None:
        if job is not None:
            with suppress(DashboardRefused):
                await self.api.forget(str(job["submission_id"]))
        await self._ledger.drop(record.name)

    # Removing

    async def remove(self, name: str) -> bool:
        """Remove the gang. Return True if the gang is or was in this cluster. The caller must hold
        the gang's lock."""
        async with self._sorted():
            record = self._ledger.get(name)
            if record is not None and (record.ended_at is not None or record.cluster != self.name):
                return record.cluster == self.name
            job = await self.api.job(job_name(self._terms.mark, name))
            if record is None and job is None:
                return False
            record = record or status.recall(job or {}, self.name, self._terms.now())
            await self._ledger.put(replace(record, removed=True))
            # If there is no job, the launch failed, or its request is still in transit.
            if job is not None and not status.is_over(job):
                await self.api.stop(str(job["submission_id"]))
            return True

    # `cavvy check`

    async def whoami(self) -> Sequence[tuple[str, str]]:
        async with self._sorted():
            version, nodes, raw = await asyncio.gather(
                self.api.version(), self.nodes(), self.api.nodes()
            )
        alive = [node for node in raw if node.get("state") == "ALIVE"]
        gpus = [(node.shape.gpu or "gpu", node.shape.gpus, int(node.gpus)) for node in nodes]
        cpus = (
            f"{sum(node.cpus for node in nodes):g} of {sum(node.shape.cpus for node in nodes)} free"
        )
        return [
            (
                "cluster",
                f"{self.name}, {self.api.address.url}, Ray {version.get('ray_version', '?')}",
            ),
            ("nodes", f"{len(nodes)} of {len(alive)} running nodes usable"),
            ("CPUs", cpus),
            ("accelerators", say_accelerators(gpus)),
            (
                "nodes call",
                self._terms.node_endpoint.address
                if self._terms.node_endpoint is not None
                else f"nothing: {_NO_WAY}",
            ),
        ]

    @asynccontextmanager
    async def _sorted(self) -> AsyncIterator[None]:
        """Convert the dashboard's errors to provider errors."""
        try:
            yield
        except DashboardRefused as error:
            raise error.sorted(self.name) from error


def why_not(node_endpoint: NodeEndpoint | None) -> Sequence[Objection]:
    """If nodes cannot connect to the server, return objections that apply to every task; otherwise,
    return [].
    """
    return [] if node_endpoint is not None else [Objection("providers", _NO_WAY)]
