"""The seam: "start the agent N times, on these accelerators, under this name, all or none".

Errors a provider may raise (anything else is a bug in the provider):

* ProviderError
  + TryAgain     a temporary fault, or a lost reply; the same call may succeed later
  + NoCapacity   this offer is unavailable now; try another
  + Refused      quota, credentials or policy; a person must act
    - QuotaTooSmall   the user's own quota does not allow it
  + NotFound     the named object does not exist
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from cavvy.domain.allocations import Allocation
from cavvy.domain.gangs import GangSeen as GangSeen
from cavvy.domain.gangs import GangState as GangState
from cavvy.domain.gangs import NodeSeen as NodeSeen
from cavvy.domain.jobs import FailureKind
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import NetworkNeed, Scalar, Volume
from cavvy.providers.abilities import Ability
from cavvy.providers.notices import NoticeSource
from cavvy.providers.state import MemoryProviderState, ProviderState


class ProviderError(Exception):
    """Base of all errors that a provider may raise."""


class TryAgain(ProviderError):
    """A temporary fault; the same call may succeed later."""


class NoCapacity(ProviderError):
    """This offer is unavailable now; try another."""


class Refused(ProviderError):
    """Quota, credentials or policy; a person must act."""

    kind = FailureKind.REFUSED


class QuotaTooSmall(Refused):
    """The user's quota does not allow it, regardless of free capacity."""

    kind = FailureKind.QUOTA


class NotFound(ProviderError):
    """The named object does not exist."""


class Feature(StrEnum):
    """Features that a provider may lack; its manifest says why."""

    SPOT = "spot"
    GANG = "gang"  # gangs of more than one node
    IMAGE = "image"
    BUILD = "build"  # supports building the image from the user's own Dockerfile, on the node
    LOGIN = "login"  # supports login to an image's registry with a secret of the task
    VOLUMES = "volumes"  # supports the provider's own volumes, by name
    MOUNTS = "mounts"  # supports folders of the node, and NFS, mounted for the task
    NETWORK = "network"
    DISK = "disk"  # supports a chosen disk size or type
    SELF_END = "self-end"  # a node ends itself if it loses the control plane
    CAPACITY = "capacity"  # reports free capacity
    NOTICE = "notice"  # announces that it will reclaim a node


class SettingKind(StrEnum):
    """The type of a setting's value."""

    TEXT = "text"
    NUMBER = "number"
    INTEGER = "integer"
    FLAG = "true or false"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderSetting:
    """One key of a provider's table `[providers.<name>]`; the docs' table is generated from it.

    `default` None: unset; `consequence` describes the effect of both.
    """

    name: str
    kind: SettingKind
    unit: str = ""  # "" if the value has no unit
    default: Scalar | None = None
    consequence: str
    minimum: float | None = None  # bounds of a number, inclusive


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A provider's description of itself, for docs, `cavvy check` and the contract suite."""

    name: str
    title: str
    docs: str  # notes for users: a page under docs/, a URL, or a sentence
    test_double: bool = False  # it rents nothing; `cavvy check` lists it only if it is configured
    unsupported: Mapping[Feature, str] = field(
        default_factory=dict
    )  # feature -> reason, shown to users
    settings: Sequence[ProviderSetting] = ()
    abilities: Sequence[Ability[Any]] = ()  # abilities beyond the four methods of the interface
    options: Mapping[str, str] = field(
        default_factory=dict
    )  # names in a task's `resources.options` -> their meaning
    prices: str = ""  # a module that defines SOURCE: PriceSource, for `cavvy catalog refresh`
    shares_files: bool = (
        False  # its nodes see the server's own folders; False: checkpoints are uploaded
    )
    notices: Sequence[
        NoticeSource
    ] = ()  # notice addresses that its agents poll; the provider puts them in their configurations
    notice: timedelta | None = (
        None  # minimum notice before a node is reclaimed; None: there is none
    )
    visibility_delay: timedelta = timedelta(
        minutes=2
    )  # for this long after a launch, `gangs` may not list it; 0: it always does


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEndpoint:
    """How the agents of a gang reach the control plane: `address` is unix:/path or
    http(s)://host:port.
    """

    address: str
    token: str  # valid for this gang and the agents' routes only


@dataclass(frozen=True, slots=True, kw_only=True)
class GangSpec:
    """The gang to start. The agent receives everything else (the work, its secrets) with its
    claim."""

    name: str  # deterministic, unique, with the installation's id; at most 63 of [a-z0-9-]
    installation: str
    offer: Offer
    nodes: int
    agent_endpoint: AgentEndpoint
    lease: timedelta  # how long an agent continues without an answer from the control plane
    longest: timedelta | None = (
        None  # the work is ended after this running time; None: it is unknown
    )
    allocations: Sequence[Allocation] = ()  # allocations by rank, on shared hosts
    labels: Mapping[str, str] = field(default_factory=dict)  # project, job, user tags
    # Paths that are mount points when the agent starts need no further step. A path within the
    # working folder, which the agent recreates, may be mounted at /cavvy/volumes/ plus the first 12
    # hex digits of the path's SHA-256.
    volumes: Sequence[Volume] = ()
    grace: timedelta = timedelta(seconds=10)
    disk_gib: int | None = None  # minimum size of the disk; None: the provider's own default
    disk_type: str | None = None  # the provider's own name of a disk type
    network: NetworkNeed | None = None
    options: Mapping[str, Any] = field(
        default_factory=dict
    )  # options of the task for this provider
    image: str | None = (
        None  # for a provider that starts its nodes from images; elsewhere the agent runs it
    )


class Provider(Protocol):
    """The methods that every provider implements. No method sleeps or waits for a state change;
    every call is idempotent.
    """

    manifest: Manifest

    async def offers(self) -> Sequence[Offer]:
        """The capacity available now, with prices. Keys are unique. Raises TryAgain, Refused."""

    async def launch(self, gang: GangSpec) -> None:
        """Request all nodes or none. An existing name (running or ended) is a no-op, never a second
        gang.

        Raises NoCapacity, Refused (nothing was started), TryAgain (it may have started: check with
        `gangs`).
        """

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        """This installation's gangs, or the named one; [] if the provider knows none. Raises
        TryAgain.

        An ended gang is listed for at least an hour, so that its bill can be closed.
        """

    async def remove(self, name: str) -> None:
        """Start removing the gang. A no-op if it is gone. Raises TryAgain."""


def wall_clock() -> datetime:
    """The time now; the default of a context's clock."""
    return datetime.now(UTC)  # noqa: TID251 - tests and the simulator pass another


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEndpoint:
    """How nodes anywhere reach the control plane: HTTPS, with a certificate that they verify by its
    hash.

    GET {address}/boot/v1/HASH returns the file with that SHA-256 to any caller; nodes verify it.
    Calls that pack something block for seconds the first time.
    """

    address: str  # https://host:port
    pin: str  # SHA-256 of the certificate, in hexadecimal
    key_pin: str  # hash of its public key, in the form of `curl --pinnedpubkey`
    agent: Callable[[], str]  # the hash of the agent's archive
    pythons: Callable[
        [], Mapping[str, str]
    ]  # the hash of a .tar.gz with a self-contained Python, by `uname -sm`
    publish: Callable[[bytes], str]  # serve a file of the provider's own; returns its hash
    claim_token: Callable[[str, int], str]  # token of a gang's rank, valid for one claim only


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderContext:
    """A provider's dependencies. `settings` is the provider's own table, checked, with defaults
    filled in.
    """

    installation: str
    home: Path  # its own folder on this server, mode 0700: sockets, caches, connection keys
    settings: Mapping[str, Scalar] = field(default_factory=dict)
    state: ProviderState = field(
        default_factory=MemoryProviderState
    )  # documents shared by all servers
    agent_command: Sequence[
        str
    ] = ()  # the command that starts the agent on this machine; append the config file's path
    agent_archive: Callable[[], bytes] | None = (
        None  # the agent as one file that any Python >= 3.8 runs
    )
    server_address: str = ""  # the control plane's address: unix:/path or http(s)://host:port
    node_endpoint: NodeEndpoint | None = (
        None  # None: None: `server.tls_listen` is not set, so nodes cannot call the server
    )
    now: Callable[[], datetime] = wall_clock
