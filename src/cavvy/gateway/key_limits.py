"""Limits of a client's key for language models: tokens a minute, and dollars a day.

A request is admitted by an estimate: a token for each four bytes of its body, and the tokens that
it asks for at most. When its answer has ended, the estimate is replaced by the tokens that the
engine has stated. The dollars are those of the replicas' time, as the ledger divides it; the day is
UTC's. They are kept in the file of counts.
"""

import math
from collections.abc import Iterable

from cavvy.domain.units import Money, format_usd
from cavvy.gateway.config import ClientKey
from cavvy.gateway.kept_counts import Count, KeptCounts
from cavvy.gateway.own_answers import AnswerCode, OwnAnswer
from cavvy.gateway.rates import TokenBucket

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
