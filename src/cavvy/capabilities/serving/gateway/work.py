"""Divides a replica's time among its requests.

At each moment, the requests in flight share the replica equally. The shares of all requests thus
add up to the time in which the replica had at least one request. `_virtual` is a running total: in
a time dt with n requests in flight, `_virtual` grows by dt / n. A request's share is the growth of
`_virtual` between the request's start and its end, so computing a share takes constant time. In a
batch, a request with k instances counts as k requests.
"""

from collections.abc import Mapping
from operator import add

from cavvy.capabilities.serving.bills import KeyWork
from cavvy.capabilities.serving.gateway.kept_counts import Count, KeptCounts, TokenCount
from cavvy.domain.ledger import TokenUse


class ReplicaWork:
    """The replica time that the requests of each client's key have used on one replica. Times are
    monotonic seconds. The number of requests is stored immediately; the time of the requests is
    stored whenever `keep` is called.
    """

    __slots__ = (
        "_at",
        "_by_key",
        "_counts",
        "_in_flight",
        "_kept",
        "_kept_at",
        "_name",
        "_prompts",
        "_prompts_at",
        "_prompts_s",
        "_tokens",
        "_virtual",
        "first_token_at",
    )

    def __init__(
        self,
        kept: KeptCounts,
        service: str = "",
        replica: str = "",
        former: Mapping[str, Count] | None = None,
        tokens: Mapping[tuple[str, str], TokenCount] | None = None,
    ) -> None:
        self._kept, self._name = kept, (service, replica)
        self._at = self._virtual = self._kept_at = 0.0
        self.first_token_at = 0.0  # the last one of any stream of the replica
        self._prompts = 0  # of streams whose first token has not come yet
        self._prompts_at = self._prompts_s = 0.0
        self._in_flight = 0  # the sum of the weights
        self._counts = dict(former or {})  # by key
        self._tokens = dict(tokens or {})  # by key and model
        # by key: the weights of those in flight, and the shares of those that ended, less the
        # values of `_virtual` at the starts of those in flight
        self._by_key: dict[str, list[float]] = {
            key: [0, count[1] / 1e6] for key, count in self._counts.items()
        }

    def begin(self, key: str, now: float, weight: int = 1) -> float:
        """Record the start of a request. Returns the request's mark, which is an argument of
        `share_s`."""
        virtual = self._pass(now)
        self._in_flight += weight
        known = self._by_key.get(key)
        if known is None:
            self._by_key[key] = [weight, -weight * virtual]
        else:
            known[0] += weight
            known[1] -= weight * virtual
        return virtual

    def count(self, key: str) -> None:
        """Count a request that is about to be sent to the replica. It has begun."""
        known = self._counts.get(key)
        if known is None:
            known = self._counts[key] = self._kept.find(*self._name, key)
        known[0] += 1

    @property
    def replica(self) -> str:
        """The ID of the replica."""
        return self._name[1]

    def __bool__(self) -> bool:
        """Return whether any request has started."""
        return bool(self._by_key)

    def end(self, key: str, now: float, weight: int = 1) -> None:
        """Record that one of the key's requests in flight has ended."""
        virtual = self._pass(now)
        self._in_flight -= weight
        known = self._by_key[key]
        known[0] -= weight
        known[1] += weight * virtual

    def share_s(self, mark: float, now: float, weight: int = 1) -> float:
        """Return the time of the replica, in seconds, that a request has used so far. `mark` is the
        value that `begin` returned when the request began.
        """
        return weight * (self._pass(now) - mark)

    def change_prompts(self, change: int, now: float) -> None:
        """Count a prompt that the replica computes from now on; remove it if `change` is -1."""
        self._prompts_s, self._prompts_at = self.count_prompts_s(now), now
        self._prompts += change

    def count_prompts_s(self, now: float) -> float:
        """Return the time in which the replica had a prompt to compute."""
        return self._prompts_s + (now - self._prompts_at if self._prompts else 0.0)

    def find_tokens(self, key: str, model: str) -> TokenCount:
        """Return the tokens of a client's key and a model; the caller increases them."""
        known = self._tokens.get((key, model))
        if known is None:
            known = self._tokens[key, model] = self._kept.find_tokens(*self._name, key, model)
        return known

    def describe(self, now: float) -> Mapping[str, KeyWork]:
        self.keep(now)
        tokens: dict[str, dict[str, TokenUse]] = {}
        for (key, model), count in self._tokens.items():
            tokens.setdefault(key, {})[model] = count.describe()
        return {
            key: KeyWork(requests=count[0], work_us=count[1], tokens=tokens.get(key, {}))
            for key, count in self._counts.items()
        }

    def sum_tokens(self) -> TokenUse:
        """Return the tokens of all clients and models."""
        found = TokenUse()
        for count in self._tokens.values():
            found = found.combine(add, count.describe())
        return found

    def keep(self, now: float) -> None:
        """Store the replica time that each key's requests have used so far."""
        virtual = self._pass(now)
        if self._at == self._kept_at:
            return
        self._kept_at = self._at
        for key, count in self._counts.items():
            flying, done = self._by_key[key]
            count[1] = max(count[1], round((done + flying * virtual) * 1e6))

    def forget(self) -> None:
        """Free the slots of the replica, which no longer exists. The requests that were in flight
        on the replica are not counted."""
        self._kept.forget(*self._name)
        self._kept, self._counts, self._tokens = KeptCounts(), {}, {}

    def _pass(self, now: float) -> float:
        if now > self._at:  # the clock readings of two callers may arrive in another order
            if self._in_flight:
                self._virtual += (now - self._at) / self._in_flight
            self._at = now
        return self._virtual
