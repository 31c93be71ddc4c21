"""The traffic of services with several servers, each of which has a gateway."""

import asyncio
import logging
import time
from collections.abc import Mapping

import msgspec

from cavvy.control.decide.gateways import GatewayCount, GatewayTotals, add_reports
from cavvy.control.decide.traffic import ServiceTraffic
from cavvy.control.share import WorkShare
from cavvy.domain.stored_services import StoredService
from cavvy.domain.values import replace
from cavvy.store.base import StoreError
from cavvy.store.gateway_reports import GatewayReport, GatewayReports

_log = logging.getLogger(__name__)
_decode = msgspec.json.Decoder(GatewayCount).decode


class SharedTraffic:
    """Tells the other servers what this one's gateway has counted, and adds up all of it."""

    def __init__(self, reports: GatewayReports, share: WorkShare) -> None:
        self._reports, self._share = reports, share
        self._told: dict[str, GatewayCount] = {}  # by the ID of the service
        self._totals: dict[str, GatewayTotals] = {}

    async def tell(self, counted: Mapping[str, GatewayCount]) -> None:
        """Store what is new for the other servers. If that fails, it is stored the next time."""
        news = {name: each for name, each in counted.items() if self._is_new(name, each)}
        if not news:
            return
        try:
            await self._reports.put([_make_report(name, each) for name, each in news.items()])
        except StoreError as error:
            _log.warning("other servers do not learn of requests: %s", error)
            return
        self._told.update(news)

    async def read(
        self, service: StoredService, mine: GatewayCount | None
    ) -> ServiceTraffic | None:
        """The traffic of all gateways whose server lives; None if none has told any. It is whole if
        all of them know this version of the service. Raises StoreError.
        """
        alive = {each.id for each in self._share.servers}
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

    async def forget(self, service: str) -> None:
        """The service is gone."""
        self._told.pop(service, None)
        self._totals.pop(service, None)
        try:
            await self._reports.delete(service)
        except StoreError as error:
            _log.info("reports on a service that is gone were not deleted: %s", error)

    async def close(self) -> None:
        await asyncio.to_thread(self._reports.close)

    def _is_new(self, name: str, counted: GatewayCount) -> bool:
        told = self._told.get(name)
        return told is None or _without_time(told) != _without_time(counted)


def _without_time(counted: GatewayCount) -> GatewayCount:
    return replace(counted, traffic=replace(counted.traffic, at_s=0.0))


def _make_report(service: str, counted: GatewayCount) -> GatewayReport:
    return GatewayReport(service=service, document=msgspec.json.encode(counted).decode())
