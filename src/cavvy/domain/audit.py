"""The audit log: records of every change that a user requests, and of every refusal. Each record
contains the hash of the record before it, so a changed or removed record breaks the chain.

Hash of a record: SHA-256 of its text, in hexadecimal. The text is JSON in UTF-8 with sorted keys
and without spaces. The first record's `prior` is 64 zeros.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from enum import StrEnum

import msgspec

from cavvy.domain.values import Struct, field

FIRST = "0" * 64  # the `prior` of the first record


class AuditOutcome(StrEnum):
    """The result of a request."""

    DONE = "done"
    REFUSED = "refused"


class AuditEntry(Struct, frozen=True, kw_only=True):
    """The facts about a request that the audit log records. `account` is empty for the owner of the
    state folder and for refused requests without a valid token; `signed_in` distinguishes these two
    cases. `project` is empty for the installation.
    """

    at: datetime
    signed_in: bool
    account: str = ""
    token: str = ""  # the ID of the token; empty for the owner of the state folder
    address: str = ""  # the client's address; empty for the Unix socket
    action: str  # method and route, such as DELETE /v1/accounts/{account}
    target: Mapping[str, str] = field(default_factory=dict)  # the parameters in the path
    project: str = ""
    outcome: AuditOutcome = AuditOutcome.DONE
    code: str = ""  # the error code of a refusal
    left_out: int = 0  # number of earlier refusals from this address that have no record
    before: Mapping[str, object] | None = None
    after: Mapping[str, object] | None = None


class AuditRecord(AuditEntry, frozen=True, kw_only=True):
    """An entry with its position in the chain."""

    number: int  # 1 for the first record
    prior: str  # hash of the record before it


class SealedRecord(Struct, frozen=True, kw_only=True):
    """A record as it is stored: its text, the hash of the text, and copies of the fields that
    queries use as filters.
    """

    number: int
    at: datetime
    account: str
    project: str
    outcome: AuditOutcome
    hash: str
    text: str


class ChainHead(Struct, frozen=True):
    """The end of a chain: the number and the hash of its last record. A copy of this record that is
    stored outside the server can later prove that no record of this chain has changed.
    """

    number: int
    hash: str

    def __str__(self) -> str:
        return f"{self.number}:{self.hash}"


class ChainBroken(Exception):
    """Raised if a record does not fit into the chain. `number` is the number of the expected
    record."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(f"record {number}: {message}")
        self.number = number


EMPTY = ChainHead(0, FIRST)
CUT = "retention"  # the action of a record about older records that were removed


class AuditCut(Struct, frozen=True, kw_only=True):
    """Why the log no longer begins with its first record: the records up to `head` were removed at
    `at`, because they were older than `before`, as the rule (a setting) demands.
    """

    head: ChainHead
    at: datetime
    before: datetime
    rule: str
    days: int

    def make_entry(self) -> AuditEntry:
        """Return the entry that records the removal in the log itself."""
        after = {
            "removed_to": str(self.head),
            "older_than": self.before.isoformat(),
            "rule": self.rule,
            "days": self.days,
        }
        return AuditEntry(at=self.at, signed_in=False, action=CUT, after=after)


def seal(entry: AuditEntry, head: ChainHead) -> SealedRecord:
    """Create the record that follows `head`."""
    number = head.number + 1
    record = AuditRecord(**msgspec.structs.asdict(entry), number=number, prior=head.hash)
    text = msgspec.json.encode(record, order="sorted")
    return SealedRecord(
        number=number,
        at=entry.at,
        account=entry.account,
        project=entry.project,
        outcome=entry.outcome,
        hash=hash_text(text),
        text=text.decode(),
    )


def hash_text(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def check_chain(
    records: Iterable[SealedRecord], head: ChainHead = EMPTY
) -> Iterator[tuple[AuditRecord, ChainHead]]:
    """Check each record against the record before it, and yield the record with the new chain head.
    `head` is the chain head before the first record. The log may begin with a later record than the
    first, if one of its records says that the records before it were removed because of their age.
    Raises ChainBroken at the first record that breaks the chain.
    """
    start: ChainHead | None = None  # the head before the log's first record, until it is confirmed
    for sealed in records:
        if head == EMPTY and sealed.number > 1:
            start = head = _find_start(sealed)
        try:
            record = _check(sealed, head)
        except ChainBroken as error:
            if start is not None:
                raise ChainBroken(1, f"the record is missing; {error}") from error
            raise
        if start is not None and is_cut(record, start):
            start = None
        head = ChainHead(record.number, sealed.hash)
        yield record, head
    if start is not None:
        raise ChainBroken(
            1,
            f"the record is missing: the log begins with record {start.number + 1}, and no record "
            "says that the records before it were removed because of their age",
        )


def is_cut(record: AuditRecord, head: ChainHead) -> bool:
    """Return whether the record says that the records up to `head` were removed."""
    return record.action == CUT and (record.after or {}).get("removed_to") == str(head)


def _find_start(sealed: SealedRecord) -> ChainHead:
    """Return the head that a log follows whose first record is not number 1."""
    try:
        record = msgspec.json.decode(sealed.text.encode(), type=AuditRecord)
    except msgspec.MsgspecError:
        return EMPTY
    return ChainHead(sealed.number - 1, record.prior) if record.number == sealed.number else EMPTY


def _check(sealed: SealedRecord, head: ChainHead) -> AuditRecord:
    """Return the record, which must follow `head`. Raises ChainBroken."""
    expected = head.number + 1
    if sealed.number != expected:
        missing = "is missing" if sealed.number > expected else "is out of order"
        raise ChainBroken(
            expected, f"the record {missing}: the next record has the number {sealed.number}"
        )
    text = sealed.text.encode()
    if hash_text(text) != sealed.hash:
        raise ChainBroken(expected, "the record's text does not match its stored hash")
    try:
        record = msgspec.json.decode(text, type=AuditRecord)
    except msgspec.MsgspecError as error:
        raise ChainBroken(expected, f"the record's text cannot be read: {error}") from error
    if record.prior != head.hash:
        raise ChainBroken(
            expected,
            f"according to this record, the hash of the previous record is {record.prior}, but "
            f"the previous record has the hash {head.hash}",
        )
    for name in ("number", "at", "account", "project", "outcome"):
        if getattr(record, name) != getattr(sealed, name):
            raise ChainBroken(
                expected,
                f"the record's field `{name}` differs from the value in the record's text",
            )
    return record


def read_head(text: str) -> ChainHead:
    """Read NUMBER:HASH. Raises ValueError."""
    number, _, digest = text.strip().partition(":")
    if not number.isdecimal() or len(digest) != len(FIRST) or set(digest) - set("0123456789abcdef"):
        raise ValueError(f"{text!r} is not the end of a chain; expected NUMBER:HASH")
    return ChainHead(int(number), digest)
