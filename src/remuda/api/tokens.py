"""Tokens of gangs: an HMAC of the gang's name under a secret of this installation, so none is stored."""

import base64
import hmac
import os
from hashlib import sha256

from starlette.requests import Request

from remuda.api.errors import Problem
from remuda.client.state import write_private

_BYTES = 32


class Tokens:
    """Makes and checks the tokens of gangs."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def of(self, gang: str) -> str:
        """The token that is good for this gang and the agents' routes only."""
        digest = hmac.digest(self._key, b"gang\0" + gang.encode("utf-8", "surrogatepass"), sha256)
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    def check(self, request: Request, gang: str) -> None:
        """Raises Problem unless the request shows this gang's token."""
        shown = request.scope.get("gang_token", "")
        if not hmac.compare_digest(shown.encode("latin-1"), self.of(gang).encode()):
            raise Problem("forbidden", "the token is not this gang's")


def load_tokens(path: str) -> Tokens:
    """The installation's own secret, made on first use. Losing the file dismisses every agent that runs."""
    try:
        with open(path, "rb") as file:
            key = file.read()
    except FileNotFoundError:
        key = b""
    if len(key) != _BYTES:
        key = os.urandom(_BYTES)
        write_private(path, key)
    return Tokens(key)
