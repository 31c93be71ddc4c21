"""Slurm as a provider: gangs are batch jobs, found again by their name and our comment."""

import asyncio
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from remuda.domain.offers import Offer
from remuda.domain.tasks import Task
from remuda.domain.units import HourlyRate, parse_rate
from remuda.providers.base import (
    Feature,
    GangSeen,
    GangSpec,
    Manifest,
    NoCapacity,
    ProviderContext,
    ProviderError,
    Refused,
    TryAgain,
)
from remuda.providers.batch.carry import carry_mail
from remuda.providers.batch.ground import Ended, Ground, Record, as_seen
from remuda.providers.batch.seat import Hello, Seat, Where
from remuda.providers.slurm import sight
from remuda.providers.slurm.cluster import Cluster, Prices, count_room, list_offers, read_cluster
from remuda.providers.slurm.commands import TOOLS, JobRow, Slurm, Unsure
from remuda.providers.slurm.manifest import LACKS
from remuda.providers.slurm.script import Wishes, make_options, make_script

_SUBMISSION = timedelta(seconds=60)  # a submission whose answer was lost has arrived by then, or never will
_CLUSTER_AGE = timedelta(minutes=10)  # of partitions, for launches; offers read them anew


class SlurmProvider:
    """Implements Provider, ChecksTasks, Introduces, Carries and Closes."""

    def __init__(self, manifest: Manifest, context: ProviderContext) -> None:
        self.manifest = manifest
        self._context = context
        self._settings = context.settings
        self.seat = Seat(
            Where(
                host=self._text("host"),
                ssh_options=shlex.split(self._text("ssh_options")),
                python=self._text("python") or "python3",
                folder=self._text("folder") or "~/.remuda-cluster",
                tools=TOOLS,
            )
        )
        self.slurm = Slurm(self.seat)
        self._ground: Ground | None = None
        self._cluster: tuple[datetime, Cluster] | None = None
        self._ended: dict[str, Ended] | None = None
        self._launching: dict[str, asyncio.Lock] = {}
        self._looking = asyncio.Lock()
        self._looks = 0
        self._last: tuple[int, dict[str, GangSeen]] = (0, {})

    async def offers(self) -> Sequence[Offer]:
        prices = Prices(gpu=self._rate("price_usd_gpu_hr"), node=self._rate("price_usd_node_hr"))
        return list_offers(await self._read_cluster(), prices, queue=bool(self._settings.get("queue", True)))

    async def launch(self, gang: GangSpec) -> None:
        async with self._launching.setdefault(gang.name, asyncio.Lock()):
            try:
                await self._launch(gang)
            finally:
                self._launching.pop(gang.name, None)

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        asked = self._looks
        async with self._looking:
            if self._last[0] <= asked:  # the last look began before this question
                self._looks += 1
                self._last = (self._looks, await self._look())
            found = self._last[1]
        return [seen for seen in found.values() if name in (None, seen.name)]

    async def remove(self, name: str) -> None:
        ground = await self._grounded()
        if name in await self._remembered(ground):
            return
        record = await ground.record(name)
        if record is not None:
            await ground.note_removal(name)
        rows = [row for row in await self._jobs(ground) if row.name == name]
        await self.slurm.cancel([row.id for row in rows if not sight.is_over(row)])

    async def carry(self) -> None:
        ground = await self._grounded()
        await carry_mail(self.seat, ground.mail, self._context.server_address)

    def check(self, task: Task) -> Sequence[str]:
        need = task.resources
        reasons = []
        if task.image is not None:
            reasons.append(f"image: {LACKS[Feature.IMAGE]}")
        if need.disk_type is not None:
            reasons.append(f"resources.disk.type: {LACKS[Feature.DISK]}")
        if need.network is not None and need.network.min_mbps is not None:
            reasons.append(f"resources.network: {LACKS[Feature.NETWORK]}")
        return reasons

    async def introduce(self) -> Sequence[tuple[str, str]]:
        hello, cluster = await self.seat.hello(), await self._read_cluster()
        user = (await self.seat.run(["id", "-un"])).out.strip()
        up = [node for node in cluster.nodes if node.up]
        gpus: dict[str, int] = {}
        for node in up:
            if node.shape.gpus:
                gpus[node.shape.gres or "gpu"] = gpus.get(node.shape.gres or "gpu", 0) + node.shape.gpus
        accounting = "sacctmgr" in hello.tools
        limits = await self.slurm.limits(user) if accounting else ()
        return [
            ("cluster", f"{cluster.name}, Slurm {cluster.version}"),
            ("login node", hello.host),
            ("user", user),
            ("partitions", ", ".join(each.name + (" (spot)" if each.taken else "") for each in cluster.partitions)),
            ("nodes", f"{len(up)} of {len(cluster.nodes)} up"),
            ("GPUs", ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "none"),
            ("shared folder", hello.folder),
            ("Python of the login node", hello.python),
            ("limits", "known to the cluster's accounting" if limits else "the cluster keeps no accounting"),
            *limits,
        ]

    async def close(self) -> None:
        await self.seat.close()

    # Launching

    async def _launch(self, gang: GangSpec) -> None:
        ground = await self._grounded()
        if gang.name in await self._remembered(ground):
            return
        cluster = await self._known_cluster()
        partition = cluster.partition(gang.offer.zone)
        if gang.offer.provider != self.manifest.name or gang.offer.region != cluster.name or partition is None:
            raise NoCapacity(f"{gang.offer.key}: not an offer of the cluster {cluster.name} now")
        if count_room(cluster, gang.offer) < gang.nodes:  # Slurm itself might let it wait for ever
            raise NoCapacity(f"{gang.offer.key}: partition {partition.name} has fewer than {gang.nodes} such nodes")
        if self._context.agent_archive is None:
            raise Refused("no agent can be started here: the server did not say how")
        agent = await ground.place_agent(self._context.agent_archive())
        wishes = self._wishes()
        taken_s = max(partition.grace, cluster.kill_wait).total_seconds()
        now = self._context.now()
        fresh = await ground.note_intent(gang, now, taken_s, wishes.warning_s, "Slurm")
        if not fresh and await self._was_submitted(ground, gang.name, now):
            return
        folder = ground.gang(gang.name)
        options = make_options(gang, partition, _comment(ground), folder, wishes)
        try:
            job = await self.slurm.submit(options, make_script(gang, agent, folder, wishes.python))
        except Unsure:
            raise
        except ProviderError:
            await ground.forget(gang.name, gang.nodes)
            raise
        await ground.note_job(gang.name, job)

    async def _was_submitted(self, ground: Ground, name: str, now: datetime) -> bool:
        """Whether a gang that was noted has its job, or needs none any more. Raises TryAgain while nobody can know."""
        record = await ground.record(name)
        if record is None or record.job or record.removing:  # without a record it has ended meanwhile
            return True
        found = [row for row in await self._jobs(ground) if row.name == name]
        if found:
            await ground.note_job(name, found[0].id)
            return True
        if record.intent is not None and now - record.intent.asked_at < _SUBMISSION:
            raise TryAgain(f"{name}: an earlier submission may still be under way")
        return False

    def _wishes(self) -> Wishes:
        return Wishes(
            account=self._text("account"),
            qos=self._text("qos"),
            options=shlex.split(self._text("sbatch_options")),
            python=self._text("python") or "python3",
            warning_s=int(self._settings.get("warning_s", 60)),
        )

    # Looking

    async def _look(self) -> dict[str, GangSeen]:
        ground = await self._grounded()
        ended = await self._remembered(ground)
        records = await ground.records()  # before the jobs: what is noted here is in Slurm by then, or over
        rows: dict[str, JobRow] = {}
        for row in await self._jobs(ground):
            if row.name not in rows or sight.is_over(rows[row.name]):
                rows[row.name] = row
        found = {name: as_seen(each) for name, each in ended.items()}
        for name in {*rows, *records} - set(ended):
            seen = await self._see(ground, rows.get(name), records.get(name))
            if seen is not None:
                found[name] = seen
        return found

    async def _see(self, ground: Ground, row: JobRow | None, record: Record | None) -> GangSeen | None:
        if row is None:
            assert record is not None
            if not record.job and not record.removing:
                return None  # noted, and never submitted as far as anybody knows: a launch will find out
            return as_seen(await self._close_forgotten(ground, record))
        if sight.is_over(row):  # without a record nobody can have waited for it since the folder was lost
            return as_seen(await self._close(ground, row, record)) if record is not None else None
        seen = sight.see(row, record)
        began = sight.began_of(row, record)
        if record is not None and record.seen is None and began is not None:
            await ground.note_seen(row.name, began)
        return seen

    async def _close(self, ground: Ground, row: JobRow, record: Record) -> Ended:
        nodes = _count(record)
        exits = await ground.exits(row.name, nodes)
        over = sight.judge(row, record, exits, self._context.now())
        if row.state == "FAILED" and not record.refusal and (words := await ground.last_words(row.name)):
            over = sight.Over(
                reason=f"{over.reason}: {words}", preempted=False, began=over.began, ended_at=over.ended_at
            )
        return await self._remember(ground, sight.close(record, row.id, over, exits, self._context.now()), nodes)

    async def _close_forgotten(self, ground: Ground, record: Record) -> Ended:
        """Slurm forgets ended jobs after minutes (MinJobAge); its accounting, or the job's own record, knows more."""
        accounted = None
        if record.job and "sacct" in (await self.seat.hello()).tools:
            accounted = await self.slurm.accounted(record.job)
        if accounted is not None and sight.is_over(accounted):
            return await self._close(ground, accounted, record)
        now, nodes = self._context.now(), _count(record)
        exits = await ground.exits(record.name, nodes)
        begun, end = _epoch(record.begun, 0), _epoch(record.end, 1)
        over = sight.judge_forgotten(record, exits, (begun, min(end or now, now)))
        return await self._remember(ground, sight.close(record, record.job, over, exits, now), nodes)

    async def _remember(self, ground: Ground, ended: Ended, nodes: int) -> Ended:
        await ground.close(ended, nodes)
        (await self._remembered(ground))[ended.name] = ended
        return ended

    async def _remembered(self, ground: Ground) -> dict[str, Ended]:
        if self._ended is None:
            self._ended = await ground.remembered(self._context.now())
        return self._ended

    async def _jobs(self, ground: Ground) -> Sequence[JobRow]:
        return await self.slurm.jobs((await self.seat.hello()).uid, _comment(ground))

    # The cluster

    async def _grounded(self) -> Ground:
        if self._ground is None:
            hello: Hello = await self.seat.hello()
            self._ground = Ground(self.seat, self._context.installation, hello.folder)
        return self._ground

    async def _known_cluster(self) -> Cluster:
        if self._cluster is None or self._context.now() - self._cluster[0] >= _CLUSTER_AGE:
            return await self._read_cluster()
        return self._cluster[1]

    async def _read_cluster(self) -> Cluster:
        wanted = [name.strip() for name in self._text("partitions").split(",") if name.strip()]
        cluster = read_cluster(
            await self.slurm.config(),
            await self.slurm.show("show", "partition"),
            await self.slurm.show("--details", "show", "nodes"),
            wanted,
        )
        if missing := [name for name in wanted if cluster.partition(name) is None]:
            raise Refused(f"[providers.slurm] partitions: {', '.join(missing)}: not up, or not for this user")
        self._cluster = (self._context.now(), cluster)
        return cluster

    def _text(self, name: str) -> str:
        return str(self._settings.get(name, ""))

    def _rate(self, name: str) -> HourlyRate:
        return parse_rate(str(self._settings.get(name, 0)))


def _comment(ground: Ground) -> str:
    """What all jobs of this installation carry, and no others."""
    return f"remuda:{ground.mark}"


def _count(record: Record) -> int:
    return record.intent.nodes if record.intent is not None else 1


def _epoch(text: str, at: int) -> datetime | None:
    """A time among the words of a record."""
    words = text.split()
    return datetime.fromtimestamp(int(words[at]), UTC) if len(words) > at and words[at].isdigit() else None
