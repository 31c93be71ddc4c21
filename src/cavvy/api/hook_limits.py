"""Limits the load that callers without a token can cause at webhooks: the number of requests in
progress, and the number of wrong signatures of each address. The bodies of requests in progress are
held in memory. Senders such as GitHub have the same addresses for all webhooks, so wrong signatures
at one webhook must not block the other webhooks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta

IN_PROGRESS = 64  # requests in progress; each holds a body of at most 1 MiB
IN_PROGRESS_EACH = 16  # of one address
WRONG_EACH = 20  # wrong signatures at one webhook in a minute; then its requests are not read
WRONG_ALL = 200  # at all webhooks
_MOST_KEYS = 10_000
_WINDOW = timedelta(minutes=1)


class TooManyDeliveries(Exception):
    """Raised to reject a request that the sender may repeat after `after_s` seconds."""

    def __init__(self, after_s: int) -> None:
        super().__init__(f"too many requests; try again in {after_s} s")
        self.after_s = after_s


class HookLimits:
    """Counts requests to webhooks by address, and wrong signatures also by webhook. A load balancer
    in front of the server counts as one address.
    """

    def __init__(self) -> None:
        self._open: dict[str, int] = {}
        self._begun: datetime | None = None
        self._wrong: dict[tuple[str, str], int] = {}

    @contextmanager
    def enter(self, address: str, webhook: str, now: datetime) -> Iterator[None]:
        """Count a request as in progress. `webhook` is the path at which the request arrived.
        Raises TooManyDeliveries.
        """
        if self._begun is None or now - self._begun >= _WINDOW:
            self._begun, self._wrong = now, {}
        each, of_all = (self._wrong.get(key, 0) for key in self._keys(address, webhook))
        if each >= WRONG_EACH or of_all >= WRONG_ALL:
            left = self._begun + _WINDOW - now
            raise TooManyDeliveries(max(1, int(left.total_seconds()) + 1))
        mine = self._open.get(address, 0)
        if mine >= IN_PROGRESS_EACH or sum(self._open.values()) >= IN_PROGRESS:
            raise TooManyDeliveries(1)
        self._open[address] = mine + 1
        try:
            yield
        finally:
            self._open[address] -= 1
            if not self._open[address]:
                del self._open[address]

    def count_wrong(self, address: str, webhook: str) -> None:
        """Count a request with a wrong signature."""
        for key in self._keys(address, webhook):
            self._wrong[key] = self._wrong.get(key, 0) + 1

    def _keys(self, address: str, webhook: str) -> Sequence[tuple[str, str]]:
        """Return the keys under which a request is counted: one for the webhook, and one for the
        sender's address. If too many addresses are counted, the requests of all further addresses
        are counted together.
        """
        known = (address, "") in self._wrong or len(self._wrong) < _MOST_KEYS
        return ((address, webhook), (address, "")) if known else (("", "-"), ("", ""))
