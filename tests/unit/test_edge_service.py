"""Servers that share the devices of a project."""

import asyncio
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cavvy.control.edge import EdgeService, EnrolmentRefused, edge_key
from cavvy.domain.edge import DeviceReport
from cavvy.store.open import MemoryStore

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def test_reports_to_another_server_do_not_bring_a_retired_device_back() -> None:
    async def play() -> None:
        store, clock = MemoryStore(), cast(Any, SimpleNamespace(now=lambda: NOW))
        one, two = (EdgeService(store, clock, lambda key: None) for _ in range(2))
        token, _ = await one.invite("p", site="lyon", labels={}, count=1, valid=timedelta(hours=1))
        device = await one.enrol("p", token, "0" * 64, "box", {})
        await two.check_in("p", device.name, DeviceReport(at=NOW))  # which keeps its row in memory
        await one.retire("p", device.name)
        for _ in range(3):
            try:
                await two.check_in("p", device.name, DeviceReport(at=NOW))
            except EnrolmentRefused:
                break
            await two.reconcile(edge_key("p"))
        stored = await store.edge.devices.get("p", device.name)
        assert stored.retired_at == NOW
        with pytest.raises(EnrolmentRefused):
            await two.check_in("p", device.name, DeviceReport(at=NOW))

    asyncio.run(play())
