"""The provider for any batch system. Each gang is a batch job, which Cavvy finds by the gang's name
and the installation's mark.
"""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.units import parse_rate
from cavvy.domain.values import replace
from cavvy.providers.base import GangSeen, GangSpec, Manifest, NoCapacity, ProviderContext, Refused
from cavvy.providers.batch.cluster import BatchCluster, count_room, list_offers
from cavvy.providers.batch.gangs import ReclaimRules, mark_of
from cavvy.providers.batch.login_session import LoginNode, LoginSession
from cavvy.providers.batch.shapes import PartPrices, count_gpus
from cavvy.providers.batch.system import BatchSystem, JobFiles
from cavvy.providers.batch.users import UserGangs
from cavvy.providers.batch.workspace import SharedWorkspace

# maximum age of the data about queues and nodes in a launch; `offers` always reads new data
_CLUSTER_AGE = timedelta(minutes=10)


class BatchProvider:
    """Implements `Provider` for any batch system, and the abilities listed in the manifest."""

    def __init__(
        self,
        manifest: Manifest,
        context: ProviderContext,
        where: LoginNode,
        make_system: Callable[[LoginSession], BatchSystem],
    ) -> None:
        self.manifest = manifest
        self.system = make_system(LoginSession(where))
        self._context = context
        self._gangs = UserGangs(manifest, context, make_system, self.system)
        self._cluster: tuple[datetime, BatchCluster] | None = None

    @property
    def login_session(self) -> LoginSession:
        return self.system.commands.login_session

    async def offers(self) -> Sequence[Offer]:
        settings = self._context.settings
        gpu, node = (
            parse_rate(str(settings.get(name, 0)))
            for name in ("price_usd_gpu_hr", "price_usd_node_hr")
        )
        return list_offers(
            await self._read_cluster(),
            PartPrices(gpu=gpu, node=node),
            provider=self.manifest.name,
            title=self.system.title,
            queue=bool(settings.get("queue", True)),
            by_user=bool(self._gangs.users),
        )

    async def launch(self, gang: GangSpec) -> None:
        system, gangs = await self._gangs.choose(gang)
        if await gangs.knows_end(gang.name):
            return
        cluster, offer = await self._known_cluster(), gang.offer
        queue = cluster.queue(offer.zone)
        if (offer.provider, offer.region) != (self.manifest.name, cluster.name) or queue is None:
            raise NoCapacity(f"{offer.key}: the cluster {cluster.name} no longer has this offer")
        # otherwise the batch system might let the job wait forever
        if count_room(queue, offer) < gang.nodes:
            raise NoCapacity(
                f"{offer.key}: {queue.name} has fewer than {gang.nodes} nodes of this kind"
            )

        async def submit(workspace: SharedWorkspace, agent: str) -> str:
            files = JobFiles(mark=mark_of(workspace), folder=workspace.gang(gang.name), agent=agent)
            return await system.commands.submit(*system.make_job(gang, queue, files))

        rules = ReclaimRules(
            source=self.system.title,
            seconds=queue.reclaim_s,
            warning_s=self.system.job_options.warning_s,
        )
        await gangs.launch(gang, rules, submit)

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        return await self._gangs.gangs(name)

    async def remove(self, name: str) -> None:
        await self._gangs.remove(name)

    async def relay(self) -> None:
        await self._gangs.relay()

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        need = task.topology
        if need is None or need.same is None:
            return []
        known = self.system.job_options.topology
        if need.same in known:
            reason = self.system.object_to_topology(need)
            return [Objection("topology.same", reason)] if reason else []
        names = f"has {', '.join(known)}" if known else "is not set"
        reason = (
            f"no label {need.same}: the setting `topology` of [providers.{self.manifest.name}] "
            f"{names}"
        )
        return [Objection("topology.same", reason)]

    async def whoami(self) -> Sequence[tuple[str, str]]:
        hello, cluster = await self.login_session.hello(), await self._read_cluster()
        user = (await self.login_session.run(["id", "-un"])).out.strip()
        up = [node for node in cluster.nodes if node.up]
        names, all_names = ({node.name for node in some} for some in (up, cluster.nodes))
        queues = [each.name + (" (spot)" if each.taken else "") for each in cluster.queues]
        return [
            ("cluster", f"{cluster.name}, {self.system.title} {cluster.version}"),
            ("login node", hello.host),
            ("user", user),
            (self.system.queues, ", ".join(queues) or "none accepts jobs"),
            ("nodes", f"{len(names)} of {len(all_names)} up"),
            ("GPUs", count_gpus(node.shape for node in up)),
            ("shared folder", hello.folder),
            ("Python of the login node", hello.python),
            *await self._gangs.describe(),
            *await self.system.explain_accounts(user, hello),
        ]

    def export(self, task: TaskSpec, offer: Offer | None, nodes: int) -> str:
        return self.system.export(task, offer, nodes)

    async def close(self) -> None:
        await self._gangs.close()

    async def _known_cluster(self) -> BatchCluster:
        if self._cluster is None or self._context.now() - self._cluster[0] >= _CLUSTER_AGE:
            return await self._read_cluster()
        return self._cluster[1]

    async def _read_cluster(self) -> BatchCluster:
        cluster = await self.system.read_cluster()
        setting = self.system.queues
        named = str(self._context.settings.get(setting, "")).split(",")
        if wanted := [name.strip() for name in named if name.strip()]:
            usable = {each.name: each for each in cluster.queues}
            if missing := [name for name in wanted if name not in usable]:
                raise Refused(
                    f"[providers.{self.manifest.name}] {setting}: {', '.join(missing)}: not "
                    "available for this user's jobs; the available ones are: "
                    f"{', '.join(usable) or 'none'}"
                )
            cluster = replace(cluster, queues=[usable[name] for name in usable if name in wanted])
        self._cluster = (self._context.now(), cluster)
        return cluster
