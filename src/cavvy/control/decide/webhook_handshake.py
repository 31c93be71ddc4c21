"""Decides what a sender of events may do that asks for permission before it sends.

The handshake is that of https://github.com/cloudevents/spec, `cloudevents/http-webhook.md`, part 4:
OPTIONS with the name of the sender and the requests per minute that it wants. It protects others
from senders, and admits no sender: each request must be signed. So the permission does not depend
on the webhook, and does not tell which webhooks exist. `WebHook-Request-Callback` is ignored: the
server would call an address that a stranger has chosen.
"""

import re
from collections.abc import Mapping

ALLOWED_ORIGIN = "WebHook-Allowed-Origin"
ALLOWED_RATE = "WebHook-Allowed-Rate"
MOST_PER_MINUTE = 6000
_ORIGIN = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
_RATE = re.compile(r"0*[1-9][0-9]{0,9}")


def grant(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the fields that permit what the request asks for, at most `MOST_PER_MINUTE`, or none
    if it names no sender or the rate is no positive number. Names of `headers` are in lower case.
    """
    origin = headers.get("webhook-request-origin", "")
    rate = headers.get("webhook-request-rate", str(MOST_PER_MINUTE))
    if not _ORIGIN.fullmatch(origin) or not _RATE.fullmatch(rate):
        return {}
    return {ALLOWED_ORIGIN: origin, ALLOWED_RATE: str(min(int(rate), MOST_PER_MINUTE))}
