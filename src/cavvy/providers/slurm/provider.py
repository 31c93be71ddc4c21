"""Slurm as a provider: gangs are batch jobs, found again by their name and our comment."""

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
from cavvy.providers.slurm.accounts import explain_accounts
from cavvy.providers.slurm.cluster import SlurmCluster, count_room, list_offers, read_cluster
from cavvy.providers.slurm.commands import TOOLS, SlurmCommands
from cavvy.providers.slurm.export import make_export
from cavvy.providers.slurm.manifest import with_containers
from cavvy.providers.slurm.script import SlurmOptions, make_options, make_script

_CLUSTER_AGE = timedelta(minutes=10)  # of partitions, for launches; offers read them anew


class SlurmProvider:
    """Implements Provider, ChecksTasks, WhoAmI, ExportsTasks, RelaysAgents and Closeable."""

    def __init__(self, manifest: Manifest, context: ProviderContext) -> None:
        self._context = context
        self._settings = context.settings
        self._job_options = self._read_settings_options()
        self.manifest = with_containers(manifest, self._text("container"))
        self.login_session = LoginSession(read_where(context.settings, TOOLS))
        self.slurm = SlurmCommands(self.login_session)
        self._gangs = BatchGangs(self.login_session, self.slurm, context)
        self._cluster: tuple[datetime, SlurmCluster] | None = None

    async def offers(self) -> Sequence[Offer]:
        prices = PartPrices(
            gpu=self._rate("price_usd_gpu_hr"), node=self._rate("price_usd_node_hr")
        )
        return list_offers(
            await self._read_cluster(), prices, queue=bool(self._settings.get("queue", True))
        )

    async def launch(self, gang: GangSpec) -> None:
        if await self._gangs.knows_end(gang.name):
            return
        cluster = await self._known_cluster()
        partition = cluster.partition(gang.offer.zone)
        if (
            gang.offer.provider != self.manifest.name
            or gang.offer.region != cluster.name
            or partition is None
        ):
            raise NoCapacity(f"{gang.offer.key}: not an offer of the cluster {cluster.name} now")
        if count_room(cluster, gang.offer) < gang.nodes:  # Slurm itself might let it wait for ever
            raise NoCapacity(
                f"{gang.offer.key}: partition {partition.name} has fewer than {gang.nodes} such "
                "nodes"
            )
        job_options = self._job_options
        taken_s = max(partition.grace, cluster.kill_wait).total_seconds()

        async def submit(workspace: SharedWorkspace, agent: str) -> str:
            folder = workspace.gang(gang.name)
            options = make_options(gang, partition, mark_of(workspace), folder, job_options)
            return await self.slurm.submit(
                options,
                make_script(
                    gang,
                    agent,
                    folder,
                    job_options.python,
                    pyxis=self._text("container") == "pyxis",
                ),
            )

        await self._gangs.launch(
            gang,
            ReclaimRules(source="Slurm", seconds=taken_s, warning_s=job_options.warning_s),
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
        user = (await self.login_session.run(["id", "-un"])).out.strip()
        up = [node for node in cluster.nodes if node.up]
        limits = await self.slurm.limits(user) if "sacctmgr" in hello.tools else ()
        config = await self.slurm.config()
        return [
            ("cluster", f"{cluster.name}, Slurm {cluster.version}"),
            ("login node", hello.host),
            ("user", user),
            (
                "partitions",
                ", ".join(
                    each.name + (" (spot)" if each.taken else "") for each in cluster.partitions
                ),
            ),
            ("nodes", f"{len(up)} of {len(cluster.nodes)} up"),
            ("GPUs", count_gpus(node.shape for node in up)),
            ("shared folder", hello.folder),
            ("Python of the login node", hello.python),
            *explain_accounts(self._job_options.account, user, config, hello.tools, limits),
        ]

    def export(self, task: Task, offer: Offer | None, nodes: int) -> str:
        return make_export(task, offer, nodes, self._job_options)

    async def close(self) -> None:
        await self._gangs.close()
        await self.login_session.close()

    def _read_settings_options(self) -> SlurmOptions:
        return SlurmOptions(
            account=self._text("account"),
            qos=self._text("qos"),
            options=read_words(self._settings, "sbatch_options"),
            python=self._text("python") or "python3",
            warning_s=int(self._settings.get("warning_s", 60)),
        )

    async def _known_cluster(self) -> SlurmCluster:
        if self._cluster is None or self._context.now() - self._cluster[0] >= _CLUSTER_AGE:
            return await self._read_cluster()
        return self._cluster[1]

    async def _read_cluster(self) -> SlurmCluster:
        wanted = [name.strip() for name in self._text("partitions").split(",") if name.strip()]
        rows = await self.slurm.show("show", "partition")
        cluster = read_cluster(
            await self.slurm.config(),
            rows,
            await self.slurm.show("--details", "show", "nodes"),
            wanted,
        )
        if missing := [name for name in wanted if cluster.partition(name) is None]:
            there = (
                ", ".join(row["PartitionName"] for row in rows if row.get("State") == "UP")
                or "none"
            )
            raise Refused(
                f"[providers.slurm] partitions: {', '.join(missing)}: not up, or not for this "
                f"user; up: {there}"
            )
        self._cluster = (self._context.now(), cluster)
        return cluster

    def _text(self, name: str) -> str:
        return str(self._settings.get(name, ""))

    def _rate(self, name: str) -> HourlyRate:
        return parse_rate(str(self._settings.get(name, 0)))
