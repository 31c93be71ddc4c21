"""The provider interface: "start the agent N times, on these accelerators, under this name, all or
none".

Errors a provider may raise (anything else is a bug in the provider):

* ProviderError
  * TryAgain: a temporary fault, or a lost reply; the same call may succeed later.
  * NoCapacity: this offer is unavailable now; the caller should try another offer.
  * Refused: a quota, the credentials or a policy forbid the call; a person must act.
    * QuotaTooSmall: the user's own quota is too small for the request.
  * NotFound: the named object does not exist.
  * KeyFileRefused: a project's key file contains more than a key; a person must change the file.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from cavvy.domain.allocations import Allocation
from cavvy.domain.gangs import GangSeen as GangSeen
from cavvy.domain.gangs import GangState as GangState
from cavvy.domain.gangs import NodeSeen as NodeSeen
from cavvy.domain.jobs import FailureKind
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import NetworkNeed, Scalar, TopologyNeed, Transfer, Volume
from cavvy.domain.values import Struct, field, replace
from cavvy.providers.notices import NoticeSource
from cavvy.providers.state import MemoryProviderState, ProviderState

_P = TypeVar("_P")


class OtherServers(Protocol):
    """The servers that share this installation's database, by server ID. If a machine is connected
    to another server, a provider reaches it through that other server.
    """

    @property
    def me(self) -> str:
        """The ID of this server."""

    @property
    def addresses(self) -> Sequence[str]:
        """The addresses at which nodes reach the live servers, including this server. For
        a server behind a load balancer, the address is the server's own, not the load balancer's.
        """

    def is_alive(self, server: str) -> bool:
        """Return whether another server with this ID is alive."""

    async def ask(self, server: str, provider: str, call: str, body: bytes) -> bytes:
        """Ask the instance of `provider` that runs on another server, and return the answer
        (`ServesNodes.answer_server`). Raises OSError if the other server does not answer; the other
        server may nevertheless have executed the request. The other server can take up to a minute
        to answer.
        """


class ProviderError(Exception):
    """The base class of all errors that a provider may raise."""


class TryAgain(ProviderError):
    """A temporary fault; the same call may succeed later."""


class NoCapacity(ProviderError):
    """Raised if this offer is unavailable now; the caller should try another offer."""


class Refused(ProviderError):
    """Raised if a quota, the credentials or a policy forbid the call; a person must act."""

    kind = FailureKind.REFUSED


class KeyFileRefused(ProviderError):
    """Raised if a project sets a key file that could harm the server. Such a file could cause the
    server to read its own files, or to send requests to addresses that do not belong to the
    provider.
    """


class QuotaTooSmall(Refused):
    """Raised if the user's quota is too small for the request, even if capacity is free."""

    kind = FailureKind.QUOTA


class PartlyUnknown(TryAgain):
    """Raised if only some of the provider's clusters, regions or hosts reported their gangs. `seen`
    are the reported gangs; further gangs may exist.
    """

    def __init__(self, message: str, seen: "Sequence[GangSeen]") -> None:
        super().__init__(message)
        self.seen = seen


class NotFound(ProviderError):
    """Raised if the named object does not exist."""


class Feature(StrEnum):
    """Features that a provider may lack. If a provider lacks a feature, the provider's manifest
    states the reason.
    """

    SPOT = "spot"
    GANG = "gang"  # gangs of more than one node
    REPAIR = "repair"  # replaces single nodes of a gang that loses them
    IMAGE = "image"
    BUILD = "build"  # can build the image on the node, from the user's own Dockerfile
    LOGIN = "login"  # can log in to an image's registry with a secret of the task
    VOLUMES = "volumes"  # mounts the provider's own volumes, by name
    MOUNTS = "mounts"  # mounts folders of the node, and NFS exports, for the task
    NETWORK = "network"
    TUNNEL = "tunnel"  # encrypts the traffic between nodes, for which an agent needs rights
    DISK = "disk"  # accepts a disk size or type
    SELF_END = "self-end"  # a node terminates itself if it loses the control plane
    RESULTS = "results"  # keeps a node's exit code, log and files after the node's end
    CAPACITY = "capacity"  # reports free capacity
    NOTICE = "notice"  # announces that a node will be reclaimed


def explain_results(loss: str, waits: str) -> str:
    """Return why nodes do not keep their results (`Feature.RESULTS`). `loss` is a clause that says
    when a node's disk is lost, and `waits` names what waits for the server.
    """
    return (
        f"{loss}. If the server is unreachable when the work ends, the results are stored in the "
        f"bucket in `checkpoint.storage` or `server.results_url`; without a bucket, {waits} waits "
        "until its lease ends"
    )


class SettingKind(StrEnum):
    """The type of a setting's value."""

    TEXT = "text"
    NUMBER = "number"
    INTEGER = "integer"
    FLAG = "true or false"
    KEY_FILE = "key file"  # the path of a file that contains an API key


class ProviderSetting(Struct, frozen=True, kw_only=True):
    """One key of a provider's table `[providers.<name>]`. The docs' table of settings is generated
    from these keys.

    `default` is None if the setting has no default value. `consequence` describes what the setting
    does, and what happens if it is not set.
    """

    name: str
    kind: SettingKind
    unit: str = ""  # "" if the value has no unit
    default: Scalar | None = None
    consequence: str
    minimum: float | None = None  # bounds of a number, inclusive
    maximum: float | None = None
    # True: a project may set it for its own account
    of_project: bool = False
    # True: `cavvy setup` asks for it
    of_setup: bool = False

    def for_projects(self) -> "ProviderSetting":
        """Return the setting as one that a project may set for its own account. An admin of a
        project must not choose paths, addresses or programs of the server, so the setting must not
        contain one. A setting of the kind KEY_FILE is then required.
        """
        return replace(self, of_project=True)

    def for_setup(self) -> "ProviderSetting":
        """Return the setting as one that `cavvy setup` asks for, because its value differs between
        accounts and most users know it. Settings are asked for in the order of the manifest; a
        setting with the name `key_file` is always asked for, and first.
        """
        return replace(self, of_setup=True)


class Ability(Struct, Generic[_P], frozen=True, kw_only=True):
    """One optional ability; `_P` is the protocol that providers with this ability implement."""

    name: str
    methods: tuple[str, ...]
    purpose: str  # description for authors of providers, shown on the reference page


class ServicePage(Struct, frozen=True, kw_only=True):
    """What `cavvy check` shows of a cloud's service whose name stands for the provider: `cloud` is
    the provider in the catalog that has the prices of its machines, and `facts` and `missing` are
    pairs of a subject and a text."""

    title: str
    cloud: str
    facts: Sequence[tuple[str, str]]
    missing: Sequence[tuple[str, str]]


class Manifest(Struct, frozen=True, kw_only=True):
    """A provider's description of itself, for the docs, `cavvy check` and the contract suite."""

    name: str
    title: str
    docs: str  # notes for users: a page under docs/, a URL, or a sentence
    # What makes the provider, as MODULE:NAME, so that manifests import nothing that opens
    # connections: a provider class, or a function, that takes (manifest, context). If `layer` is
    # set, the class of a cloud, which the layer turns into a provider. "" if the provider's own
    # package defines `make(context)`.
    cloud: str = ""
    # A function of a shared layer, as MODULE:NAME. It takes (manifest, context, cloud).
    layer: str = ""
    # True: it rents nothing, and `cavvy check` lists it only if it is configured
    test_double: bool = False
    unsupported: Mapping[Feature, str] = field(
        default_factory=dict
    )  # feature -> reason, shown to users
    settings: Sequence[ProviderSetting] = ()
    # A module that defines clean_key(text) -> str. The function removes everything from a project's
    # key file that does not identify the account, or raises KeyFileRefused. "" if the key files of
    # this provider contain only keys.
    project_key: str = ""
    # why projects have no accounts of their own here; "" if they have
    no_project_accounts: str = ""
    abilities: Sequence[Ability[Any]] = ()  # abilities beyond the four methods of the interface
    no_quotas: str = ""  # why no program can read the account's quotas; "" if not stated
    options: Mapping[str, str] = field(
        default_factory=dict
    )  # name in a task's `resources.options` -> its meaning
    rights: str = ""  # the minimum rights that the API key or the account needs; "" if not stated
    services: Mapping[str, ServicePage] = field(
        default_factory=dict
    )  # name of a cloud's service that stands for the provider -> what is special about it
    prices: str = ""  # a module that defines SOURCE: PriceSource, for `cavvy catalog refresh`
    shares_files: bool = (
        # True: its nodes can access the server's own folders. False: checkpoints are uploaded.
        False
    )
    notices: Sequence[NoticeSource] = ()  # where the provider's agents poll for preemption notices
    notice: timedelta | None = (
        # the minimum time between a notice and the reclaim; None if the provider gives no notice
        None
    )
    only_sessions: bool = (
        False  # True: it runs only interactive sessions, such as `cavvy dev` makes
    )
    only_services: bool = False  # True: it runs only replicas of services, as `cavvy serve` starts
    # True: a named volume that does not exist here is made, even if the task states no size
    makes_volumes: bool = False
    keeps_topology: bool = False  # True: it starts the nodes as `GangSpec.topology` requires
    # True: `GangSeen.cancelled` shows whether a person cancelled a gang. The control plane waits
    # for this value before it replaces a reclaimed gang.
    reports_cancelled: bool = False
    visibility_delay: timedelta = timedelta(
        minutes=2
    )  # a new gang may be missing from `gangs` for this long; 0 if it is always listed

    @property
    def project_settings(self) -> Sequence[str]:
        """The names of the settings that a project may set (`ProviderSetting.for_projects`); empty
        if projects cannot have accounts here."""
        return [each.name for each in self.settings if each.of_project]


class AgentEndpoint(Struct, frozen=True, kw_only=True):
    """The endpoint at which a gang's agents reach the control plane. `address` is unix:/path or
    http(s)://host:port.
    """

    address: str
    token: str  # valid only for this gang, and only for requests that agents make


class GangSpec(Struct, frozen=True, kw_only=True):
    """The gang to start. The gang spec contains only what a provider needs to start nodes: an agent
    receives the command and the secrets when it claims its rank.
    """

    name: str  # unique, deterministic, contains the installation's id; at most 63 of [a-z0-9-]
    installation: str
    offer: Offer
    nodes: int
    agent_endpoint: AgentEndpoint
    lease: timedelta  # how long an agent keeps working while the control plane does not answer
    # The number of the job's attempt. Each node that replaces a lost one (`ReplacesNodes`) belongs
    # to the round that asked for it.
    round: int = 1
    renews: bool = False  # whether the round replaces lost nodes
    longest: timedelta | None = (
        None  # the work is stopped after this running time; None if there is no known limit
    )
    allocations: Sequence[Allocation] = ()  # on shared hosts: one allocation per rank
    labels: Mapping[str, str] = field(default_factory=dict)  # project, job, user tags
    user: str = ""  # the job's user, for clusters on which each user's jobs run as this user
    # the task's parameters, for services that show a job's parameters to their users
    params: Mapping[str, Scalar] = field(default_factory=dict)
    # the task's inputs, for services that can place files on a node before the agent starts
    inputs: Sequence[Transfer] = ()
    # If a volume's path is already a mount point when the agent starts, the agent leaves the path
    # as it is. Since the agent recreates the working folder, a provider may mount a volume within
    # that folder at /cavvy/volumes/ plus the first 12 hex digits of the SHA-256 of the volume's
    # path.
    volumes: Sequence[Volume] = ()
    grace: timedelta = timedelta(seconds=10)
    disk_gib: int | None = None  # minimum disk size; if None, the provider's default
    disk_type: str | None = None  # a disk type, in the provider's own naming
    network: NetworkNeed | None = None
    # which nodes are close to each other, for providers that choose the nodes themselves
    topology: TopologyNeed | None = None
    options: Mapping[str, Any] = field(
        default_factory=dict
    )  # the options that the task sets for this provider
    # the task's environment variables without secrets, for services that start the task's program
    # without an agent
    env: Mapping[str, str] = field(default_factory=dict)
    image: str | None = (
        # for providers that start nodes from images; with other providers, the agent runs the image
        None
    )

    @property
    def token_name(self) -> str:
        """The name for which the tokens of new nodes are made: those of nodes that replace lost
        ones differ from those of the lost ones.
        """
        return f"{self.name}#{self.round}" if self.renews else self.name

    @property
    def job_limit(self) -> timedelta | None:
        """The time after which a service may end the gang's job: the work's longest running time,
        and the time for the last checkpoint. None if there is no known limit.
        """
        return None if self.longest is None else self.longest + self.grace + self.lease


class Provider(Protocol):
    """The methods that every provider implements. No method sleeps or waits for a state change.
    Every call is idempotent.
    """

    manifest: Manifest

    async def offers(self) -> Sequence[Offer]:
        """Return the capacity available now, with prices. Keys are unique. Raises TryAgain,
        Refused."""

    async def launch(self, gang: GangSpec) -> None:
        """Request all nodes of the gang or none of the nodes. Does nothing if a gang with this name
        exists, running or ended.

        Raises NoCapacity or Refused if no node keeps running. Raises TryAgain if the gang may have
        started; a later call of `gangs` reports whether the gang has started. If the provider
        started machines and then deleted the machines, `gangs` reports these machines as
        `GangSeen.rolled_back` after the gang is removed.
        """

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        """Return this installation's gangs, or only the gang with this name; return [] if the
        provider has no gang with this name. Raises TryAgain, or PartlyUnknown if only some gangs
        are known.

        An ended gang is listed for at least an hour, so that its bill can be closed.
        """

    async def remove(self, name: str) -> None:
        """Start removing the gang; do nothing if the gang no longer exists. Raises TryAgain."""


def wall_clock() -> datetime:
    """Return the current time in UTC; the default clock of a provider context."""
    return datetime.now(UTC)  # noqa: TID251 - tests and the simulator pass another clock


class NodeEndpoint(Struct, frozen=True, kw_only=True):
    """The HTTPS endpoint at which nodes on any network reach the control plane. Nodes verify the
    endpoint's certificate by its hash.

    GET {address}/boot/v1/HASH returns the file with that SHA-256 to any caller; nodes verify the
    file. The first call of `agent` or `pythons` packs an archive, which blocks for seconds.
    """

    address: str  # https://host:port
    pin: str  # SHA-256 of the certificate, in hexadecimal
    key_pin: str  # hash of the certificate's public key, as for `curl --pinnedpubkey`
    agent: Callable[[], str]  # the hash of the agent's archive
    pythons: Callable[
        [], Mapping[str, str]
    ]  # output of `uname -sm` -> hash of the .tar.gz with a Python runtime for this platform
    publish: Callable[[bytes], str]  # makes the server serve a file; returns the file's hash
    # (`GangSpec.token_name`, rank) -> a token that is valid for one claim only
    claim_token: Callable[[str, int], str]


class ProviderContext(Struct, frozen=True, kw_only=True):
    """A provider's dependencies. `settings` is the provider's table in the configuration, after
    validation and with defaults filled in.
    """

    installation: str
    home: Path  # the provider's own folder on this server, mode 0700: sockets, caches, keys
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    server_folder: Path | None = None  # the server's state folder, to hide from jobs on its machine
    state: ProviderState = field(
        default_factory=MemoryProviderState
    )  # the provider's documents, shared by all servers
    agent_command: Sequence[
        str
    ] = ()  # the command that starts the agent on this machine; append the config file's path
    agent_archive: Callable[[], bytes] | None = (
        None  # the agent as one file that any Python >= 3.8 runs
    )
    servers: OtherServers | None = None  # None if no other servers use the database
    server_address: str = ""  # the control plane's address: unix:/path or http(s)://host:port
    node_endpoint: NodeEndpoint | None = (
        None  # None if `server.tls_listen` is not set; nodes then cannot reach the server
    )
    # the catalog's offer for an instance type of a provider; None if it is unknown
    find_instance: Callable[[str, str], Offer | None] = lambda provider, instance: None
    # the catalog's on-demand and spot offers of an instance type of a provider
    list_instance: Callable[[str, str], Sequence[Offer]] = lambda provider, instance: ()
    # the catalog's on-demand and spot offers of a provider, for clouds that report no prices
    list_prices: Callable[[str], Sequence[Offer]] = lambda provider: ()
    now: Callable[[], datetime] = wall_clock
