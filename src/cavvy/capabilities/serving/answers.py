"""Requests to a service at the gateway, and answers in OpenAI's format; `cavvy call`, `cavvy chat`
and the console use it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from msgspec import DecodeError
from msgspec.json import decode

if TYPE_CHECKING:
    from http.client import HTTPResponse


CHAT_PATH = "/v1/chat/completions"


class ServiceSilent(Exception):
    """Raised if a service's gateway does not answer."""


@contextmanager
def open_answer(
    url: str,
    path: str,
    method: str,
    body: bytes | None,
    headers: Mapping[str, str],
    timeout_s: float,
) -> "Iterator[HTTPResponse]":
    """Yield the response before its body is read. Raises ServiceSilent."""
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    where = urlsplit(url)
    kind = HTTPSConnection if where.scheme == "https" else HTTPConnection
    connection = kind(where.hostname or "", where.port, timeout=timeout_s)
    try:
        connection.request(method, where.path + path, body, headers)
        yield connection.getresponse()
    except (OSError, HTTPException) as error:
        raise ServiceSilent(f"{url}: {error or type(error).__name__}") from error
    finally:
        connection.close()


def find_model(body: bytes) -> str:
    """Return the first model of a list in OpenAI's format, or ""."""
    with suppress(ValueError, LookupError, TypeError):
        return str(_decode(body)["data"][0]["id"])
    return ""


def say_problem(body: bytes) -> str:
    """Return the message of an error in OpenAI's format, or else the whole text."""
    with suppress(ValueError, LookupError, TypeError):
        found = _decode(body)
        message = found.get("error", found)["message"] if isinstance(found, dict) else None
        if isinstance(message, str):
            return message
    return body.decode(errors="replace")


def find_text(data: bytes, key: str) -> str:
    """Return the text of a whole answer (`key` is "message") or of one event ("delta"). Raises
    ValueError if the answer is not JSON.
    """
    found = _decode(data)
    choices = found.get("choices") if isinstance(found, dict) else None
    for choice in choices or ():
        return (choice.get(key) or {}).get("content") or ""
    return ""


def _decode(body: bytes) -> Any:
    """Raises ValueError if the body is not JSON."""
    try:
        return decode(body)
    except (DecodeError, RecursionError) as error:  # others are ValueError already
        raise ValueError(str(error)) from error
