"""CloudEvents 1.0: the attributes of an event, and their form in the headers of a request.

https://github.com/cloudevents/spec, version 1.0.2, HTTP protocol binding, section 3.1.3.
"""

from collections.abc import Mapping
from datetime import datetime
from urllib.parse import quote

from cavvy.domain.values import Struct, field

SPEC_VERSION = "1.0"
# of U+0021 to U+007E, only the quotation mark and the percent sign are encoded
_PLAIN = "!#$&'()*+,/:;<=>?@[\\]^`{|}~"


class EventAttributes(Struct, frozen=True, kw_only=True):
    """The attributes of an event. `others` has those that the specification does not require."""

    id: str
    source: str
    type: str
    subject: str = ""
    time: datetime | None = None
    others: Mapping[str, str] = field(default_factory=dict)


def to_headers(event: EventAttributes) -> Mapping[str, str]:
    """Return the headers of a request that delivers the event."""
    values = {
        "specversion": SPEC_VERSION,
        "id": event.id,
        "source": event.source,
        "type": event.type,
        "subject": event.subject,
        "time": "" if event.time is None else event.time.isoformat().replace("+00:00", "Z"),
        **event.others,
    }
    return {f"ce-{name}": quote(value, safe=_PLAIN) for name, value in values.items() if value}
