"""CloudEvents 1.0: the attributes of an event, as JSON and in the headers of a request.

https://github.com/cloudevents/spec, version 1.0.2: the specification, the JSON event format and the
HTTP protocol binding.
"""

import base64
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote, unquote

from cavvy.domain.values import Struct, field

SPEC_VERSION = "1.0"
STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"
_PREFIX = "ce-"
_REQUIRED = ("specversion", "id", "source", "type")
# attributes of the specification, all of which are strings in JSON
_TEXTS = frozenset({*_REQUIRED, "subject", "time", "datacontenttype", "dataschema"})
_DATA = ("data", "data_base64")
_NAME = re.compile(r"[a-z0-9]{1,64}")
_URI = re.compile(r"[A-Za-z0-9._~:/?#\[\]@!$&'()*+,;=%-]+")  # the characters of RFC 3986
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")
_MEDIA_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+( *;[ -~]*)?", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_QUOTED = re.compile(r"\\(.)")
_MOST_ATTRIBUTES = 40
_LONGEST = 8192  # characters of all headers of an event
# of U+0021 to U+007E, only the quotation mark and the percent sign are encoded
_PLAIN = "!#$&'()*+,/:;<=>?@[\\]^`{|}~"


class InvalidEvent(Exception):
    """Raised if a request claims to be a CloudEvent 1.0 but is not a valid CloudEvent."""


class EventAttributes(Struct, frozen=True, kw_only=True):
    """The attributes of an event. `others` contains the attributes that the specification does not
    require. `others` does not contain `datacontenttype`, which is sent as the request's header
    Content-Type.
    """

    id: str
    source: str
    type: str
    subject: str = ""
    time: str = ""
    others: Mapping[str, str] = field(default_factory=dict)


def to_time(at: datetime) -> str:
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def to_headers(event: EventAttributes) -> Mapping[str, str]:
    """Return the headers of a request that delivers the event."""
    values = {
        "specversion": SPEC_VERSION,
        "id": event.id,
        "source": event.source,
        "type": event.type,
        "subject": event.subject,
        "time": event.time,
        **event.others,
    }
    return {
        f"{_PREFIX}{name}": quote(value, safe=_PLAIN) for name, value in values.items() if value
    }


def is_binary(headers: Mapping[str, str]) -> bool:
    """Return whether a request is an event in binary mode. The names in `headers` are in lower
    case.
    """
    return all(f"{_PREFIX}{name}" in headers for name in _REQUIRED)


def parse_headers(headers: Mapping[str, str]) -> EventAttributes:
    """Parse the event that a request contains in binary mode, where the event's attributes are
    header fields. Raises InvalidEvent.
    """
    found = {
        name.removeprefix(_PREFIX): _decode(name, value)
        for name, value in headers.items()
        if name.startswith(_PREFIX)
    }
    if "datacontenttype" in found:
        raise InvalidEvent("the header ce-datacontenttype must not be present")
    return _check(found)


def parse_event(value: object) -> EventAttributes:
    """Return the event that a JSON value describes. Raises InvalidEvent."""
    if not isinstance(value, dict):
        raise InvalidEvent("an event is a JSON object")
    if all(name in value for name in _DATA):
        raise InvalidEvent("an event has only one of `data` and `data_base64`")
    encoded = value.get("data_base64", "")
    try:
        base64.b64decode(encoded if isinstance(encoded, str) else "?", validate=True)
    except ValueError as error:
        raise InvalidEvent("`data_base64` is not base64") from error
    found = {
        name: _text(name, each)
        for name, each in value.items()
        if name not in _DATA and each is not None
    }
    content_type = found.pop("datacontenttype", None)
    if content_type == "":
        raise InvalidEvent("`datacontenttype` is empty")
    return _check(found)


def read_data(value: dict[str, object]) -> tuple[str, bytes]:
    """Return the content type and the data of an event that `parse_event` accepts, as they are sent
    in binary mode. The content type and the data are empty if the event contains no data. Raises
    InvalidEvent.
    """
    kind = value.get("datacontenttype") or "application/json"
    assert isinstance(kind, str)
    if not _MEDIA_TYPE.fullmatch(kind):
        raise InvalidEvent("`datacontenttype` is not a media type")
    encoded = value.get("data_base64")
    if isinstance(encoded, str):
        return kind, base64.b64decode(encoded)
    if "data" not in value:
        return "", b""
    data, media = value["data"], kind.partition(";")[0].strip().lower()
    if media.endswith(("/json", "+json")):
        return kind, json.dumps(data).encode()
    if not isinstance(data, str):
        raise InvalidEvent(f"`data` of the type {media} is not a string")
    return kind, data.encode("utf-8", "replace")


def _check(found: dict[str, str]) -> EventAttributes:
    """Check that the attributes are valid for a CloudEvent, and return them."""
    missing = [name for name in _REQUIRED if not found.get(name)]
    if missing:
        raise InvalidEvent(f"`{missing[0]}` is missing or empty")
    if found["specversion"] != SPEC_VERSION:
        raise InvalidEvent(f"`specversion` must be {SPEC_VERSION}, not {found['specversion']!r}")
    for name, value in found.items():
        if not _NAME.fullmatch(name):
            raise InvalidEvent(f"{name!r} cannot be the name of an attribute")
        if _CONTROL.search(value):
            raise InvalidEvent(f"`{name}` contains a control character")
    for name in ("source", "dataschema"):
        if name in found and not _URI.fullmatch(found[name]):
            raise InvalidEvent(f"`{name}` is not a URI")
    if "time" in found and not _is_time(found["time"]):
        raise InvalidEvent("`time` is not a time in the format of RFC 3339")
    if found.get("subject") == "":
        raise InvalidEvent("`subject` is empty")
    others = {k: v for k, v in found.items() if k not in (*_REQUIRED, "subject", "time")}
    event = EventAttributes(
        id=found["id"],
        source=found["source"],
        type=found["type"],
        subject=found.get("subject", ""),
        time=found.get("time", ""),
        others=others,
    )
    size = sum(len(name) + len(value) for name, value in to_headers(event).items())
    if len(found) > _MOST_ATTRIBUTES or size > _LONGEST:
        raise InvalidEvent(f"the attributes need more than {_LONGEST} characters as headers")
    return event


def _is_time(text: str) -> bool:
    if not _TIME.fullmatch(text):
        return False
    try:
        datetime.fromisoformat(text.upper())
    except ValueError:
        return False
    return True


def _text(name: str, value: object) -> str:
    """Return the canonical text of an attribute."""
    if name in _TEXTS and not isinstance(value, str):
        raise InvalidEvent(f"`{name}` is not a string")
    match value:
        case bool():
            return "true" if value else "false"
        case int() if -(1 << 31) <= value < 1 << 31:
            return str(value)
        case str():
            return value
    raise InvalidEvent(f"`{name}` is not a string, a boolean or an integer of 32 bits")


def _decode(name: str, value: str) -> str:
    """Return the text of a header's value."""
    if len(value) > 1 and value[0] == value[-1] == '"':
        value = _QUOTED.sub(r"\1", value[1:-1])
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidEvent(f"the header {name} is not UTF-8 in percent-encoding") from error
