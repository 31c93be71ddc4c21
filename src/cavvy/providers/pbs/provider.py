"""PBS as a provider: gangs are batch jobs, found again by their name and our mark among their
variables.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Task
from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.providers.base import GangSeen, GangSpec, Manifest, NoCapacity, ProviderContext, Refused
from cavvy.providers.batch.gangs import BatchGangs, ReclaimRules, mark_of
from cavvy.providers.batch.login_session import LoginSession, read_where, read_words
from cavvy.providers.batch.shapes import PartPrices, count_gpus
from cavvy.providers.batch.workspace import SharedWorkspace
from cavvy.providers.pbs.cluster import PbsCluster, count_room, list_offers, read_cluster
from cavvy.providers.pbs.commands import TOOLS, PbsCommands
from cavvy.providers.pbs.export import make_export
from cavvy.providers.pbs.script import PbsOptions, make_options, make_script

_CLUSTER_AGE = timedelta(minutes=10)  # of queues and nodes, for launches; offers read them anew


class PbsProvider:
    """Implements Provider, ChecksTasks, WhoAmI, ExportsTasks, RelaysAgents and Closeable."""

    def __init__(self, manifest: Manifest, context: ProviderContext) -> None:
        self.manifest = manifest
        self._context = context
        self._settings = context.settings
        self._job_options = self._read_settings_options()
        self.login_session = LoginSession(read_where(context.settings, TOOLS))
        self.pbs = PbsCommands(self.login_session)
        self._gangs = BatchGangs(self.login_session, self.pbs, context)
        self._cluster: tuple[datetime, PbsCluster] | None = None

    async def offers(self) -> Sequence[Offer]:
        prices = PartPrices(
            gpu=self._rate("price_usd_gpu_hr"), node=self._rate("price_usd_node_hr")
        )
        waits = bool(self._settings.get("queue", True))
        return list_offers(
            await self._read_cluster(), prices, spot=self._names("spot_queues"), queue=waits
        )

    async def launch(self, gang: GangSpec) -> None:
        if await self._gangs.knows_end(gang.name):
            return
        cluster = await self._known_cluster()
        queue = cluster.queue(gang.offer.zone)
        if (
            gang.offer.provider != self.manifest.name
            or gang.offer.region != cluster.name
            or queue is None
        ):
            raise NoCapacity(f"{gang.offer.key}: not an offer of the cluster {cluster.name} now")
        if count_room(cluster, gang.offer) < gang.nodes:  # PBS itself might let it wait for ever
            raise NoCapacity(
                f"{gang.offer.key}: queue {queue.name} has fewer than {gang.nodes} such nodes"
            )
        job_options = self._job_options

        async def submit(workspace: SharedWorkspace, agent: str) -> str:
            options = make_options(gang, queue, mark_of(workspace), job_options)
            return await self.pbs.submit(
                options, make_script(gang, queue, agent, workspace.gang(gang.name), job_options)
            )

        seconds = float(self._settings.get("kill_delay_s", 10))
        await self._gangs.launch(
            gang,
            ReclaimRules(source="PBS", seconds=seconds, warning_s=job_options.warning_s),
            submit,
        )

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        return await self._gangs.gangs(name)

    async def remove(self, name: str) -> None:
        await self._gangs.remove(name)

    async def relay(self) -> None:
        await self._gangs.relay()

    async def whoami(self) -> Sequence[tuple[str, str]]:
        hello, cluster = await self.login_session.hello(), await self._read_cluster()
        up = [node for node in cluster.nodes if node.up]
        return [
            ("cluster", f"{cluster.name}, PBS {cluster.version}"),
            ("login node", hello.host),
            ("user", (await self.login_session.run(["id", "-un"])).out.strip()),
            (
                "queues",
                ", ".join(queue.name for queue in cluster.queues)
                or "none that takes and starts jobs",
            ),
            ("nodes", f"{len(up)} of {len(cluster.nodes)} up"),
            ("GPUs", count_gpus(node.shape for node in up)),
            ("shared folder", hello.folder),
            ("Python of the login node", hello.python),
        ]

    def export(self, task: Task, offer: Offer | None, nodes: int) -> str:
        return make_export(task, offer, nodes, self._job_options)

    async def close(self) -> None:
        await self._gangs.close()
        await self.login_session.close()

    def _read_settings_options(self) -> PbsOptions:
        return PbsOptions(
            account=self._text("account"),
            options=read_words(self._settings, "qsub_options"),
            python=self._text("python") or "python3",
            warning_s=int(self._settings.get("warning_s", 60)),
            gpu_resource="" if self._text("gpu") else self._text("gpu_resource"),
        )

    async def _known_cluster(self) -> PbsCluster:
        if self._cluster is None or self._context.now() - self._cluster[0] >= _CLUSTER_AGE:
            return await self._read_cluster()
        return self._cluster[1]

    async def _read_cluster(self) -> PbsCluster:
        wanted = self._names("queues")
        cluster = read_cluster(
            await self.pbs.server(),
            await self.pbs.queues(),
            await self.pbs.nodes(),
            wanted=wanted,
            gpu=self._text("gpu"),
            gpu_resource=self._text("gpu_resource"),
        )
        if missing := [name for name in wanted if cluster.queue(name) is None]:
            raise Refused(
                f"[providers.pbs] queues: {', '.join(missing)}: none that takes and starts jobs"
            )
        self._cluster = (self._context.now(), cluster)
        return cluster

    def _names(self, setting: str) -> Sequence[str]:
        return [name.strip() for name in self._text(setting).split(",") if name.strip()]

    def _text(self, name: str) -> str:
        return str(self._settings.get(name, ""))

    def _rate(self, name: str) -> HourlyRate:
        return parse_rate(str(self._settings.get(name, 0)))
