"""Calls that wait in the queue of a service until the server passes them to the gateway."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum

from cavvy.domain.values import Struct, field

MOST_BYTES = 1 << 20  # maximum bytes of a call's body, and of its result
BUCKET = "bucket"  # the source of calls that objects of buckets cause
# How long the IDs of deliveries and of times of cron lines are stored after the results of their
# calls. Senders repeat a delivery for at most 31 days, the longest retention of Google Pub/Sub:
# https://cloud.google.com/pubsub/quotas. IDs of objects are kept: each listing has them again.
IDS_KEPT = timedelta(days=60)
ID_PATTERN = r"^[A-Za-z0-9._:-]{1,128}$"


class CallState(StrEnum):
    """The state of a queued call."""

    WAITING = "waiting"  # the call has no result yet; it may be at the gateway now
    DONE = "done"  # the call's result is stored
    DEAD = "dead"  # the call failed too often, or must not be repeated
    # only the call's ID is stored, so that its event does not cause another call
    FORGOTTEN = "forgotten"


class StoredObject(Struct, frozen=True, kw_only=True):
    """An object of a bucket that caused a call. `url` is the URL of the bucket. `tag` identifies
    the version of the object.
    """

    url: str
    key: str
    size: int | None = None
    tag: str = ""
    changed_at: datetime | None = None


class QueuedCall(Struct, frozen=True, kw_only=True):
    """A call in the queue of a service, without the bodies of the request and of the result. Within
    a service, the ID of a call is unique.

    The call is sent at `due_at` or later. `tries` is the number of finished tries, without the
    tries that the service answered with status 402 or 429. `problem` is the reason for the last
    failure. `status` and `answer_headers` are the status and the headers of the result. `source`
    names the trigger that caused the call; `source` is "" if a user added the call.
    """

    project: str
    service: str
    id: str
    state: CallState = CallState.WAITING
    method: str = "POST"
    path: str = "/"
    headers: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    object: StoredObject | None = None
    user: str = ""
    submitted_at: datetime
    due_at: datetime
    tries: int = 0
    problem: str = ""
    status: int | None = None
    answer_headers: Mapping[str, str] = field(default_factory=dict)
    ended_at: datetime | None = None
    expires_at: datetime | None = None
    version: int = 0


class CallAnswer(Struct, frozen=True, kw_only=True):
    """The answer of a service to a call. If there is no answer, `status` is None and `problem` is
    the reason.
    """

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    body: bytes = b""
    problem: str = ""
