"""The seam: "start our agent N times, on these accelerators, under this name, all or none".

Errors a provider may raise (anything else is a bug in the provider):

* ProviderError
  + TryAgain     a passing fault, also when the reply was lost; the same call may work later
  + NoCapacity   this offer cannot be had now; try another
  + Refused      quota, credentials or policy; a person must act
    - QuotaTooSmall   the user's own quota does not allow it
  + NotFound     what was named does not exist
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from cavvy.domain.allocations import Allocation, Host, VolumeLocation
from cavvy.domain.jobs import FailureKind
from cavvy.domain.messages import AgentCalls
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import NetworkNeed, Objection, Scalar, Task, Volume
from cavvy.domain.units import HourlyRate
from cavvy.providers.notices import NoticeSource
from cavvy.providers.state import MemoryProviderState, ProviderState


class ProviderError(Exception):
    """Base of all errors a provider may raise."""


class TryAgain(ProviderError):
    """A passing fault; the same call may work later."""


class NoCapacity(ProviderError):
    """This offer cannot be had now; try another."""


class Refused(ProviderError):
    """Quota, credentials or policy; a person must act."""

    kind = FailureKind.REFUSED


class QuotaTooSmall(Refused):
    """The user's quota does not allow it, whatever is free."""

    kind = FailureKind.QUOTA


class NotFound(ProviderError):
    """What was named does not exist."""


class Feature(StrEnum):
    """What a place may lack; a manifest says why."""

    SPOT = "spot"
    GANG = "gang"  # more than one node
    IMAGE = "image"
    BUILD = "build"  # of an image from the user's own Dockerfile, where the work runs
    LOGIN = "login"  # to an image's registry, by a secret of the task
    VOLUMES = "volumes"  # volumes of its own, by name
    MOUNTS = "mounts"  # folders of the node, and NFS, where a task wants them
    NETWORK = "network"
    DISK = "disk"  # a chosen disk size or type
    SELF_END = "self-end"  # a node ends itself when the control plane is lost
    CAPACITY = "capacity"  # says how much is free
    NOTICE = "notice"  # warns before it takes a node back


class SettingKind(StrEnum):
    """What a setting's value must be."""

    TEXT = "text"
    NUMBER = "number"
    INTEGER = "integer"
    FLAG = "true or false"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSetting:
    """One key of a provider's table `[providers.<name>]`; the docs' table is made from it.

    `default` None: unset; `consequence` says what happens then and otherwise.
    """

    name: str
    kind: SettingKind
    unit: str = ""  # "" where the value has none
    default: Scalar | None = None
    consequence: str
    minimum: float | None = None  # of numbers, inclusive


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a provider says about itself; docs, `cavvy check` and the contract suite read it."""

    name: str
    title: str
    docs: str  # what users should know: a page under docs/, an address, or a sentence
    unsupported: Mapping[Feature, str] = field(
        default_factory=dict
    )  # feature -> why, shown to users
    settings: Sequence[ProviderSetting] = ()
    shares_files: bool = (
        False  # its nodes see the server's own folders; False: checkpoints are handed over
    )
    notices: Sequence[
        NoticeSource
    ] = ()  # what its agents ask on their nodes; the provider puts it in their configs
    notice: timedelta | None = (
        None  # how long before its end a node is told, at the least; None: it is not
    )
    visibility_delay: timedelta = timedelta(
        minutes=2
    )  # how long after a launch `gangs` may not show it yet; 0: never


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEndpoint:
    """How the agents of a gang reach the control plane: `address` is unix:/path or
    http(s)://host:port.
    """

    address: str
    token: str  # good for this gang and the agent's routes only


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSpec:
    """What to start. Everything else (the work, its secrets) the agent gets with its claim."""

    name: str  # deterministic and unique; carries the installation's id; at most 63 of [a-z0-9-]
    installation: str
    offer: Offer
    nodes: int
    agent_endpoint: AgentEndpoint
    lease: timedelta  # how long an agent works on without hearing from the control plane
    longest: timedelta | None = (
        None  # the work is ended when it has run so long; None: nobody knows how long it runs
    )
    allocations: Sequence[Allocation] = ()  # by rank, on shared hosts
    labels: Mapping[str, str] = field(default_factory=dict)  # project, job, user tags
    # Of a path that is a mount point when the agent comes nothing more is done. One within the
    # working folder, which the agent makes anew, may be mounted as /cavvy/volumes/ and the first 12
    # hex digits of the path's SHA-256.
    volumes: Sequence[Volume] = ()
    grace: timedelta = timedelta(seconds=10)
    disk_gib: int | None = None  # at least so large a disk; None: the provider's own default
    disk_type: str | None = None  # by the provider's name
    network: NetworkNeed | None = None
    image: str | None = (
        None  # for a place that starts its nodes from images; elsewhere the agent runs it
    )


class GangState(StrEnum):
    QUEUED = "queued"  # accepted by the place's own queue; not lost
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """One node as the provider itself sees it. Its life is billed from `started_at` to
    `ended_at`.
    """

    rank: int
    engine_id: str
    started_at: datetime | None = None
    ended_at: datetime | None = None
    address: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSeen:
    """One gang of this installation as the provider sees it now, or remembers it."""

    name: str
    state: GangState
    engine_id: str = ""
    reason: str = ""  # for people: why it waits or ended
    preempted: bool = False  # ended because the place took it back
    exit_code: int | None = None
    eta: datetime | None = None
    nodes: Sequence[NodeSeen] = ()
    rates: Sequence[
        tuple[datetime, HourlyRate]
    ] = ()  # of one node, since when; () means the offer's rate throughout


class Provider(Protocol):
    """What every place must be able to do. No method sleeps or waits for a state; every call is
    idempotent.
    """

    manifest: Manifest

    async def offers(self) -> Sequence[Offer]:
        """What can be had and at which price, now. Keys are unique. Raises TryAgain, Refused."""

    async def launch(self, gang: GangSpec) -> None:
        """Ask for all nodes or none. A name that exists already (running or ended) is a no-op,
        never a second gang.

        Raises NoCapacity, Refused (nothing was started), TryAgain (perhaps it was: look with
        `gangs`).
        """

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        """This installation's gangs, or the one named; [] if the place knows none. Raises TryAgain.

        An ended gang is remembered for at least an hour, so that its bill can be closed.
        """

    async def remove(self, name: str) -> None:
        """Start giving the gang back. Gone already is a no-op. Raises TryAgain."""


@runtime_checkable
class SharesHosts(Protocol):
    """A provider whose hosts carry several jobs; the control plane keeps the books of who holds
    what.
    """

    async def hosts(self) -> Sequence[Host]: ...


@runtime_checkable
class HoldsVolumes(Protocol):
    """A provider whose named volumes can be had only where they lie; a task that names one is
    placed there.
    """

    async def volumes(self) -> Sequence[VolumeLocation]:
        """Those that exist. Raises TryAgain, Refused."""


@runtime_checkable
class HasParts(Protocol):
    """A provider of several clusters, regions or hosts; those that answer are offered, whoever
    else is silent.
    """

    def silent(self) -> Sequence[str]:
        """Which of them `offers` did not hear when it was last asked, each with the reason.

        What fits nowhere may fit there: no job is given up because of them. Where none answers
        `offers` raises.
        """


@runtime_checkable
class SignalsChanges(Protocol):
    """A provider that can say at once when a gang changed; losing a signal costs a poll, never
    correctness.
    """

    async def changed(self) -> str:
        """Wait for the next change and return the gang's name."""


@runtime_checkable
class RunsAgentsHere(Protocol):
    """A provider whose agents live in this process and speak to the control plane by calls."""

    def connect(self, control_plane: AgentCalls | None) -> None:
        """Agents speak to `control_plane` from now on; None: the control plane is gone, they work
        on alone.
        """


@runtime_checkable
class ChecksTasks(Protocol):
    """A provider that can say beforehand what of a task it cannot honour."""

    def check(self, task: Task) -> Sequence[Objection]:
        """What of the task cannot be honoured; () where all can."""


@runtime_checkable
class WhoAmI(Protocol):
    """A provider that can say as whom it would act and what it found; `cavvy check` shows it."""

    async def whoami(self) -> Sequence[tuple[str, str]]:
        """(what, value) pairs, such as ("user", "ann"), ("GPUs", "8 x H100"). Raises TryAgain,
        Refused.
        """


@runtime_checkable
class StatesPolicy(Protocol):
    """A provider that can say which rights it needs; `cavvy check NAME --policy` prints them."""

    def policy(self) -> str:
        """The least that its account must be allowed, in the place's own language; asks nobody."""


@runtime_checkable
class ExportsTasks(Protocol):
    """A provider that can write what it would submit; `cavvy export NAME TASK.YAML` prints it."""

    def export(self, task: Task, offer: Offer | None, nodes: int) -> str:
        """The task's work in the place's own language, without Cavvy's agent; None: wherever it
        fits. Asks nobody.
        """


@runtime_checkable
class RelaysAgents(Protocol):
    """A provider whose nodes cannot reach the control plane: it carries their agents' requests
    itself.

    Tunnels, mailboxes and streams are made here, as this provider's nodes need them; what arrives
    goes to `ProviderContext.server_address`, byte for byte, and its agents' configurations name the
    near end.
    """

    async def relay(self) -> None:
        """Carry for every gang of this installation until cancelled; a lost line is taken up
        again.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinInvitation:
    """Lines of which one, pasted into a machine's shell, makes it a node. They hold a token that
    is good once.
    """

    shell: str
    python: str  # for machines without curl
    expires_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedMachine:
    """A machine that joined."""

    name: str
    state: str  # for people: up, silent, leaving, left
    has: str  # for people: what it has
    joined_at: datetime
    heard_at: datetime | None = None


@runtime_checkable
class ServesNodes(Protocol):
    """A provider whose machines call us. The API carries what they say and understands none of
    it.
    """

    async def invite(
        self, *, name: str | None, group: str | None, valid: timedelta
    ) -> JoinInvitation:
        """`group`: machines of one network, which can carry a gang together. Raises Refused."""

    async def machines(self) -> Sequence[JoinedMachine]:
        """Those that joined and were not dismissed."""

    async def dismiss(self, name: str) -> None:
        """Its work ends, its token opens nothing any more. Raises NotFound."""

    async def script(self) -> bytes:
        """What the pasted line fetches and runs; the same for all, without any secret."""

    async def answer(self, call: str, token: str, body: bytes) -> bytes:
        """Answer a machine; may take as long as a long poll. Raises Refused (go for good),
        NotFound, TryAgain.
        """


@runtime_checkable
class Closeable(Protocol):
    """A provider that holds files or connections of its own; what it launched goes on without
    it.
    """

    async def close(self) -> None:
        """Let them go. Called last, in the event loop that used the provider."""


def wall_clock() -> datetime:
    """The time now; the default of a context's clock."""
    return datetime.now(UTC)  # noqa: TID251 - tests and the simulation give another


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEndpoint:
    """How nodes from anywhere reach the control plane: HTTPS, by a certificate that they know by
    its hash.

    GET {address}/boot/v1/HASH gives everybody the file of that SHA-256; nodes check it. The calls
    that pack something block for seconds the first time.
    """

    address: str  # https://host:port
    pin: str  # SHA-256 of the certificate, in hexadecimal
    key_pin: str  # of its public key, as `curl --pinnedpubkey` takes it
    agent: Callable[[], str]  # the hash of the agent's archive
    pythons: Callable[
        [], Mapping[str, str]
    ]  # by `uname -sm`: the hash of a .tar.gz with a Python that needs nothing
    publish: Callable[[bytes], str]  # give out a file of the provider's own; its hash
    claim_token: Callable[[str, int], str]  # of a gang's rank: good for one claim and nothing else


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderContext:
    """What a provider gets when it is made. `settings` is its own table, checked and with
    defaults filled in.
    """

    installation: str
    home: Path  # its own folder on this server, mode 0700: sockets, caches, keys of connections
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    state: ProviderState = field(default_factory=MemoryProviderState)  # shared by all servers
    agent_command: Sequence[
        str
    ] = ()  # starts the agent on this machine; the config file's path is appended
    agent_archive: Callable[[], bytes] | None = (
        None  # the agent as one file that any Python >= 3.8 runs
    )
    server_address: str = ""  # where the control plane listens: unix:/path or http(s)://host:port
    node_endpoint: NodeEndpoint | None = (
        None  # None: `server.tls_listen` is not set, so that nodes cannot come to us
    )
    now: Callable[[], datetime] = wall_clock
