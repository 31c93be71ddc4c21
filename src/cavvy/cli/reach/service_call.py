"""Requests to a service at the gateway, for `cavvy call` and `cavvy chat`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from http.client import HTTPResponse


@contextmanager
def ask_service(
    url: str,
    path: str,
    method: str,
    body: bytes | None,
    headers: Mapping[str, str],
    timeout_s: float,
) -> "Iterator[HTTPResponse]":
    """The response, whose body is not read yet. Raises CommandFailure."""
    from http.client import HTTPConnection, HTTPException, HTTPSConnection
    from urllib.parse import urlsplit

    where = urlsplit(url)
    kind = HTTPSConnection if where.scheme == "https" else HTTPConnection
    connection = kind(where.hostname or "", where.port, timeout=timeout_s)
    try:
        connection.request(method, where.path + path, body, headers)
        yield connection.getresponse()
    except (OSError, HTTPException) as error:
        text = f"{url}: {error or type(error).__name__}"
        raise CommandFailure(text, "`cavvy services` shows the service") from error
    finally:
        connection.close()
