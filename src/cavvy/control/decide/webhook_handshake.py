"""Answers event senders that ask for permission before they send events.

The handshake is defined in https://github.com/cloudevents/spec, `cloudevents/http-webhook.md`, part
4: the sender sends an OPTIONS request with its name and the number of requests per minute that it
wants. The handshake gives no access, because every later request must be signed. The server gives
the same answer for all webhooks, so the answer does not reveal which webhooks exist.
`WebHook-Request-Callback` is ignored, because the server would otherwise call an address that a
stranger has chosen.
"""

import re
from collections.abc import Mapping

ALLOWED_ORIGIN = "WebHook-Allowed-Origin"
ALLOWED_RATE = "WebHook-Allowed-Rate"
MOST_PER_MINUTE = 6000
_ORIGIN = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?")
_RATE = re.compile(r"0*[1-9][0-9]{0,9}")


def grant(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers that grant the requested rate, but at most `MOST_PER_MINUTE`. Return no
    headers if the sender's name is missing or invalid, or if the sender requests a rate that is not
    a positive integer. The names in `headers` are in lower case.
    """
    origin = headers.get("webhook-request-origin", "")
    rate = headers.get("webhook-request-rate", str(MOST_PER_MINUTE))
    if not _ORIGIN.fullmatch(origin) or not _RATE.fullmatch(rate):
        return {}
    return {ALLOWED_ORIGIN: origin, ALLOWED_RATE: str(min(int(rate), MOST_PER_MINUTE))}
