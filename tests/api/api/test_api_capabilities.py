"""A server whose capabilities have faults."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.api.api_state import open_api

from cavvy.control import control_plane
from cavvy.frame.capability import Capability


class Broken:
    """A reconciler that cannot say what it has to do."""

    waits_outside = False

    def __init__(self, parts: object) -> None: ...

    def owns(self, key: str) -> bool:
        return key.startswith("broken:")

    async def unfinished(self) -> Sequence[str]:
        raise KeyError("a row that it does not know")


async def test_a_reconciler_that_fails_keeps_no_server_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = control_plane.load_all

    def load(pick: Any) -> Any:
        yield from found(pick)
        yield Capability("reminders", "Be reminded."), Broken

    monkeypatch.setattr(control_plane, "load_all", load)
    async with open_api("memory", tmp_path) as api:
        made = await api.submit("{name: t, run: 'true'}")
        assert (await api.attempt(made["id"])).gang
        status = await api.http.get("/v1/server")
    said = "reminders: does not say what it has to do (Broken): KeyError: 'a row that it does not know'"
    assert said in status.json()["capability_faults"]
    assert "the capability reminders does not say what it has to do (Broken)" in caplog.text
