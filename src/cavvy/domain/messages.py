"""Messages between agents and the control plane; `docs/concepts/agent-protocol.md` describes how
they are encoded.

The API decodes requests into `AgentMessage` and encodes the answers. An agent in the server's own
process passes the objects without encoding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Protocol

from cavvy.agent.documents import PROTOCOL, WorkConfig
from cavvy.domain.figures import StepExample, StepSeries
from cavvy.domain.jobs import Order, RankStack

# How many older and newer versions are supported. Other versions are supported because servers may
# be upgraded or downgraded while jobs run.
APART = 2
OLDEST = max(1, PROTOCOL - APART)
NEWEST = PROTOCOL + APART


def is_served(version: int) -> bool:
    """Return whether the control plane serves agents of this version."""
    return OLDEST <= version <= NEWEST


def list_unknown(version: int, work: WorkConfig) -> list[str]:
    """Return the features of the work that an agent of this version would silently ignore."""
    return list(dict.fromkeys(_list_unknown(version, work)))


def _list_unknown(version: int, record: Any) -> Iterator[str]:
    """Yield what the marks of the fields that `record` uses name, including nested fields."""
    for each in fields(record):
        value, mark = getattr(record, each.name), each.metadata
        if version < mark.get("since", 0) and mark["used"](value):
            yield mark["what"]
        for item in value if isinstance(value, list) else (value,):
            if is_dataclass(item):
                yield from _list_unknown(version, item)


class MessageKind(StrEnum):
    """The kinds of messages that agents send."""

    PREPARING = "preparing"  # the output of the setup, or of the image's pull, begins
    SETUP = "setup"
    RUNNING = "running"
    PROGRESS = "progress"
    CHECKPOINT = "checkpoint"
    UPLOAD = "upload"  # files of an output were sent
    NOTICE = "notice"
    TELEMETRY = "telemetry"
    MINUTE = "minute"  # the figures of a whole minute
    POINTS = "points"  # values of steps, each of which is sent once
    STACKS = "stacks"  # where the work is, as the order "stacks" asked
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
    # minute: the lowest, mean and highest value of each figure
    figures: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    series: list[StepSeries] = field(default_factory=list)  # points
    params: dict[str, str] = field(default_factory=dict)  # points: settings of the program
    examples: list[StepExample] = field(default_factory=list)  # points
    stacks: list[RankStack] = field(default_factory=list)  # stacks
    moved: bool = False  # stacks: whether the work makes progress
    deadlocked: bool = False  # stacks: whether nothing can wake any process of the work
    bytes: int = 0  # checkpoint
    files: int = 0  # checkpoint
    newest_at: datetime | None = None  # checkpoint
    # checkpoint: the checkpoint's number, if it was uploaded; upload: the number of the output
    number: int | None = None
    sent: int = 0  # checkpoint, upload: bytes that were sent
    seconds: float | None = (
        # notice: seconds until the node is reclaimed; checkpoint: seconds of its upload; minute:
        # seconds since the minute began
        None
    )
    cost_s: float | None = None  # checkpoint: how long the work paused, as it reported
    source: str = ""  # notice
    name: str = ""  # event
    # event; stacks: why there are none; checkpoint: which files are in none or may be torn, and why
    text: str = ""
    outcome: str | None = None  # exited: an AttemptOutcome; other values come from newer agents
    exit_code: int | None = None  # exited
    reason: str = ""  # exited
    # exited, if the outcome is `node`: a FailureKind; `program` if the outcome is `exit` and its
    # cause is known
    failure: str | None = None
    # exited: bytes of the log; preparing, running: where in the log the setup's output begins and
    # the work's output begins
    log_bytes: int = 0
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimGranted:
    """The claim is granted, and all ranks have an agent, so the agent does the work."""

    work: WorkConfig
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
    """Every message up to number `seq` is applied and stored, and every message up to number
    `taken`, if it is not None, will be stored soon. The agent keeps these messages, and sends them
    again if it is told of an older `taken`.
    """

    seq: int
    lease: timedelta
    taken: int | None = None
    every: timedelta | None = None  # the checkpoint interval, if Cavvy chooses it
    pause: timedelta | None = None  # how long the agent's next figures may wait for others


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimLost:
    """This agent does not hold the claim, or the attempt has ended, so the agent stops the work and
    exits.
    """

    reason: str


class AgentCalls(Protocol):
    """The requests of an agent to the control plane."""

    async def claim(
        self,
        gang: str,
        rank: int,
        nonce: str,
        address: str,
        host: HostFacts,
        *,
        wait: timedelta = timedelta(0),
    ) -> ClaimGranted | ClaimWait | ClaimRefused:
        """Request the work. While agents of other ranks are missing, the answer waits for at most
        `wait`."""

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
