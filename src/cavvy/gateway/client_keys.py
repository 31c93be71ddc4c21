"""Keys of clients: found by their hash, with a limit of the rate for each.

A key comes as `Authorization: Bearer KEY` or `X-API-Key: KEY`. It is not passed on to replicas.
"""

import math
from collections.abc import Iterable
from hashlib import sha256

from cavvy.gateway.config import ClientKey
from cavvy.gateway.heads import RequestHead


class TokenBucket:
    """Holds at most `burst` tokens and gains `per_s` a second; each request takes one."""

    __slots__ = ("_at", "_burst", "_per_s", "_tokens")

    def __init__(self, per_s: float, burst: int, now: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._tokens = float(burst)
        self._at = now

    def take(self, now: float) -> float:
        """Take a token: 0.0, or the seconds after which there is one."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._per_s


class ServiceKeys:
    """The keys of a service."""

    def __init__(self, keys: Iterable[ClientKey], now: float) -> None:
        self._keys = {key.sha256: key for key in keys}
        self._buckets = {
            key.id: TokenBucket(key.per_s, key.burst, now)
            for key in self._keys.values()
            if key.per_s is not None
        }

    def __bool__(self) -> bool:
        return bool(self._keys)

    def find(self, head: RequestHead) -> ClientKey | None:
        """The key of a request, or None."""
        secret = head.api_key
        if not secret and head.authorization[:7].lower() == b"bearer ":
            secret = head.authorization[7:].strip(b" ")
        return self._keys.get(sha256(secret).hexdigest()) if secret else None

    def wait_s(self, key: ClientKey, now: float) -> int:
        """Count a request of the key: 0, or the whole seconds after which it may call again."""
        bucket = self._buckets.get(key.id)
        return 0 if bucket is None else math.ceil(bucket.take(now))
