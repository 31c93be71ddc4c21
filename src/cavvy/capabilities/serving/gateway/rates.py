"""Limits the rate of requests by token buckets for the service, its keys, addresses or headers."""

import math
import posixpath
import re
from collections import OrderedDict
from collections.abc import Iterable
from hashlib import sha256
from urllib.parse import unquote_to_bytes

from cavvy.capabilities.serving.gateway.config import RateLimit
from cavvy.capabilities.serving.gateway.heads import RequestHead
from cavvy.capabilities.serving.gateway.routing import is_below

# characters with which a path can be written in more than one way
_UNUSUAL = re.compile(rb"%|//|/\.")
# maximum buckets of each limit; the bucket that was unused for longest is dropped first
_MOST_BUCKETS = 10_000


class TokenBucket:
    """A token bucket with at most `burst` tokens that gains `per_s` tokens a second; each request
    takes one token."""

    __slots__ = ("_at", "_burst", "_per_s", "_tokens")

    def __init__(self, per_s: float, burst: int, now: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._tokens = float(burst)
        self._at = now

    def take(self, now: float, wanted: int = 1) -> float:
        """Take tokens and return 0.0, or return the seconds until they are available. If more are
        wanted than the bucket can hold, a full bucket is enough, and is in debt afterwards.
        """
        self._fill(now)
        needed = min(wanted, self._burst)
        if self._tokens >= needed:
            self._tokens -= wanted
            return 0.0
        return (needed - self._tokens) / self._per_s

    def give_back(self, tokens: int = 1) -> None:
        """Put tokens back into the bucket, because the request that took them was refused for
        another reason than this limit, or has used less. If it has used more, `tokens` is negative.
        """
        self._tokens = min(self._burst, self._tokens + tokens)

    def take_used(self, now: float, tokens: int) -> None:
        """Take tokens that were used elsewhere. They bring the bucket at most as far into debt as
        it can hold, because those of a long time may be told at once."""
        self._fill(now)
        self._tokens = max(min(self._tokens, -self._burst), self._tokens - tokens)

    def look(self, now: float) -> tuple[float, float]:
        """Return the tokens in the bucket, and the seconds until it is full."""
        self._fill(now)
        return self._tokens, (self._burst - self._tokens) / self._per_s

    def _fill(self, now: float) -> None:
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now


class LimitedRate:
    """One limit, with a separate bucket for each value of its scope, such as each client."""

    def __init__(self, limit: RateLimit) -> None:
        self.limit = limit
        self._prefix = limit.prefix.encode()
        self._header = limit.header.encode()
        self._buckets: OrderedDict[bytes, TokenBucket] = OrderedDict()

    def covers(self, target: bytes) -> bool:
        return not self._prefix or is_below(target, self._prefix)

    def find_bucket(self, head: RequestHead, key: str, peer: bytes, now: float) -> TokenBucket:
        match self.limit.each:
            case "client":
                name = key.encode() or peer
            case "address":
                name = peer
            case "header":
                # the value may be long, or a secret that must not be stored
                name = sha256(head.get_header(self._header)).digest()
            case "service":
                name = b""
        bucket = self._buckets.get(name)
        if bucket is None:
            if len(self._buckets) >= _MOST_BUCKETS:
                self._buckets.popitem(last=False)
            bucket = TokenBucket(self.limit.per_s, self.limit.burst, now)
            self._buckets[name] = bucket
        else:
            self._buckets.move_to_end(name)
        return bucket


def make_plain(target: bytes) -> bytes:
    """Return the target with its path normalised as most programs do: `//v1/../v1/%61` becomes
    `/v1/a`.
    """
    if not _UNUSUAL.search(target):
        return target
    path, mark, query = target.partition(b"?")
    if not _UNUSUAL.search(path):
        return target
    return b"/" + posixpath.normpath(unquote_to_bytes(path)).lstrip(b"/") + mark + query


class ServiceRates:
    """The limits of a service that do not belong to a key."""

    def __init__(self, limits: Iterable[RateLimit]) -> None:
        self._rates = [LimitedRate(limit) for limit in limits]

    def __bool__(self) -> bool:
        return bool(self._rates)

    def take(
        self, head: RequestHead, target: bytes, key: str, peer: bytes, now: float
    ) -> tuple[RateLimit, int] | None:
        """Count a request in each limit that covers it. If a limit is exhausted, no limit counts
        the request, and the method returns the exhausted limit and the whole seconds until this
        limit permits a request.
        """
        taken: list[TokenBucket] = []
        target = make_plain(target)
        for rate in self._rates:
            if not rate.covers(target):
                continue
            bucket = rate.find_bucket(head, key, peer, now)
            wait_s = bucket.take(now)
            if wait_s:
                for each in taken:
                    each.give_back()
                return rate.limit, math.ceil(wait_s)
            taken.append(bucket)
        return None

    def adopt(self, old: "ServiceRates") -> None:
        """Copy the counts of unchanged limits from the service's older route."""
        before = {each.limit: each for each in old._rates}
        self._rates = [before.get(each.limit, each) for each in self._rates]
