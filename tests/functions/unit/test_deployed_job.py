"""What a program does that calls a deployed app."""

from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec import Raw

from cavvy.capabilities.functions import deployed, wire
from cavvy.client.client import ApiClient
from cavvy.client.errors import ApiError


class Connections:
    """Stands for connections to a server."""

    def use(self) -> "Connections":
        return self

    def __enter__(self) -> ApiClient:
        return None  # type: ignore[return-value]  # only the replaced functions get it

    def __exit__(self, *_: object) -> None:
        pass


def make_part(revision: str) -> wire.AppPart:
    return wire.AppPart(
        part=0,
        revision=revision,
        text=f"run: {revision}",
        origin=Raw(b"{}"),
        snapshot="",
        meet="",
        functions=[wire.DeployedFunction(name="f")],
        consent=False,
        job="",
        user="ada",
        updated_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


@pytest.mark.parametrize("consent", [False, True])
def test_an_app_that_is_deployed_meanwhile_is_read_again(
    consent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, submitted = ["r1", "r2"], list[tuple[str, bool]]()

    def claim(_: object, project: str, app: str, ask: wire.NextJobAsk) -> str:
        if ask.revision == "r1":
            raise ApiError("app-changed", "the app has no revision r1 any more", "", 409)
        return "job2"

    def submit(_: object, *given: Any, consent: bool) -> None:
        submitted.append((given[2].text, consent))

    monkeypatch.setattr(deployed, "find_part", lambda *_: make_part(read.pop(0)))
    monkeypatch.setattr(wire, "claim_job", claim)
    monkeypatch.setattr(deployed, "submit_part", submit)
    job = deployed.DeployedJob("embed", "f", "team", consent=consent)
    assert job.find(Connections()).id == "job2"  # type: ignore[arg-type]
    assert submitted == [("run: r2", consent)]
