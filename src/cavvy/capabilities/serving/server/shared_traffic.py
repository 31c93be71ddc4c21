"""Combines the traffic of services if several servers each have a gateway."""

import asyncio
import logging
import time
from collections.abc import Mapping

import msgspec

from cavvy.capabilities.serving.bills import KeyWork, RequestWork, merge_work
from cavvy.capabilities.serving.decide.traffic import (
    GatewayCount,
    GatewayTotals,
    ServiceTraffic,
    add_reports,
)
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.control.share import WorkShare
from cavvy.domain.values import replace
from cavvy.store.base import StoreError
from cavvy.store.channel import GatewayReport, GatewayReports

_log = logging.getLogger(__name__)
_NO_WORK = KeyWork(requests=0, work_us=0)
_HOUR_US = 3_600_000_000
_decode = msgspec.json.Decoder(GatewayCount).decode


class SharedTraffic:
    """Reports the counts of this server's gateway to the other servers, and adds up the counts of
    all gateways."""

    def __init__(self, reports: GatewayReports, share: WorkShare) -> None:
        self._reports, self._share = reports, share
        self._told: dict[str, GatewayCount] = {}  # by the ID of the service
        self._totals: dict[str, GatewayTotals] = {}
        # by service: what other gateways had counted, also those whose reports are missing now
        self._used: dict[str, RequestWork] = {}

    async def tell(self, counted: Mapping[str, GatewayCount]) -> None:
        """Store the new counts, which the other servers read. If the write fails, the next call
        stores the counts.
        """
        news = {name: each for name, each in counted.items() if self._is_new(name, each)}
        if not news:
            return
        try:
            await self._reports.put([_make_report(name, each) for name, each in news.items()])
        except StoreError as error:
            _log.warning("counts of requests were not sent to the other servers: %s", error)
            return
        self._told.update(news)

    async def read(
        self, service: StoredService, mine: GatewayCount | None
    ) -> ServiceTraffic | None:
        """Return the traffic of all gateways whose server is alive or may come back, or None if no
        gateway has reported traffic. The gateway of an absent server still sends requests to
        replicas, so its last report counts. The field `whole` of the result is true if every
        gateway already serves this version of the service. Raises StoreError.
        """
        alive = {each.id for each in self._share.recent} - {self._share.me.id}
        known = {} if mine is None else {self._share.me.id: mine}
        for report in await self._reports.list(service.id):
            if report.server in alive:
                known[report.server] = _decode(report.document)
        if not known:
            return None
        wanted = alive | {self._share.me.id}
        whole = known.keys() == wanted and all(
            each.version >= service.version and each.traffic.whole for each in known.values()
        )
        before = self._totals.get(service.id, GatewayTotals())
        totals = add_reports(before, known, time.monotonic(), whole=whole)
        self._totals[service.id] = totals
        return totals.sum

    async def read_work(self, service: str, mine: RequestWork | None) -> RequestWork | None:
        """Return the request counts of all gateways, including gateways of ended servers, or None
        if no counts exist. `mine` contains the counts of this server's gateway. Raises StoreError.
        """
        told = [_decode(each.document).traffic.work for each in await self._reports.list(service)]
        if mine is not None:
            told.append(mine)
        return merge_work(told) if told else None

    async def read_use(
        self, service: str, mine: RequestWork, rates: Mapping[str, int]
    ) -> dict[str, tuple[int, int]]:
        """Return the tokens and micro-dollars of each key that other gateways have counted since
        the last call. What a gateway counted before its first known report is left out, because it
        may have counted for months. `rates` are the micro-dollars of replicas per hour. Raises
        StoreError.
        """
        try:
            told = await self.read_work(service, None) or {}
        except msgspec.DecodeError as error:
            raise StoreError(f"the report of another server cannot be read: {error}") from error
        fresh = {epoch: replicas for epoch, replicas in told.items() if epoch not in mine}
        known = self._used.get(service, {})
        self._used[service] = {**known, **fresh}
        found: dict[str, tuple[int, int]] = {}
        for epoch, replicas in fresh.items():
            before = known.get(epoch, replicas)
            for replica, keys in replicas.items():
                for key, new in keys.items():
                    old = before.get(replica, {}).get(key, _NO_WORK)
                    tokens, micros = found.get(key, (0, 0))
                    tokens += max(0, _count_tokens(new) - _count_tokens(old))
                    rate = rates.get(replica, 0)
                    # the parts of a micro-dollar are not lost
                    spent = new.work_us * rate // _HOUR_US - old.work_us * rate // _HOUR_US
                    micros += max(0, spent)
                    found[key] = tokens, micros
        return {key: used for key, used in found.items() if any(used)}

    async def forget(self, service: str) -> None:
        """Delete the reports on a service that has been removed."""
        self._told.pop(service, None)
        self._used.pop(service, None)
        self._totals.pop(service, None)
        try:
            await self._reports.delete(service)
        except StoreError as error:
            _log.info("the reports on a removed service were not deleted: %s", error)

    async def close(self) -> None:
        await asyncio.to_thread(self._reports.close)

    def _is_new(self, name: str, counted: GatewayCount) -> bool:
        told = self._told.get(name)
        return told is None or _without_time(told) != _without_time(counted)


def _count_tokens(work: KeyWork) -> int:
    return sum(each.prompt + each.completion for each in work.tokens.values())


def _without_time(counted: GatewayCount) -> GatewayCount:
    return replace(counted, traffic=replace(counted.traffic, at_s=0.0))


def _make_report(service: str, counted: GatewayCount) -> GatewayReport:
    return GatewayReport(service=service, document=msgspec.json.encode(counted).decode())
