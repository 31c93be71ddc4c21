"""Creates access tokens and service keys, and computes their hashes.

A token contains 256 random bits. Only the SHA-256 of a token is stored. An attacker would have to
try 2^255 tokens on average to find the token of a hash. Tokens are random, so a slow hash, which
passwords need, would not add security.
"""

import secrets
from hashlib import sha256

from cavvy.gateway.client_keys import SERVICE_KEY

PREFIX = "cavvy_"  # lets scanners for leaked secrets recognize tokens
_BYTES = 32
_LENGTH = len(PREFIX) + 43  # 256 bits in base64 without padding


def make_token() -> str:
    """Return a new token. The token is shown once and not stored."""
    return PREFIX + secrets.token_urlsafe(_BYTES)


def make_service_key() -> str:
    """Return a new key for calls to a service. The key cannot be used to sign in to a server."""
    return SERVICE_KEY + secrets.token_urlsafe(_BYTES)


def hash_token(token: str) -> str:
    """Return the hash under which a token is stored."""
    return sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def is_token(text: str) -> bool:
    """Return whether the text has the form of a token. The server looks up only texts of this form
    in the database.
    """
    return len(text) == _LENGTH and text.startswith(PREFIX)
