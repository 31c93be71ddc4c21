"""The interface that each cloud implements. The interface consists of six calls and the cloud's
traits.

The six calls raise `CloudFault`, or Refused if a person must change the setup. `read_fault` turns a
fault into an error of the provider interface.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

from cavvy.domain.offers import Offer
from cavvy.domain.values import Struct, field
from cavvy.providers.base import (
    GangSpec,
    NoCapacity,
    NotFound,
    ProviderError,
    QuotaTooSmall,
    Refused,
    TryAgain,
)
from cavvy.providers.hosts.userdata import MetadataService

NAME_PREFIX = "cv-"  # the start of the names of all machines that Cavvy makes

_NO_REPLY = frozenset({0, 408})
# the API does not have the method, or not this version of HTTP: a repetition would fail too
_NEVER = frozenset({501, 505})
_LATER = frozenset({409, 425, 429})
_DENIED = frozenset({401, 403})


class BillStart(StrEnum):
    """The event that begins the billing of a machine."""

    CREATION = "creation"  # a machine is billed from the request for it on, including its boot
    RUNNING = "running"  # a machine is billed once its state is `RUNNING`


class BillEnd(StrEnum):
    """The event that ends the billing of a machine."""

    SHUTDOWN = "shutdown"  # a machine that shuts itself down is no longer billed
    DELETION = "deletion"  # a machine is billed until the API deletes it
    REPORTED = "reported"  # only the API knows, and reports the end with the state `ENDED`


class MachineState(StrEnum):
    """The state of a machine, as its cloud reports it."""

    # the request is accepted, but not billed; the cloud may still refuse it
    REQUESTED = "requested"
    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"  # switched off, but not deleted; the layer then deletes it
    ENDED = "ended"  # deleted, or being deleted: no longer billed


class StateNames(dict[str, MachineState]):
    """The states of machines, by the names that an API gives to them; each argument contains names,
    separated by spaces. Every other name stands for a machine that runs, because a machine in an
    unknown state may be billed.
    """

    def __init__(self, *, starting: str = "", stopped: str = "", ended: str = "") -> None:
        super().__init__(
            {name: MachineState.STARTING for name in starting.split()}
            | {name: MachineState.STOPPED for name in stopped.split()}
            | {name: MachineState.ENDED for name in ended.split()}
        )

    def __missing__(self, name: str) -> MachineState:
        return MachineState.RUNNING


class Reach(StrEnum):
    """The method by which the agent is copied to a machine and communicates with the server."""

    USER_DATA = "user data"  # user data starts the agent, which calls the server over TLS
    # the server connects to the machine by SSH and starts the agent, whose requests use SSH too
    SSH = "ssh"
    NONE = "none"  # no agent runs on the machine


class SshTarget(Struct, frozen=True, kw_only=True):
    """The address of a machine's SSH server, and the user that can log in with the public key."""

    address: str
    port: int = 22
    user: str = "root"


class CloudTraits(Struct, frozen=True, kw_only=True):
    """The limits and the behaviour of a cloud. All abilities are optional. The defaults of
    `name_limit`, `list_lag` and `user_data_limit` are assumptions, for clouds that document none.
    """

    name_limit: int = 63  # maximum characters of a machine's name; at least 40 of [a-z0-9-]
    tags: bool = False  # machines get `MachineRequest.tags`, and `list` returns them
    # a repeated request with the same token returns the machines of the first request
    tokens: bool = False
    # one request starts all machines of a gang or none, each with its own name and user data
    atomic_count: bool = False
    # `create` needs several calls, and a machine is off (`STOPPED`) until the last of them: a
    # machine of an unfinished launch that is off was never started, and is replaced
    created_off: bool = False
    # `list` and `get` may not return machines that are younger than this
    list_lag: timedelta = timedelta(minutes=1)
    # how long `list` or `get` returns an ended machine; 0 if the machine disappears at once
    ended_listed: timedelta = timedelta(0)
    launch_every: timedelta = timedelta(0)  # the minimum time between two requests for machines
    user_data_limit: int = 65536  # maximum size of user data in bytes
    bill_starts: BillStart = BillStart.CREATION
    bill_ends: BillEnd = BillEnd.DELETION
    # where nodes look up their address; if None, they use their address on the route to the server
    metadata: MetadataService | None = None
    # the default; the provider's setting `reach_by_ssh` selects SSH instead
    reach: Reach = Reach.USER_DATA
    quota_codes: frozenset[str] = frozenset()  # codes of faults that mean "the quota is too small"
    # fields without secrets and names of users that `cavvy check --live` records, besides those of
    # `cavvy.providers.recording`
    safe_fields: frozenset[str] = frozenset()


class MachineRequest(Struct, frozen=True, kw_only=True):
    """One request for machines. All machines have the same offer; each machine has its own name and
    user data.
    """

    gang: GangSpec
    offer: Offer
    names: Sequence[str]
    user_data: Sequence[str]
    tags: Mapping[str, str] = field(default_factory=dict)  # () if the cloud has no tags
    token: str = ""  # the same value in repetitions of the request
    # The key that the machine's SSH server must accept; "" if the server does not use SSH. A cloud
    # that passes `user_data` to its machines may ignore the key, because the user data installs it.
    public_key: str = ""


class CloudMachine(Struct, frozen=True, kw_only=True):
    """One machine, as the cloud reports it."""

    id: str
    name: str
    state: MachineState
    address: str | None = None  # the address at which the gang's other nodes reach the machine
    # where the server reaches the machine by SSH; None if it is not known yet
    ssh: SshTarget | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    # when the machine was created; None if the cloud does not report it. The bill begins then
    # (`BillStart.CREATION`) or later.
    created_at: datetime | None = None
    # when the state of the machine became `RUNNING`; None if the cloud does not report it
    running_at: datetime | None = None
    ended_at: datetime | None = None  # end of the bill; None if the cloud does not report it
    preempted: bool = False
    # the machine was preempted, or the API was asked to delete it: its cloud does not tell which
    preempted_or_deleted: bool = False
    no_capacity: bool = False  # True: the cloud accepted the request, but had no capacity for it
    reason: str = ""  # why the machine stopped or ended; shown to users
    waits: str = ""  # what a machine that has not started yet waits for; shown to users


class CloudFault(Exception):
    """The error that a call returned. `status` is the HTTP status, or 0 if there was no reply."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.status, self.code, self.message = status, code, message

    @property
    def uncertain(self) -> bool:
        """Whether the request has possibly taken effect despite the fault."""
        return self.status in _NO_REPLY or (self.status >= 500 and self.status not in _NEVER)

    def refuses(self, words: re.Pattern[str]) -> bool:
        """Return whether the API refused the request with one of these words. After a status of
        500 or above, the machine may exist.
        """
        # at many APIs, only the message tells missing capacity from a wrong value
        return 400 <= self.status < 500 and words.search(self.message) is not None


# the errors of code that reads a reply whose form differs from the documentation
UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def unreadable(error: Exception) -> CloudFault:
    """Return the fault for a reply that could not be read. `error` has one of the types in
    `UNREADABLE`."""
    return CloudFault(0, "unreadable reply", f"{type(error).__name__}: {error}")


class SilentRegions(CloudFault):
    """Raised by `Cloud.list` if some regions did not answer. `machines` are the machines of the
    regions that answered. `faults` contains the fault of each silent region, by the region's name
    in offers. The name "" stands for a region whose name is unknown.
    """

    def __init__(
        self, machines: Sequence[CloudMachine], faults: Mapping[str, CloudFault | Refused]
    ) -> None:
        super().__init__(0, "; ".join(f"{region}: {fault}" for region, fault in faults.items()))
        self.machines, self.faults = machines, faults


class Cloud(Protocol):
    """The interface to a cloud: six calls. Each call has a time limit and raises only CloudFault,
    or Refused if a person must change the account's setup.
    """

    traits: CloudTraits

    async def offers(self) -> Sequence[Offer]:
        """Return the machines that are available now, with prices."""

    async def create(self, request: MachineRequest) -> Sequence[str]:
        """Request machines. Return the ids of the machines in the order of `request.names`. If the
        trait `atomic_count` is False, each request is for one machine.
        """

    async def list(self) -> Sequence[CloudMachine]:
        """Return all machines of the account, or only the machines that Cavvy created. Raises
        SilentRegions if only some regions answer.
        """

    async def get(self, machine: str) -> CloudMachine | None:
        """Return the machine with this id, or None if the cloud does not know the id."""

    async def delete(self, machine: str) -> None:
        """Start deleting a machine. Can raise CloudFault with the status 404 if the machine no
        longer exists.
        """

    def is_full(self, fault: CloudFault) -> bool:
        """Return whether this fault of `create` means that the offer is not available now."""


def read_fault(
    cloud: Cloud, fault: CloudFault, what: str, *, making: bool = False
) -> ProviderError:
    """Return the provider error for a fault. `what` describes the call in the message. `making` is
    True if the call was `create`.
    """
    text = f"{what}: {fault}"
    # some clouds recognize missing capacity only by words, which may also be in these refusals
    general = fault.status in _DENIED or fault.status == 429
    if making and not general and cloud.is_full(fault):
        return NoCapacity(text)
    if fault.code in cloud.traits.quota_codes:
        return QuotaTooSmall(f"{text}; request a higher quota from the provider")
    if fault.uncertain or fault.status in _LATER:
        return TryAgain(text)
    if fault.status == 404 and not making:
        return NotFound(text)
    if fault.status in _DENIED:
        return Refused(f"{text}; check the API key and its rights")
    return Refused(text)
