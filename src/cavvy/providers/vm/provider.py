"""The provider that all clouds of virtual machines share: `VmProvider` turns a `Cloud` into a
`Provider`. An agent is started in one of two ways: by the node's user data, after which the agent
connects to the server over TLS; or by the server, which connects to the node by SSH.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from cavvy.domain.offers import Offer, Quota
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.providers.abilities import HAS_PARTS, REPLACES_NODES, TELLS_QUOTAS
from cavvy.providers.base import (
    GangSeen,
    GangSpec,
    Manifest,
    NoCapacity,
    NodeEndpoint,
    ProviderContext,
    Refused,
)
from cavvy.providers.hosts.ssh_link import SshLink
from cavvy.providers.hosts.userdata import MetadataService, make_key_script, make_user_data
from cavvy.providers.ledger import LaunchLedger
from cavvy.providers.recording import CallRecorder
from cavvy.providers.vm.cloud import Cloud, Reach
from cavvy.providers.vm.launch import MakeUserData, VmLauncher
from cavvy.providers.vm.machines import VmMachines
from cavvy.providers.vm.reach import MakeLink, VmReach
from cavvy.providers.vm.records import MachineNames, VmGangRecord, is_over
from cavvy.providers.vm.rest import RECORDER
from cavvy.providers.vm.status import VmStatus

Release = Callable[[str], Awaitable[None]]  # ends a kept machine; raises CloudFault, Refused
Replace = Callable[[GangSpec, Sequence[int]], Awaitable[None]]  # see `ReplacesNodes.replace`
ReadQuotas = Callable[[], Awaitable[Sequence[Quota]]]  # raises CloudFault, Refused


def make_provider(
    manifest: Manifest, context: ProviderContext, cloud: Callable[[ProviderContext], Cloud]
) -> "VmProvider":
    """Create the provider of a cloud. Besides the six calls, the cloud may have the parameters of
    `VmProvider` as attributes. Of these, the provider uses `quotas` and `silent` only if its
    manifest has their abilities.
    """
    made = cloud(context)
    names = ["identity", "close", "make_script", "object_to"]
    names += ["quotas", "untold_quotas"] if TELLS_QUOTAS in manifest.abilities else []
    names += ["silent"] if HAS_PARTS in manifest.abilities else []
    found = {name: getattr(made, name) for name in names if hasattr(made, name)}
    return VmProvider(manifest, context, made, **found)


class VmProvider:
    """Implements `Provider` and the abilities in `vm.abilities`. `identity` returns the cloud's
    facts for `whoami`. `quotas` reads the cloud's quotas, or is None if the API does not report
    quotas. `close` closes the cloud's connections.
    """

    quotas: ReadQuotas  # set only with the ability TELLS_QUOTAS
    replace: Replace  # set only with the ability REPLACES_NODES
    release: Release  # releases the kept machines of a gang; set only with the ability KEEPS_NODES

    def __init__(
        self,
        manifest: Manifest,
        context: ProviderContext,
        cloud: Cloud,
        *,
        identity: Callable[[], Sequence[tuple[str, str]]] = lambda: (),
        quotas: ReadQuotas | None = None,
        untold_quotas: Callable[[], Sequence[str]] = lambda: (),
        silent: Callable[[], Sequence[str]] | None = None,
        close: Callable[[], None] = lambda: None,
        make_link: MakeLink = SshLink,
        make_script: MakeUserData | None = None,
        object_to: Callable[[TaskSpec], Sequence[Objection]] = lambda task: (),
    ) -> None:
        """`make_script` replaces the function that builds a node's user data. `object_to` returns
        the cloud's own objections to a task. `untold_quotas` and `silent` return the regions that
        did not answer, each with the reason.
        """
        self.manifest = manifest
        self._context, self._identity, self._close = context, identity, close
        self._object_to = object_to
        self._recorder = _make_recorder(cloud, context, manifest.name)
        self._machines = _make_machines(cloud, context)
        if quotas is not None:
            self.quotas = lambda: self._read_quotas(quotas)
        self.untold_quotas = untold_quotas
        if silent:  # only then does the provider have the ability HAS_PARTS
            self.silent = silent
        if REPLACES_NODES in manifest.abilities:
            self.replace = self._replace
        self._ledger = LaunchLedger(context.state, VmGangRecord)
        # returns the user data of one node of a gang
        self.make_user_data: MakeUserData = make_script or self._user_data
        self._launcher = VmLauncher(self._machines, self._ledger, self.make_user_data, context.now)
        self._status = VmStatus(self._machines, self._ledger, self._launcher, context.now)
        self._reach = self._make_reach(cloud, make_link)

    def _make_reach(self, cloud: Cloud, make_link: MakeLink) -> VmReach | None:
        """Return the connections to the machines, or None if the machines connect to the server."""
        if cloud.traits.reach is not Reach.SSH and not self._context.settings.get("reach_by_ssh"):
            return None
        return VmReach(
            self._context,
            self._ledger,
            look=self.gangs,
            fail=self._status.fail,
            notices=self.manifest.notices,
            make_link=make_link,
        )

    @property
    def _calls(self) -> bool:
        """Whether the machines must connect to the server."""
        return self._reach is None and self._machines.traits.reach is not Reach.NONE

    def let_release(self, release: Release) -> None:
        """Add the ability KEEPS_NODES to the provider. `release` ends a machine that the cloud
        keeps running after the work has ended.
        """
        self.release = lambda name: self._release(name, release)

    async def offers(self) -> Sequence[Offer]:
        RECORDER.set(self._recorder)
        return await self._machines.offers()

    async def launch(self, gang: GangSpec) -> None:
        async with self._prepared(gang, again=False):
            if self._recorder.begin(gang):
                await self.offers()  # a simulated API that replays the recording needs offers
            try:
                await self._launcher.launch(gang)
            except (NoCapacity, Refused):
                await self._recorder.end(gang.name)
                raise

    async def _replace(self, gang: GangSpec, ranks: Sequence[int]) -> None:
        """See `ReplacesNodes.replace`."""
        async with self._prepared(gang, again=True):
            await self._launcher.replace(gang, ranks)

    @asynccontextmanager
    async def _prepared(self, gang: GangSpec, *, again: bool) -> AsyncIterator[None]:
        """Lock the gang while machines are requested for it, and store what their agents need.
        `again` means that the gang has started."""
        if self._calls:
            self._node_endpoint()
        RECORDER.set(self._recorder)
        async with self._ledger.lock(gang.name):
            await self._ledger.refresh(gang.name)
            if self._reach is not None:
                self._launcher.public_key = await self._reach.prepare(gang, again=again)
            yield
        if self._reach is not None:
            self._reach.wake()

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        RECORDER.set(self._recorder)
        await self._ledger.refresh(name)
        seen = await self._status.look(name)
        await self._recorder.end_finished(self._ledger, is_over)
        return seen if self._reach is None else [self._reach.explain(each) for each in seen]

    async def remove(self, name: str) -> None:
        RECORDER.set(self._recorder)
        async with self._ledger.lock(name):
            await self._ledger.refresh(name)
            await self._status.removal(name)
        await self._recorder.end_finished(self._ledger, is_over)
        if self._reach is not None:
            self._reach.wake()

    async def list_machines(self, gang: str) -> Sequence[str]:
        """Return the ids of the gang's machines that have not ended."""
        await self._ledger.refresh(gang)
        record = self._ledger.get(gang)
        return sorted(record.ids) if record else ()

    async def _release(self, name: str, release: Release) -> None:
        """See `KeepsNodes.release`."""
        RECORDER.set(self._recorder)
        for machine in await self.list_machines(name):
            await self._machines.release(machine, release(machine))

    async def relay(self) -> None:
        """Keep machines connected by SSH; see `RelaysAgents.relay`. Without SSH, machines connect
        to the server themselves, and nothing is relayed.
        """
        await (self._reach.relay() if self._reach is not None else asyncio.Event().wait())

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        found = list(self._object_to(task))
        if self._calls and self._context.node_endpoint is None:
            found.append(Objection("providers", self._no_way()))
        most = self._launcher.most_nodes
        if most is not None and task.nodes > most:
            title = self.manifest.title
            reason = f"{title} starts machines one by one, so a gang has at most {most} nodes"
            found.append(Objection("nodes", reason))
        return found

    async def whoami(self) -> Sequence[tuple[str, str]]:
        offers, shown = await self.offers(), await self._machines.list()
        regions = sorted({offer.region for offer in offers})
        endpoint = self._context.node_endpoint
        calls = endpoint.address if endpoint else f"nothing: {self._no_way()}"
        return [
            *self._identity(),
            ("offers", f"{len(offers)} in {len(regions)} regions"),
            *(("silent", each) for each in getattr(self, "silent", tuple)()),
            *(("silent", str(each)) for each in shown.silent.values()),
            ("machines", str(len(shown.found))),
            *([("nodes call", calls)] if self._calls else []),
            *([("nodes", "reached by SSH")] if self._reach is not None else []),
        ]

    async def _read_quotas(self, quotas: ReadQuotas) -> Sequence[Quota]:
        RECORDER.set(self._recorder)
        return await self._machines.ask_all(quotas(), "the list of quotas")

    async def close(self) -> None:
        if self._reach is not None:
            await self._reach.close()
        self._close()

    async def _user_data(self, gang: GangSpec, rank: int) -> str:
        if self._reach is not None:
            engine = gang.image is not None
            return make_key_script(self._launcher.public_key, engine=engine)
        endpoint, known = self._node_endpoint(), self._machines.traits.metadata
        metadata = MetadataService(
            rank=rank,
            address=known.address if known else "",
            token=known.token if known else None,
            headers=known.headers if known else {},
        )
        notices = self.manifest.notices
        return await asyncio.to_thread(make_user_data, gang, endpoint, metadata, notices)

    def _node_endpoint(self) -> NodeEndpoint:
        if self._context.node_endpoint is None:
            raise Refused(self._no_way())
        return self._context.node_endpoint

    def _no_way(self) -> str:
        named = {each.name for each in self.manifest.settings}
        other = "; set it, or `reach_by_ssh`" if "reach_by_ssh" in named else ""
        return (
            f"machines of {self.manifest.title} must connect to the server, but "
            f"`server.tls_listen` is not set{other}"
        )


def _make_recorder(cloud: Cloud, context: ProviderContext, provider: str) -> CallRecorder:
    safe = cloud.traits.safe_fields
    return CallRecorder(context.home, provider, context.installation, safe=safe)


def _make_machines(cloud: Cloud, context: ProviderContext) -> VmMachines:
    names = MachineNames(context.installation, cloud.traits.name_limit)
    return VmMachines(cloud, names, context.now)
