"""What an agent and the control plane say to each other; `docs/concepts/agent-protocol.md` is the
wire's own page.

The API decodes requests into `AgentMessage` and encodes the answers; agents that live in this
process pass them as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Protocol

from cavvy.domain.jobs import Order
from cavvy.domain.tasks import ImageBuild, Scalar, Volume


class MessageKind(StrEnum):
    """What an agent reports."""

    SETUP = "setup"
    RUNNING = "running"
    PROGRESS = "progress"
    CHECKPOINT = "checkpoint"
    NOTICE = "notice"
    TELEMETRY = "telemetry"
    EVENT = "event"
    EXITED = "exited"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMessage:
    """One numbered message of one rank. Each kind uses the fields that its row of the protocol's
    table names.
    """

    seq: int  # from 1, without gaps
    at: datetime  # by the node's clock
    kind: str  # a MessageKind; another one is a newer agent's, and counts as heard
    setup_reused: bool = False  # running
    values: dict[str, float | str] = field(default_factory=dict)  # progress, telemetry
    bytes: int = 0  # checkpoint
    files: int = 0  # checkpoint
    newest_at: datetime | None = None  # checkpoint
    number: int | None = None  # checkpoint that was handed over
    sent: int = 0  # checkpoint that was handed over: bytes that had to be sent
    seconds: float | None = (
        None  # notice: how long until the node goes; checkpoint: how long handing it over took
    )
    cost_s: float | None = (
        None  # checkpoint: how long the work stood still for it, as it says itself
    )
    source: str = ""  # notice
    name: str = ""  # event
    text: str = ""  # event
    outcome: str | None = None  # exited: an Outcome; another one is a newer agent's
    exit_code: int | None = None  # exited
    reason: str = ""  # exited
    failure: str | None = None  # exited with outcome node: a FailureKind
    log_bytes: int = 0  # exited
    fault: str = ""  # why some of its fields are left out; never on the wire


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What an agent found where it started."""

    hostname: str = ""
    python: str = ""
    platform: str = ""


# Versions of the protocol, by what agents of that version know first.
UPLOADED_CHECKPOINTS, EQUIPPED = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    """Marks a field of the work that older agents would ignore, and do the work without."""

    version: int
    what: str
    used: Callable[[Any], bool] = bool  # whether the value makes use of it


def since(version: int, what: str, used: Callable[[Any], bool] = bool) -> dict[str, Since]:
    """The metadata of a field that agents know since `version`; see `protocol.list_unknown`."""
    return {"since": Since(version=version, what=what, used=used)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWork:
    """The folder that outlives attempts: `path` in the working folder leads to `storage`, or is
    uploaded.
    """

    path: str
    storage: str | None = None  # None where the node cannot reach it
    sync: bool = field(  # download the newest checkpoint first, and upload what the work writes
        default=False, metadata=since(UPLOADED_CHECKPOINTS, "uploaded checkpoints")
    )
    every_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkdirWork:
    """A frozen working folder, by the hash of its manifest."""

    snapshot: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GitWork:
    """A Git commit as the working folder."""

    url: str
    commit: str = "HEAD"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckWork:
    """What a node must show before the work starts."""

    share: float  # of the data sheet's figures
    link_mbps: float = 0  # between two nodes; 0: measured only
    kind: str = ""  # of each GPU, "" if unknown
    memory_mib: int = 0
    bandwidth_gbs: float = 0  # of its memory, by its data sheet


_URL = since(EQUIPPED, "inputs or outputs at a URL", lambda end: "://" in end)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferWork:
    """One input or output."""

    source: str = field(metadata=_URL)
    target: str = field(metadata=_URL)
    mode: str = field(  # or "stream", of an input
        default="copy", metadata=since(EQUIPPED, "inputs as streams", lambda mode: mode != "copy")
    )
    every_s: float | None = field(  # of an output: sent while the work runs, too
        default=None, metadata=since(EQUIPPED, "outputs that are sent while the work runs")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The work of one gang, as it is given with a granted claim. Holds opened secrets: never log
    or store it.

    The one definition of the work: this document is encoded as it is, `agent/config.py` repeats
    the names and types for nodes, where only the standard library is, and a test compares both.
    """

    job: str
    job_id: str
    project: str
    attempt: int
    nodes: int
    addresses: Sequence[str]  # by rank
    master_port: int
    accelerators_per_node: int
    run: str
    gang_key: str = field(default="", repr=False)  # a secret that only the gang's ranks share
    setup: str | None = None
    setup_key: str | None = None  # equal keys: a finished setup can be used again
    setup_uses: Sequence[str] | None = None  # the files that the setup sees; None: all
    image: str | None = None
    image_login: str | None = field(  # USER:PASSWORD of its registry
        default=None, repr=False, metadata=since(EQUIPPED, "an image's login")
    )
    build: ImageBuild | None = field(  # named `image`
        default=None, metadata=since(EQUIPPED, "an image that is built")
    )
    check: CheckWork | None = field(default=None, metadata=since(EQUIPPED, "a check of the node"))
    env: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict, repr=False)
    params: dict[str, Scalar] = field(default_factory=dict)
    workdir: WorkdirWork | None = None
    git: GitWork | None = None
    checkpoint: CheckpointWork | None = None
    inputs: Sequence[TransferWork] = ()
    outputs: Sequence[TransferWork] = ()
    volumes: Sequence[Volume] = field(default=(), metadata=since(EQUIPPED, "volumes"))
    grace_s: float = 10
    keep_s: float = 0  # how long to wait for other work on this node once the work is over
    idle_s: float | None = None
    log_limit_mib: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimGranted:
    """The claim is granted and the gang is whole: do the work."""

    work: Assignment
    lease: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimWait:
    """The claim is granted but ranks are missing: ask again after this long."""

    after: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRefused:
    """No claim: another agent has it, or the attempt is over. Leave without doing anything."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesStored:
    """Every message up to `seq` is applied and stored."""

    seq: int
    lease: timedelta
    every: timedelta | None = None  # how often the work should save, where Cavvy chooses


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimLost:
    """The claim is not this agent's, or its attempt is over: stop the work and leave."""

    reason: str


class AgentCalls(Protocol):
    """What an agent may ask of the control plane."""

    async def claim(
        self, gang: str, rank: int, nonce: str, address: str, host: HostFacts
    ) -> ClaimGranted | ClaimWait | ClaimRefused: ...
    async def messages(
        self, gang: str, rank: int, nonce: str, messages: Sequence[AgentMessage]
    ) -> MessagesStored | ClaimLost: ...
    async def wait_order(self, gang: str, rank: int, after: int, wait: timedelta) -> Order | None:
        """An order newer than `after`; None when `wait` has passed without one."""

    async def lease(self, gang: str) -> timedelta:
        """How long agents of this gang may work on from now without hearing from the control
        plane.
        """
