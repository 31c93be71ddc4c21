"""The keys of clients, which are looked up by their hash, with the limits of each key.

A client sends its key as `Authorization: Bearer KEY` or `X-API-Key: KEY`. A key that Cavvy made is
also found where other programs expect theirs, such as in `X-Goog-Api-Key`, the query, or the
password of `Authorization: Basic`. The gateway never logs the key, stores it, or passes it on to a
replica, even if the request is for a service without keys.

For language models, a key can limit the tokens a minute and the dollars a day. A request is
admitted by an estimate: a token for each four bytes of its body, and the tokens that it asks for at
most. When its answer has ended, the estimate is replaced by the tokens that the engine has stated.
The dollars are those of the replicas' time, as the ledger divides it; the day is UTC's. They are
kept in the file of counts.
"""

import math
from collections.abc import Iterable, Sequence
from hashlib import sha256
from hmac import compare_digest

from cavvy.capabilities.serving.gateway.config import ClientKey
from cavvy.capabilities.serving.gateway.heads import RequestHead
from cavvy.capabilities.serving.gateway.kept_counts import Count, KeptCounts
from cavvy.capabilities.serving.gateway.own_answers import AnswerCode, OwnAnswer
from cavvy.capabilities.serving.gateway.rates import TokenBucket
from cavvy.domain.units import Money, format_usd

SERVICE_KEY = "cavvysvc_"  # the beginning of every key that Cavvy makes
_MADE = SERVICE_KEY.encode()


def read_secret(head: RequestHead) -> bytes:
    """Return the key in a request, or b"" if the request has no key."""
    secret = head.api_key
    if not secret and head.authorization[:7].lower() == b"bearer ":
        secret = head.authorization[7:].strip(b" ")
    # another credential may be for the program
    return secret if secret.startswith(_MADE) or not head.found_key else head.found_key


class ServiceKeys:
    """The keys of a service. `used` contains the time of each key's last request, in seconds since
    1970; unused keys are not listed.
    """

    def __init__(self, keys: Sequence[ClientKey], needed: bool, now: float) -> None:
        self._keys = {bytes.fromhex(key.sha256): key for key in keys}
        self._needed = needed or bool(self._keys)
        self._buckets = {
            key.id: (key, TokenBucket(key.per_s, key.burst, now))
            for key in self._keys.values()
            if key.per_s is not None
        }
        self._residencies = {key.id: key.residency for key in keys if key.residency}
        self.used: dict[str, float] = {}

    def __bool__(self) -> bool:
        """Return whether requests need a key."""
        return self._needed

    def find(self, head: RequestHead, clock: float) -> ClientKey | None:
        """Return the key of a request, or None if the request has no valid key. `clock` is the
        current time in seconds since 1970.
        """
        key = self._find(head, clock)
        if key is not None:
            self.used[key.id] = clock
        return key

    def knows(self, head: RequestHead, clock: float) -> bool:
        """Return whether a request has one of the service's keys. The check does not count as a use
        of the key.
        """
        return self._find(head, clock) is not None

    def name(self, head: RequestHead, clock: float) -> str:
        """Return the ID of a request's key, or "" if the request has none of the service's keys."""
        key = self._find(head, clock)
        return "" if key is None else key.id

    def recall(self, key_id: str, clock: float) -> ClientKey | None:
        """Return a key by its ID, or None if the key was revoked or has expired."""
        key = next((each for each in self._keys.values() if each.id == key_id), None)
        return None if key is None or _is_expired(key, clock) else key

    def _find(self, head: RequestHead, clock: float) -> ClientKey | None:
        """Find a key. The key's digest is looked up in a dictionary, whose hashes depend on a
        random secret of this process. The digests are then compared in constant time. Therefore the
        duration of the search reveals nothing about the keys.
        """
        digest = sha256(read_secret(head)).digest()
        key = self._keys.get(digest)
        if key is None or not compare_digest(digest.hex(), key.sha256):
            return None
        return None if _is_expired(key, clock) else key

    def bind(self, head: RequestHead, key_id: str) -> frozenset[str]:
        """Return the places that a request must not leave: the places in the request's head, and
        the residency of the client key.
        """
        residency = self._residencies.get(key_id)
        return head.places if residency is None else head.places | {residency}

    def write_residency(self, key_id: str) -> bytes:
        """Return the header field that states where the requests of a key must stay, or b"" if the
        key does not restrict the places.
        """
        residency = self._residencies.get(key_id)
        return b"" if residency is None else b"Cavvy-Residency: %b\r\n" % residency.encode()

    def wait_s(self, key: ClientKey, now: float) -> int:
        """Count a request of the key; return 0, or the whole seconds after which the key may be
        used again."""
        found = self._buckets.get(key.id)
        return 0 if found is None else math.ceil(found[1].take(now))

    def adopt(self, old: "ServiceKeys") -> None:
        """Copy the counts of unchanged keys from the service's older route."""
        ids = {key.id for key in self._keys.values()}
        self.used = {name: at for name, at in old.used.items() if name in ids}
        for name, (key, bucket) in old._buckets.items():
            mine = self._buckets.get(name)
            if mine is not None and (mine[0].per_s, mine[0].burst) == (key.per_s, key.burst):
                self._buckets[name] = (mine[0], bucket)


def _is_expired(key: ClientKey, clock: float) -> bool:
    return key.expires_at is not None and key.expires_at <= clock


_DAY_S = 86_400
_RETRIED_S = 60  # OpenAI's clients wait at most this long before they repeat a request


class KeyLimit:
    """What a key may still use."""

    def __init__(self, key: ClientKey, spent: Count, now: float) -> None:
        self.key = key
        self._spent = spent  # the day, and the micro-dollars of this day
        self._bucket: TokenBucket | None = None
        if key.tokens_per_min is not None:
            self._bucket = TokenBucket(key.tokens_per_min / 60, key.tokens_per_min, now)

    def refuse_spent(self, clock: float) -> OwnAnswer | None:
        """Return the answer to a request if the key's dollars of the day are spent."""
        limit = self.key.micros_per_day
        if limit is None or self._read_day(clock) < limit:
            return None
        dollars = format_usd(Money(limit))
        text = f"the key {self.key.id} may spend {dollars} a day (UTC), which are spent"
        return self._refuse(text, math.ceil(_DAY_S - clock % _DAY_S))

    def take(self, tokens: int, now: float) -> OwnAnswer | None:
        """Count the tokens of a request, or return the answer to a request above the limit. A
        request of more tokens than the limit passes if nothing of the limit is used.
        """
        if self._bucket is None:
            return None
        wait_s = self._bucket.take(now, tokens)
        if not wait_s:
            return None
        limit = self.key.tokens_per_min or 0
        text = (
            f"the key {self.key.id} may use {limit:,} tokens a minute, and the request may need "
            f"{tokens:,}"
        )
        return self._refuse(text, math.ceil(wait_s), now)

    def correct(self, more: int) -> None:
        """Count the tokens of an answer, less those for which its request was admitted."""
        if self._bucket is not None:
            self._bucket.give_back(-more)

    def count_elsewhere(self, tokens: int, micros: int, now: float, clock: float) -> None:
        """Count what the key has used at other gateways."""
        if self._bucket is not None:
            self._bucket.take_used(now, tokens)
        self.spend(micros, clock)

    def spend(self, micros: float, clock: float) -> None:
        self._spent[1] = self._read_day(clock) + round(micros)

    def write_fields(self, now: float) -> bytes:
        """Return OpenAI's header fields for the limit of tokens, or b""."""
        if self._bucket is None:
            return b""
        left, reset_s = self._bucket.look(now)
        return (
            b"x-ratelimit-limit-tokens: %d\r\nx-ratelimit-remaining-tokens: %d\r\n"
            b"x-ratelimit-reset-tokens: %.3gs\r\n"
        ) % (self.key.tokens_per_min or 0, max(0, left), reset_s)

    def adopt(self, old: "KeyLimit") -> None:
        if self.key.tokens_per_min == old.key.tokens_per_min:
            self._bucket = old._bucket

    def _read_day(self, clock: float) -> int:
        day = int(clock // _DAY_S)
        if self._spent[0] != day:
            self._spent[0], self._spent[1] = day, 0
        return self._spent[1]

    def _refuse(self, text: str, wait_s: int, now: float | None = None) -> OwnAnswer:
        fields = b"" if now is None else self.write_fields(now)
        if wait_s > _RETRIED_S:
            fields += b"x-should-retry: false\r\n"  # of OpenAI's clients, which wait less
        return OwnAnswer(429, AnswerCode.TOO_MANY, text, wait_s, fields=fields)


def make_limits(
    service: str, keys: Iterable[ClientKey], kept: KeptCounts, now: float
) -> dict[str, KeyLimit]:
    """Return the limits of keys that have any, by the keys' IDs."""
    return {
        key.id: KeyLimit(key, kept.find_day(service, key.id), now)
        for key in keys
        if key.tokens_per_min is not None or key.micros_per_day is not None
    }
