"""The provider for any batch system. Each gang is a batch job, which Cavvy finds by the gang's name
and the installation's mark.

Submits each job as the Unix user that its user is mapped to, so that the batch system's
accounting and limits apply to this user.

Each Unix user has a login session and a shared folder of their own: a helper that runs as the user
submits the job, and reads and writes its files. So files belong to the user whose job they are of,
and nothing that root does follows a path that a user controls. Because users can write what their
helper reads, it is believed only about gangs that were launched as this user.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Objection, Scalar, TaskSpec
from cavvy.domain.units import parse_rate
from cavvy.domain.values import Struct, replace
from cavvy.providers.base import (
    GangSeen,
    GangSpec,
    Manifest,
    NoCapacity,
    ProviderContext,
    ProviderError,
    Refused,
)
from cavvy.providers.batch.fan_out import look_at_all
from cavvy.providers.batch.gangs import BatchGangs, ReclaimRules, mark_of
from cavvy.providers.batch.login_session import LoginNode, LoginSession
from cavvy.providers.batch.shapes import PartPrices, count_gpus
from cavvy.providers.batch.system import (
    BatchCluster,
    BatchSystem,
    JobFiles,
    count_room,
    list_offers,
)
from cavvy.providers.batch.workspace import REMEMBERED, SharedWorkspace
from cavvy.providers.ledger import LaunchLedger

# maximum age of the data about queues and nodes in a launch; `offers` always reads new data
_CLUSTER_AGE = timedelta(minutes=10)

_UNIX_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
# seconds after which the relay of a user whose session broke is started again
_AGAIN_S = 5.0
_FORGOTTEN = REMEMBERED + timedelta(hours=1)
OWN = ""  # the user of the login itself


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


class GangUser(Struct, frozen=True, kw_only=True):
    """The Unix user of a gang."""

    name: str
    user: str
    at: datetime


def read_unix_users(settings: Mapping[str, Scalar], provider: str) -> Mapping[str, str]:
    """Return the Unix user of each user. Raises Refused."""
    found: dict[str, str] = {}
    where = f"[providers.{provider}] unix_users"
    for word in str(settings.get("unix_users", "")).replace(",", " ").split():
        user, equals, unix = word.rpartition("=")
        if not (user and equals and _UNIX_USER.fullmatch(unix)):
            raise Refused(f"{where}: {word!r} does not have the form USER=UNIX_USER")
        if unix == "root":
            raise Refused(f"{where}: {word!r}: no job runs as root")
        if user in found:
            raise Refused(f"{where}: {user} is named twice")
        found[user] = unix
    folder = str(settings.get("folder", "")) or "~"
    if found and not folder.startswith("~") and "%u" not in folder:
        raise Refused(
            f"{where}: each user needs a folder of their own; write `folder` with ~ or %u, which "
            f"is replaced by the Unix user, such as {folder}/%u"
        )
    return found


class UserGangs:
    """The gangs of an installation by Unix user. `users` is empty if all jobs run as the user of
    the login."""

    def __init__(
        self,
        manifest: Manifest,
        context: ProviderContext,
        make_system: Callable[[LoginSession], BatchSystem],
        own: BatchSystem,
    ) -> None:
        self.users = read_unix_users(context.settings, manifest.name)
        self._provider = manifest.name
        self._context = context
        self._make_system = make_system
        self._own = own
        self._gangs: dict[str, tuple[BatchSystem, BatchGangs]] = {
            OWN: (own, BatchGangs(own, context))
        }
        self._ledger = LaunchLedger(context.state, GangUser, "unix-users")
        self._changed = asyncio.Event()

    async def choose(self, gang: GangSpec) -> tuple[BatchSystem, BatchGangs]:
        """Return the system and the gangs of the gang's user, and record the user. Raises Refused,
        TryAgain.
        """
        if not self.users:
            return self._gangs[OWN]
        await self._ledger.refresh(gang.name)
        record = self._ledger.get(gang.name)
        if record is None:
            if gang.user not in self.users:
                raise Refused(
                    f"user {gang.user or '(unknown)'} has no Unix user on this cluster; an "
                    f"administrator adds {gang.user or 'USER'}=UNIX_USER to "
                    f"[providers.{self._provider}] unix_users"
                )
            user = self.users[gang.user]
            uid = await self._read_uid(user)
            if uid == (await self._own.commands.login_session.hello()).uid:
                user = OWN
            record = GangUser(name=gang.name, user=user, at=self._context.now())
            await self._ledger.put(record)
            self._changed.set()
        return self._of(record.user)

    async def gangs(self, name: str | None) -> Sequence[GangSeen]:
        if not self.users:
            return await self._gangs[OWN][1].gangs(name)
        await self._ledger.refresh(name)
        if name is not None:
            record = self._ledger.get(name)
            return await self._look(record.user if record else OWN, name)
        wanted = [OWN, *self._list_users()]
        return await look_at_all([self._look(user, None) for user in wanted], None)

    async def remove(self, name: str) -> None:
        await self._ledger.refresh(name)
        record = self._ledger.get(name)
        await self._of(record.user if record else OWN)[1].remove(name)

    async def relay(self) -> None:
        """Relay the mail of all users who have gangs. A user whose session breaks does not
        interrupt the mail of the others.
        """
        if not self.users:
            return await self._gangs[OWN][1].relay()
        await self._ledger.refresh()
        tasks: dict[str, asyncio.Task[None]] = {}
        resting: set[str] = set()
        try:
            while True:
                self._changed.clear()
                for user in {OWN, *self._list_users()} - {*tasks} - resting:
                    tasks[user] = asyncio.create_task(self._of(user)[1].relay())
                change = asyncio.create_task(self._changed.wait())
                try:
                    waited = [change, *tasks.values()]
                    done, _ = await asyncio.wait(
                        waited, timeout=_AGAIN_S, return_when=asyncio.FIRST_COMPLETED
                    )
                finally:
                    change.cancel()
                if not done:
                    resting.clear()
                for user in [user for user, task in tasks.items() if task.done()]:
                    with suppress(ProviderError, OSError):
                        tasks.pop(user).result()
                    resting.add(user)
        finally:
            for task in tasks.values():
                task.cancel()
            if tasks:
                await asyncio.wait(tasks.values())

    async def describe(self) -> Sequence[tuple[str, str]]:
        """Return what `cavvy check` says about the mapping: whether jobs can be submitted as each
        user."""
        told = []
        for user, unix in self.users.items():
            try:
                own = await self._own.commands.login_session.hello()
                same = await self._read_uid(unix) == own.uid
                hello = await self._of(OWN if same else unix)[0].commands.login_session.hello()
                text = f"{unix} (uid {hello.uid}), {hello.folder}"
            except ProviderError as error:
                text = f"{unix}: {error}"
            told.append((f"jobs of {user}", text))
        return told

    async def close(self) -> None:
        for system, gangs in self._gangs.values():
            await gangs.close()
            await system.commands.login_session.close()

    async def _look(self, user: str, name: str | None) -> Sequence[GangSeen]:
        """Return the gangs that were launched as the user; a user can write what the helper
        reads."""
        found = await self._of(user)[1].gangs(name)
        records = self._ledger.records
        mine = [each for each in found if _user_of(records.get(each.name)) == user]
        if name is None:
            seen, now = {each.name for each in mine}, self._context.now()
            for record in [each for each in records.values() if each.user == user]:
                if record.name not in seen and now - record.at > _FORGOTTEN:
                    await self._ledger.drop(record.name)
        return mine

    async def _read_uid(self, unix: str) -> int:
        """Return the number of a user of the login node. Raises Refused if jobs cannot be submitted
        as this user."""
        done = await self._own.commands.login_session.run(["id", "-u", "--", unix])
        if done.code != 0 or not done.out.strip().isdigit():
            raise Refused(f"the login node has no user {unix}")
        if int(done.out) == 0:
            raise Refused(f"user {unix} is root on the login node, and no job runs as root")
        return int(done.out)

    def _of(self, user: str) -> tuple[BatchSystem, BatchGangs]:
        if user not in self._gangs:
            system = self._make_system(self._own.commands.login_session.for_user(user))
            self._gangs[user] = (system, BatchGangs(system, self._context))
        return self._gangs[user]

    def _list_users(self) -> Sequence[str]:
        return sorted({each.user for each in self._ledger.records.values()})


def _user_of(record: GangUser | None) -> str:
    return OWN if record is None else record.user
