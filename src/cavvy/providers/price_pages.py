"""Reads the pages of price lists, which are JSON objects."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from cavvy.http_client import HttpClient, NoReply, ReplyTooLong
from cavvy.providers.prices import PriceError

_UNCHANGED = "nothing was changed"


class PageRefused(PriceError):
    """Raised for a status that another attempt would not change."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def read_page(
    client: HttpClient,
    url: str,
    pause: Callable[[float], None],
    *,
    tries: int,
    name: str,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Mapping[str, object]:
    """Return a page of the price list `name`; request the page again after a temporary fault.
    Raises PriceError.
    """
    fault = ""
    for attempt in range(tries):
        if attempt:
            pause(min(2.0**attempt, 30))
        try:
            reply = client.send("GET", url, None, {"Accept": "application/json", **headers})
            told = reply.parse_json() if reply.status == 200 else None
        except ReplyTooLong as error:
            raise PriceError(f"a page of {name} is too large: {error}; {_UNCHANGED}") from error
        except NoReply as error:
            fault = str(error)
            continue
        if isinstance(told, dict):
            return told
        fault = f"HTTP {reply.status}" if told is None else "the response is not a JSON object"
        if told is None and not reply.is_passing:
            raise PageRefused(f"{name} cannot be read: {fault}; {_UNCHANGED}", reply.status)
    raise PriceError(f"{name} cannot be read: {fault}; {_UNCHANGED}; try again later")
