"""Messages between agents and the control plane; `docs/concepts/agent-protocol.md` describes how
they are encoded.

The API decodes requests into `AgentMessage` and encodes the answers. An agent in the server's own
process passes the objects without encoding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Protocol

from cavvy.domain.jobs import Order
from cavvy.domain.tasks import ImageBuild, Scalar, Volume


class MessageKind(StrEnum):
    """The kinds of messages that agents send."""

    SETUP = "setup"
    RUNNING = "running"
    PROGRESS = "progress"
    CHECKPOINT = "checkpoint"
    UPLOAD = "upload"  # files of an output were sent
    NOTICE = "notice"
    TELEMETRY = "telemetry"
    EVENT = "event"
    EXITED = "exited"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMessage:
    """One numbered message about one rank. The comment of a field names the kinds of messages that
    use the field.
    """

    seq: int  # counts from 1, without gaps
    at: datetime  # time on the node's clock
    kind: str  # a MessageKind; other kinds come from newer agents and are acknowledged
    setup_reused: bool = False  # running
    values: dict[str, float | str] = field(default_factory=dict)  # progress, telemetry
    bytes: int = 0  # checkpoint
    files: int = 0  # checkpoint
    newest_at: datetime | None = None  # checkpoint
    # checkpoint: the checkpoint's number, if it was uploaded; upload: the number of the output
    number: int | None = None
    sent: int = 0  # checkpoint, upload: bytes that were sent
    seconds: float | None = (
        None  # notice: seconds until the node is reclaimed; checkpoint: seconds of its upload
    )
    cost_s: float | None = None  # checkpoint: how long the work paused, as it reported
    source: str = ""  # notice
    name: str = ""  # event
    text: str = ""  # event
    outcome: str | None = None  # exited: an AttemptOutcome; other values come from newer agents
    exit_code: int | None = None  # exited
    reason: str = ""  # exited
    failure: str | None = None  # exited, if the outcome is `node`: a FailureKind
    log_bytes: int = 0  # exited
    # set by the server: why some fields are missing; agents never send it
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Facts about a host, which its agent reports when it claims a rank."""

    hostname: str = ""
    python: str = ""
    platform: str = ""
    tunnel_key: str = ""  # the public key of the rank's WireGuard tunnel
    tunnel_missing: str = ""  # the requirements of a tunnel that the node lacks


# The protocol versions that introduced these features.
UPLOADED_CHECKPOINTS, EQUIPPED = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Since:
    """Marks a field of the work that older agents do not know. An agent that does not know the
    field would do the work as if the field were not set.
    """

    version: int
    what: str
    used: Callable[[Any], bool] = bool  # whether the value uses the feature


def since(version: int, what: str, used: Callable[[Any], bool] = bool) -> dict[str, Since]:
    """Return the metadata for a field that agents have supported since protocol `version`.
    `protocol.list_unknown` uses it.
    """
    return {"since": Since(version=version, what=what, used=used)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWork:
    """The checkpoint folder, which is kept between attempts. If `storage` is set, `path` in the
    working folder is a link to `storage`. If `storage` is None, the agent uploads the files in
    `path`.
    """

    path: str
    storage: str | None = None  # None if the node has no access to the storage
    sync: bool = field(  # download the newest checkpoint first, and upload new checkpoints
        default=False, metadata=since(UPLOADED_CHECKPOINTS, "uploaded checkpoints")
    )
    every_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkdirWork:
    """The snapshot of a working folder, named by the hash of its manifest."""

    snapshot: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GitWork:
    """A Git commit that is checked out as the working folder."""

    url: str
    commit: str = "HEAD"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckWork:
    """Requirements that a node must meet before the work starts."""

    share: float  # minimum share of the values in the data sheet
    link_mbps: float = 0  # minimum speed between two nodes; 0 if the speed is only measured
    kind: str = ""  # model of each GPU, "" if unknown
    memory_mib: int = 0
    bandwidth_gbs: float = 0  # data-sheet bandwidth of the GPU's memory


_URL = since(EQUIPPED, "inputs or outputs at a URL", lambda end: "://" in end)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferWork:
    """One input or output."""

    source: str = field(metadata=_URL)
    target: str = field(metadata=_URL)
    mode: str = field(  # for an input: "copy" or "stream"
        default="copy", metadata=since(EQUIPPED, "inputs as streams", lambda mode: mode != "copy")
    )
    every_s: float | None = field(  # seconds between uploads of an output while the work runs
        default=None, metadata=since(EQUIPPED, "outputs that are sent while the work runs")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelPeer:
    """A rank as a peer in the gang's WireGuard tunnel. `endpoint` is the rank's address and UDP
    port outside of the tunnel, and `address` is the rank's address inside the tunnel. If the node
    cannot join, `key` is empty and `missing` names the requirements that the node lacks.
    """

    key: str
    endpoint: str
    address: str
    missing: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunnelWork:
    """The WireGuard tunnel between the ranks of a gang, with the peers in the order of the ranks.
    `prefix` is the number of leading bits that the peers' addresses have in common.
    """

    prefix: int
    peers: Sequence[TunnelPeer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The work of one gang. Agents receive the work with a granted claim. The assignment contains
    decrypted secrets, so it must not be logged or stored.

    This class defines the work document and is encoded without conversion. Nodes have only the
    standard library, so `agent/config.py` repeats the names and types of the fields; a test
    compares the two modules.
    """

    job: str
    job_id: str
    project: str
    attempt: int
    nodes: int
    addresses: Sequence[str]  # one address per rank, in the order of the ranks
    master_port: int
    accelerators_per_node: int
    run: str
    gang_key: str = field(default="", repr=False)  # a secret that only the gang's ranks share
    setup: str | None = None
    setup_key: str | None = None  # a node can reuse a finished setup that has the same key
    setup_uses: Sequence[str] | None = None  # the files that the setup can see; None for all
    image: str | None = None
    image_login: str | None = field(  # USER:PASSWORD for the image's registry
        default=None, repr=False, metadata=since(EQUIPPED, "an image's login")
    )
    build: ImageBuild | None = field(  # the built image is named `image`
        default=None, metadata=since(EQUIPPED, "images built from a Dockerfile")
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
    keep_s: float = (
        0  # seconds for which the agent waits for another job's work after this work has ended
    )
    # whether the agent waits for other work even after stopped work or a failed setup
    machine: bool = False
    # whether the work answers requests; after a notice, it continues until it is stopped or its
    # grace period must begin
    serves: bool = False
    idle_s: float | None = None
    # the GPU use in percent below which the work is idle; 0 if GPU use does not count
    idle_gpu_percent: float = 0
    log_limit_mib: int = 1024
    # after this many seconds without an answer from the server, the results of ended work are
    # uploaded to a bucket; 0 if there is no bucket
    deposit_after_s: float = 0
    path: str = ""  # PATH of the submitting shell, if it is on the node's machine
    # Agents that do not support tunnels send no key and are refused, so this field needs no
    # protocol version.
    tunnel: TunnelWork | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimGranted:
    """The claim is granted, and all ranks have an agent, so the agent does the work."""

    work: Assignment
    lease: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimWait:
    """The claim is granted, but agents of other ranks are missing. The agent repeats the request
    after the time `after`."""

    after: timedelta
    keep: timedelta | None = None  # time for which the agent of a warm node waits for more work


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRefused:
    """The claim is refused because another agent has claimed the work, or because the attempt has
    ended. The agent exits without starting the work.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesStored:
    """Every message up to number `seq` is applied and stored."""

    seq: int
    lease: timedelta
    every: timedelta | None = None  # the checkpoint interval, if Cavvy chooses it


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimLost:
    """This agent does not hold the claim, or the attempt has ended, so the agent stops the work and
    exits.
    """

    reason: str


class AgentCalls(Protocol):
    """The requests of an agent to the control plane."""

    async def claim(
        self, gang: str, rank: int, nonce: str, address: str, host: HostFacts
    ) -> ClaimGranted | ClaimWait | ClaimRefused: ...
    async def messages(
        self, gang: str, rank: int, nonce: str, messages: Sequence[AgentMessage]
    ) -> MessagesStored | ClaimLost: ...
    async def wait_order(self, gang: str, rank: int, after: int, wait: timedelta) -> Order | None:
        """Return an order newer than `after`, or None if no such order arrives within the time
        `wait`."""

    async def lease(self, gang: str) -> timedelta:
        """Return how long the agents of this gang may continue without an answer from the control
        plane.
        """
