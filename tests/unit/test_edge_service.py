"""Servers that share the devices of a project, and the command that collects their samples."""

import asyncio
import os
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from cavvy.cli import edge
from cavvy.client.edge_wire import SamplesView, SampleView
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


def test_collected_samples_replace_no_device_and_no_missing_folder_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = SamplesView(samples=[SampleView(device="d", number=1, body="{}")], left_out=0, after="")
    monkeypatch.setattr(edge, "session", lambda: nullcontext(None))
    monkeypatch.setattr("cavvy.client.edge_wire.list_samples", lambda *_, **__: page)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for out in (pipe, tmp_path / "no" / "file", tmp_path):
        found = CliRunner().invoke(edge.command, ["collect", "m", "--out", str(out)])
        assert found.exit_code == 2, found
    assert pipe.is_fifo()
    good = tmp_path / "hard.jsonl"
    assert CliRunner().invoke(edge.command, ["collect", "m", "--out", str(good)]).exit_code == 0
    assert good.read_text() == '{"device": "d"}\n'
    assert sorted(os.listdir(tmp_path)) == ["hard.jsonl", "pipe"]
