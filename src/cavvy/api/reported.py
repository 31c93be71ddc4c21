"""Decodes messages of agents. The type, range and length of each field are checked separately.

Nodes are not trusted. After an error, an agent would send the same message again and again, so the
server accepts every batch that is valid JSON. The invalid fields of a message are listed in its
`fault`, and the module `control` applies the valid fields.
"""

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from cavvy.domain.figures import StepExample, StepSeries
from cavvy.domain.jobs import RankStack
from cavvy.domain.messages import AgentMessage
from cavvy.store.documents import plain

LARGEST = 1 << 50  # maximum bytes of one file or log; in practice, the disk is the limit
_LONGEST_S = 30 * 86400  # maximum seconds of a notice, and of saving a checkpoint
_TEXT = 8192  # maximum characters of a text for users; the rest is cut off
_FAULT = 300  # maximum characters of `fault`
_NUMBER = 1e300  # sums of larger numbers could overflow

_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
# control characters but the line feed and the tab, and those that change the direction of text
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

Size = Annotated[int, Meta(ge=0, le=LARGEST)]
Rank = Annotated[int, Meta(ge=0, le=1_000_000)]
Name = Annotated[str, Meta(max_length=255)]
FilePath = Annotated[str, Meta(max_length=4096)]
Upload = Annotated[str, Meta(max_length=4096)]  # maximum characters of an upload's ID in a storage
Part = Annotated[int, Meta(ge=1, le=1_000_000)]
ExitCode = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
Moment = Annotated[datetime, Meta(tz=True)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
_Sequence = Annotated[int, Meta(ge=1, lt=1 << 62)]
_Seconds = Annotated[float, Meta(ge=0, le=_LONGEST_S)]
_Figure = Annotated[float, Meta(ge=-_NUMBER, le=_NUMBER)] | Annotated[str, Meta(max_length=4096)]
_Figures = Annotated[
    dict[Annotated[str, Meta(max_length=1024)], _Figure], Meta(max_length=256)
]  # agents apply stricter limits themselves
_Number = Annotated[float, Meta(ge=-_NUMBER, le=_NUMBER)]
_Spreads = Annotated[
    dict[Annotated[str, Meta(max_length=128)], tuple[_Number, _Number, _Number]],
    Meta(max_length=256),
]
_Series = Annotated[list[StepSeries], Meta(max_length=1024)]
_Params = Annotated[
    dict[Annotated[str, Meta(max_length=1024)], Annotated[str, Meta(max_length=4096)]],
    Meta(max_length=1024),
]
_Examples = Annotated[list[StepExample], Meta(max_length=64)]
_Stacks = Annotated[list[RankStack], Meta(max_length=64)]
FIELDS: Mapping[str, Any] = {
    "at": Moment,
    "setup_reused": bool,
    "values": _Figures,
    "figures": _Spreads,
    "series": _Series,
    "params": _Params,
    "examples": _Examples,
    "stacks": _Stacks,
    "moved": bool,
    "deadlocked": bool,
    "bytes": Size,
    "files": _Count,
    "newest_at": Moment | None,
    "number": _Count | None,
    "sent": Size,
    "seconds": _Seconds | None,
    "cost_s": _Seconds | None,
    "source": str,
    "name": Annotated[str, Meta(max_length=64)],
    "text": str,
    "outcome": Annotated[str, Meta(max_length=64)] | None,
    "exit_code": ExitCode | None,
    "reason": str,
    "failure": Annotated[str, Meta(max_length=64)] | None,
    "log_bytes": Annotated[int, Meta(ge=0, lt=1 << 62)],
}


class ReportedBatch(Struct, frozen=True, kw_only=True):
    """A batch of messages from one agent, in the order of their numbers and without gaps."""

    gang: Name
    rank: Rank
    nonce: Name
    at: Any = None  # when the batch was sent, by the node's clock; older agents do not state it
    messages: list[dict[str, Any]]

    @property
    def sent_at(self) -> datetime | None:
        """`at`, or None if it is not a time. The batch is accepted all the same."""
        try:
            return msgspec.convert(self.at, Moment)
        except msgspec.ValidationError:
            return None


class _QuietMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A message that only tells figures, and whose fields are all valid."""

    seq: _Sequence
    kind: Literal["progress", "telemetry", "minute", "points"]
    at: Moment
    values: _Figures = {}
    figures: _Spreads = {}
    seconds: _Seconds | None = None
    series: _Series = []


class QuietBatch(Struct, frozen=True):
    """A batch of such messages, from an agent that keeps them until they are stored."""

    gang: Name
    rank: Rank
    nonce: Name
    keeps: Literal[True]
    messages: list[_QuietMessage]
    at: Moment | None = None


_decode_quiet = msgspec.json.Decoder(QuietBatch).decode


class HasMessages(Protocol):
    """A struct that contains a batch of messages."""

    @property
    def messages(self) -> list[dict[str, Any]]: ...


B = TypeVar("B", bound=HasMessages)


def read_quiet(body: bytes) -> tuple[QuietBatch, list[AgentMessage]] | None:
    """Return the batch and its messages if they only tell figures and all is valid, in one step
    of the decoder. Return None for other bodies, which `read_batch` reads."""
    try:
        batch = _decode_quiet(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    told = []
    for each in batch.messages:
        texts = [*each.values, *each.figures]
        texts += [value for value in each.values.values() if isinstance(value, str)]
        texts += [name for series in each.series for name in series.names]
        if not all(text.isascii() and text.isprintable() for text in texts):
            return None
        told.append(
            AgentMessage(
                seq=each.seq,
                at=each.at,
                kind=each.kind,
                values=each.values,
                figures=each.figures,
                seconds=each.seconds,
                series=each.series,
            )
        )
    return batch, told


class _GangName(Struct, frozen=True):
    gang: str


# the first field of agents' bodies; used if only Python's JSON module can read the body
_GANG_FIELD = re.compile(rb'"gang"\s*:\s*"([!#-\[\]-~]{1,255})"')


def read_gang(body: bytes) -> str | None:
    """Return the name of the gang that a body states, without decoding the other fields. Return
    None if the body states no gang.
    """
    try:
        return msgspec.json.decode(body, type=_GangName).gang
    except (msgspec.MsgspecError, UnicodeDecodeError):
        found = _GANG_FIELD.search(body)
        return None if found is None else found[1].decode("ascii")


def read_batch(
    body: bytes, now: datetime, form: type[B], *, most: int | None = None
) -> tuple[B, list[AgentMessage]]:
    """Return the batch, as an instance of `form`, and its decoded messages, but at most the first
    `most` messages. Raises ValueError or RecursionError for an invalid batch.
    """
    try:
        said = msgspec.json.decode(body or b"{}")
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # The body contains values that only Python's JSON module writes, such as NaN, unpaired
        # surrogates or very long numbers.
        said = json.loads(body, parse_int=_whole)
    if isinstance(said, dict) and isinstance(listed := said.pop("messages", None), list):
        said = {**_plain(said), "messages": listed[:most]}
    batch = msgspec.convert(said, form)
    return batch, [message for each in batch.messages if (message := _read_message(each, now))]


def _read_message(said: Mapping[str, Any], now: datetime) -> AgentMessage | None:
    """Decode a message. Returns None if the message's sequence number `seq` is not valid, because
    any number that the server chose instead could be the number of another message.
    """
    fields: dict[str, Any] = {"at": now}
    faults = []
    try:
        seq, kind = msgspec.convert((said.get("seq"), said.get("kind")), tuple[_Sequence, object])
    except msgspec.ValidationError:
        return None
    for name, form in FIELDS.items():
        if name not in said:
            continue
        value = said[name]
        if form is str and isinstance(value, str):
            value = value[:_TEXT]
        try:
            fields[name] = msgspec.convert(_show(value), form)
        except msgspec.ValidationError as error:
            faults.append(f"{name}: {error}")
    if not isinstance(kind, str):
        kind, faults = "", [f"kind: text was expected, not {type(kind).__name__}", *faults]
    return AgentMessage(seq=seq, kind=_show(kind), fault="; ".join(faults)[:_FAULT], **fields)


def _plain(value: Any) -> Any:
    """Replace characters that a database or JSON cannot contain."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(name): _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _show(value: Any) -> Any:
    """Make the texts of a message fit for a database and for a terminal: all that people read of a
    node passes here, and could otherwise set a title, clear the screen or reverse a line.
    """
    if isinstance(value, str):
        return _CONTROLS.sub(lambda each: repr(each[0])[1:-1], plain(_COLOURS.sub("", value)))
    if isinstance(value, dict):
        return {_show(name): _show(each) for name, each in value.items()}
    return [_show(each) for each in value] if isinstance(value, list) else value


def _whole(digits: str) -> float:
    return int(digits) if len(digits) < 100 else float(digits)
