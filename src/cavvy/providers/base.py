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
    abilities: Sequence[Ability[Any]] = ()  # what it can do beyond the four methods of the seam
    prices: str = ""  # a module that defines SOURCE: PriceSource, for `cavvy catalog refresh`
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
