"""Counts the requests that HAProxy sends directly to replicas, without the gateway.

HAProxy counts requests separately for each HAProxy server. The names of HAProxy servers differ
between HAProxy processes, and a process loses its counts when it ends. This module stores the
counts in a file, by service, replica and HAProxy server. The module estimates the total duration of
the requests: their number multiplied by the recent mean duration that HAProxy reports. The
estimated duration of the requests on one HAProxy server is at most the time since its counts were
last read.
"""

from collections.abc import Iterable, Mapping
from math import inf
from pathlib import Path
from time import monotonic

from cavvy.domain.request_bills import KeyWork, RequestWork
from cavvy.gateway.haproxy.runtime import ServerRequests
from cavvy.gateway.kept_counts import KeptCounts

_GONE_KEPT = 32  # replicas that are no longer servers of HAProxy


class DirectRequests:
    """The counts of all HAProxy processes of this server."""

    def __init__(self, path: Path) -> None:
        self._kept = KeptCounts(path)
        self._read_at: dict[str, dict[str, float]] = {}  # by service and replica

    def note(self, service: str, found: Mapping[str, ServerRequests]) -> None:
        """Record the counts of requests that HAProxy reports for the replicas of a service."""
        now, before = monotonic(), self._read_at.get(service, {})
        for name, each in found.items():
            replica, _, server = name.rpartition(".")
            longest_s = now - before[replica] if replica in before else inf
            count = self._kept.find(service, replica, server)
            more = each.requests - count[0]
            if more > 0:
                count[1] += round(1e6 * min(more * each.mean_s, longest_s))
                count[0] = each.requests
        self._read_at[service] = {name.rpartition(".")[0]: now for name in found}
        known, current = self._kept.resume(service), self._read_at[service]
        gone = [replica for replica in known if replica not in current]
        for replica in gone[:-_GONE_KEPT]:
            self._kept.forget(service, replica)

    def describe(self, service: str) -> RequestWork:
        work = {
            replica: {
                "": KeyWork(
                    requests=sum(each[0] for each in counts.values()),
                    work_us=sum(each[1] for each in counts.values()),
                )
            }
            for replica, counts in self._kept.resume(service).items()
        }
        return {self._kept.epoch: work} if work else {}

    def keep_only(self, services: Iterable[str]) -> None:
        """Forget all other services."""
        kept = dict.fromkeys(services)
        self._kept.keep_only(kept)
        self._read_at = {name: times for name, times in self._read_at.items() if name in kept}

    def close(self) -> None:
        self._kept.close()
