"""The optional abilities of providers, beyond the four methods of the provider interface.

A provider lists its abilities in `Manifest.abilities`; callers request an ability with
`ability(provider, WHO_AM_I)`. The contract suite checks that a provider implements exactly the
abilities that it declares.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from cavvy.domain.allocations import NO_LABELS, Host, VolumeLocation
from cavvy.domain.offers import Offer, Quota
from cavvy.domain.tasks import Objection, TaskSpec
from cavvy.domain.values import Struct
from cavvy.domain.volumes import KeptVolume, VolumeFolder
from cavvy.providers.base import Ability, GangSpec, Provider

if TYPE_CHECKING:
    from cavvy.domain.messages import AgentCalls

_P = TypeVar("_P")


class SharesHosts(Protocol):
    """A provider whose hosts run several jobs at the same time. The control plane records the
    devices that each job uses.
    """

    async def hosts(self) -> Sequence[Host]: ...


class HoldsVolumes(Protocol):
    """A provider with named volumes, each of which exists in one location. If a task mounts a
    volume, Cavvy runs the task in the location of the volume.
    """

    async def volumes(self) -> Sequence[VolumeLocation]:
        """Return the locations of the named volumes that exist. Raises TryAgain, Refused."""


class BillsVolumes(Protocol):
    """A provider whose volumes cost money between jobs."""

    async def kept_volumes(self) -> Sequence[KeptVolume]:
        """Return the volumes that this installation created and that outlive their jobs, with
        prices. Raises TryAgain or Refused if a location that may contain volumes does not answer.
        """


class KeepsFolders(Protocol):
    """A provider whose named volumes are folders of this machine or of own hosts, one for each
    project and name."""

    async def folders(self, project: str) -> Sequence[VolumeFolder]:
        """Return the volumes of a project."""

    async def remove_folder(self, project: str, name: str) -> bool:
        """Remove a volume that no job uses, with its files. Return whether it was there. Raises
        Refused if the system does not permit it, and TryAgain if its host does not answer."""


class HasParts(Protocol):
    """A provider that consists of several clusters, regions or hosts, some of which may not
    answer.
    """

    def silent(self) -> Sequence[str]:
        """Return the clusters, regions or hosts that did not answer the last call of `offers`, each
        with the reason. A job that fits no available offer waits until all clusters, regions or
        hosts have answered. If no cluster, region or host answers, `offers` raises an error.
        """


class SignalsChanges(Protocol):
    """A provider that signals changes of a gang. A lost signal is harmless, because the control
    plane also polls.
    """

    async def changed(self) -> str:
        """Wait for the next change and return the gang's name."""


class RunsAgentsHere(Protocol):
    """A provider whose agents run in this process and call the control plane directly."""

    def connect(self, control_plane: "AgentCalls | None") -> None:
        """Send the agents' calls to `control_plane` from now on. If `control_plane` is None, the
        agents run without a control plane.
        """


class ReplicaRequest(Struct, frozen=True, kw_only=True):
    """The body and the headers of a request for a replica. Header names are in lower case."""

    body: bytes
    headers: Mapping[str, str]


class ReplicaAnswer(Struct, frozen=True, kw_only=True):
    """A replica's answer to a request."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class AnswersRequests(Protocol):
    """A provider that runs each gang as an endpoint of a managed service. Only the provider's own
    API, with the provider's credentials, can call these endpoints. The nodes run no Cavvy agent, so
    Cavvy has no tunnel to the nodes.
    """

    async def answers(self, gang: str) -> bool:
        """Return whether the gang's endpoint is ready for requests. Raises TryAgain, NotFound,
        Refused.
        """

    async def invoke(self, gang: str, request: ReplicaRequest) -> ReplicaAnswer:
        """Send a request to the gang's endpoint, without retries. Raises NotFound and Refused.
        Raises TryAgain if the endpoint is not ready, or if the answer was lost. If the answer is
        lost, the caller cannot determine whether the endpoint received the request.
        """


class ChecksTasks(Protocol):
    """A provider that can reject a task before the task runs."""

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        """Return the reasons why the provider cannot run the task, or () if it can run the task."""


class WhoAmI(Protocol):
    """A provider that can report the identity it uses; `cavvy check` shows the identity."""

    async def whoami(self) -> Sequence[tuple[str, str]]:
        """Return pairs (label, value), such as ("user", "ann") and ("GPUs", "8 x H100"). Raises
        TryAgain, Refused.
        """


class TellsQuotas(Protocol):
    """A provider that can report the account's quotas and their use for `cavvy nodes quota`."""

    async def quotas(self) -> Sequence[Quota]:
        """Return the quotas that limit the provider's offers. Raises TryAgain, Refused."""

    def untold_quotas(self) -> Sequence[str]:
        """Return the regions whose quotas the last call of `quotas` could not read, each with the
        reason. If no region answers, `quotas` raises an error.
        """


class StatesPolicy(Protocol):
    """A provider that can list the permissions it needs, which `cavvy check NAME --policy`
    prints."""

    def policy(self) -> str:
        """Return the minimum permissions of the provider's account, in the infrastructure's own
        format. Works offline.
        """


class ExportsTasks(Protocol):
    """A provider that can write a task as a job of its infrastructure, for `cavvy export`."""

    def export(self, task: TaskSpec, offer: Offer | None, nodes: int) -> str:
        """Return the task in the infrastructure's own format. The job runs without Cavvy's agent.
        Works offline. If `offer` is None, the job requests any suitable resources.
        """


class RelaysAgents(Protocol):
    """A provider that relays its agents' requests, because its nodes cannot reach the control
    plane.

    The provider creates the tunnels, mailboxes or streams that its nodes need. The provider passes
    each request to `ProviderContext.server_address` unchanged. Each agent's configuration, which
    the provider writes, contains the address of the relay on that agent's node.
    """

    async def relay(self) -> None:
        """Relay requests for every gang of this installation until cancelled. The relay restores
        lost connections.
        """


class JoinInvitation(Struct, frozen=True, kw_only=True):
    """Two equivalent commands, each of which joins a machine with the invitation's single-use
    token."""

    shell: str
    python: str  # the command for machines without curl
    expires_at: datetime


class JoinedMachine(Struct, frozen=True, kw_only=True):
    """A machine that has joined through an invitation."""

    name: str
    state: str  # shown to users: up, silent, leaving, left
    has: str  # shown to users: its resources
    joined_at: datetime
    heard_at: datetime | None = None


class JoinTerms(Struct, frozen=True, kw_only=True):
    """What an invitation is for. Machines with the same `group` share a network and can run a gang
    together; `labels` state where the machine is. `session` is after what time from its join the
    machine ends by itself; None if it does not.
    """

    name: str | None
    group: str | None
    valid: timedelta
    labels: Mapping[str, str] = NO_LABELS
    session: timedelta | None = None


class ServesNodes(Protocol):
    """A provider whose machines send requests to the server. The server's API passes the machines'
    requests to the provider without reading the content.
    """

    async def invite(self, terms: JoinTerms) -> JoinInvitation:
        """Create an invitation. Raises Refused."""

    async def machines(self) -> Sequence[JoinedMachine]:
        """Return the machines that have joined and were not dismissed."""

    async def dismiss(self, name: str) -> None:
        """End the machine's work and revoke its token. Raises NotFound, TryAgain."""

    async def script(self) -> bytes:
        """Return the join command's script, which contains no secret."""

    async def answer(self, call: str, token: str, body: bytes) -> bytes:
        """Answer a machine's request; the call can last as long as a long poll. Raises NotFound or
        TryAgain, or Refused if the machine must disconnect permanently.
        """

    async def answer_server(self, call: str, body: bytes) -> bytes:
        """Answer a request that the same provider on another server sent with `OtherServers.ask`.
        The request can concern a machine that is connected to this server. Raises Refused,
        NotFound, TryAgain.
        """


class KeepsNodes(Protocol):
    """A provider whose infrastructure keeps a gang's nodes running for the next gang after the work
    has ended, and bills the nodes in the meantime. A gang counts as ended when the gang's nodes
    have ended or the next gang uses these nodes.
    """

    async def release(self, name: str) -> None:
        """Terminate the nodes that the provider keeps running after this gang's work. Does nothing
        while the gang's work runs. Raises TryAgain, Refused.
        """


class ReplacesNodes(Protocol):
    """A provider that can replace single nodes of a gang while the other nodes go on."""

    async def replace(self, gang: GangSpec, ranks: Sequence[int]) -> None:
        """Request a new node for each of these ranks of an existing gang, in the same place, and
        end what is left of the old nodes. Does nothing for a rank that already got a node in the
        round `gang.round`, running or ended, and nothing if the gang has ended or is being removed.
        `gangs` then reports the new nodes, and the old ones as `GangSeen.replaced`.

        Raises NoCapacity or Refused if a rank gets no node, and TryAgain if nodes may have started.
        Ranks that got a node keep it: a repeated call requests only what is missing. The other
        nodes of the gang go on in any case.
        """


class Closeable(Protocol):
    """A provider that has open files or connections. The provider's gangs keep running after
    `close`."""

    async def close(self) -> None:
        """Close the files and connections. Call this method after all other methods, in the event
        loop in which the provider was used.
        """


SHARES_HOSTS: Ability[SharesHosts] = Ability(
    name="shares hosts",
    methods=("hosts",),
    purpose="Several jobs share a machine. Offers set `shared=True`, and a host is named "
    "`provider/region` (or `provider/zone`) as in its offers. A gang normally runs on one "
    "host. Hosts can also have a `group`: an offer without a zone whose `provider/region` is "
    "the name of the group gives a gang one host for each node. A host that is not `ready` "
    "gets no new job.",
)
HOLDS_VOLUMES: Ability[HoldsVolumes] = Ability(
    name="holds volumes",
    methods=("volumes",),
    purpose="Lists the named volumes with their locations; Cavvy runs a task in the location of "
    "the volumes that the task mounts.",
)
BILLS_VOLUMES: Ability[BillsVolumes] = Ability(
    name="bills volumes",
    methods=("kept_volumes",),
    purpose="Lists the volumes that Cavvy has created, with their sizes and prices; Cavvy records "
    "the volumes' cost between jobs in the ledger.",
)
KEEPS_FOLDERS: Ability[KeepsFolders] = Ability(
    name="keeps folders",
    methods=("folders", "remove_folder"),
    purpose="Named volumes are folders of this machine or of own hosts: `cavvy state list` and "
    "`cavvy state rm volume NAME` list and remove them.",
)
HAS_PARTS: Ability[HasParts] = Ability(
    name="has parts",
    methods=("silent",),
    purpose="Reports the clusters, regions or hosts that did not answer, with the reason. A job "
    "that fits no available offer waits for the missing answers. `FanOut` in "
    "`providers/batch/fan_out.py` sends all queries at the same time, so that a slow answer does "
    "not delay the other answers.",
)
SIGNALS_CHANGES: Ability[SignalsChanges] = Ability(
    name="signals changes",
    methods=("changed",),
    purpose="Reports a change of a gang immediately; without this ability, the control plane "
    "notices a change at the next poll.",
)
RUNS_AGENTS_HERE: Ability[RunsAgentsHere] = Ability(
    name="runs agents here",
    methods=("connect",),
    purpose="Runs agents in the server's process, as the simulator does.",
)
ANSWERS_REQUESTS: Ability[AnswersRequests] = Ability(
    name="answers requests",
    methods=("answers", "invoke"),
    purpose="Passes requests to replicas that are endpoints of the provider. Only the provider's "
    "API can call these endpoints, so the server has a port for each endpoint.",
)
CHECKS_TASKS: Ability[ChecksTasks] = Ability(
    name="checks tasks",
    methods=("check",),
    purpose="Refuses a task before the task runs, and names the field and the reason.",
)
WHO_AM_I: Ability[WhoAmI] = Ability(
    name="identity",
    methods=("whoami",),
    purpose=(
        "`cavvy check`: reports the identity in use, and the resources that this identity "
        "can access."
    ),
)
TELLS_QUOTAS: Ability[TellsQuotas] = Ability(
    name="quotas",
    methods=("quotas", "untold_quotas"),
    purpose="`cavvy nodes quota`: the account's quotas with their use, and the command that "
    "requests "
    "higher quotas. `limit_offer` in `domain/offers.py` limits the capacity of offers to the "
    "unused quota.",
)
STATES_POLICY: Ability[StatesPolicy] = Ability(
    name="policy",
    methods=("policy",),
    purpose="`cavvy check NAME --policy`: the minimum rights that the provider needs.",
)
EXPORTS_TASKS: Ability[ExportsTasks] = Ability(
    name="exports tasks",
    methods=("export",),
    purpose="`cavvy export NAME TASK.YAML`: writes the job that the provider would submit.",
)
RELAYS_AGENTS: Ability[RelaysAgents] = Ability(
    name="relays agents",
    methods=("relay",),
    purpose="Relays requests to `context.server_address` for nodes that cannot reach the control "
    "plane.",
)
SERVES_NODES: Ability[ServesNodes] = Ability(
    name="serves nodes",
    methods=("invite", "machines", "dismiss", "script", "answer"),
    purpose="Lets machines join through the API, and answers their requests.",
)
KEEPS_NODES: Ability[KeepsNodes] = Ability(
    name="keeps nodes",
    methods=("release",),
    purpose="Terminates the idle nodes that the infrastructure keeps for the next gang. "
    "`cavvy nodes down` uses this ability; `remove` does not terminate idle nodes.",
)
REPLACES_NODES: Ability[ReplacesNodes] = Ability(
    name="replaces nodes",
    methods=("replace",),
    purpose="Replaces single nodes of a gang. When a gang loses a node, the other nodes are kept "
    "and wait for the new one; without this ability, all nodes are released and requested again.",
)
CLOSEABLE: Ability[Closeable] = Ability(
    name="closeable", methods=("close",), purpose="Closes files and connections."
)

ABILITIES: Sequence[Ability[Any]] = (
    SHARES_HOSTS,
    HOLDS_VOLUMES,
    BILLS_VOLUMES,
    KEEPS_FOLDERS,
    HAS_PARTS,
    SIGNALS_CHANGES,
    RUNS_AGENTS_HERE,
    ANSWERS_REQUESTS,
    CHECKS_TASKS,
    WHO_AM_I,
    TELLS_QUOTAS,
    STATES_POLICY,
    EXPORTS_TASKS,
    RELAYS_AGENTS,
    SERVES_NODES,
    KEEPS_NODES,
    REPLACES_NODES,
    CLOSEABLE,
)


def ability(provider: Provider, wanted: Ability[_P]) -> _P | None:
    """Return the provider, typed by the ability, or None if its manifest does not declare the
    ability.
    """
    return cast(_P, provider) if wanted in provider.manifest.abilities else None
