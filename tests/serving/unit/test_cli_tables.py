"""Tables of services keep names whole: see `tests/cli/unit/test_cli_layout.py`."""

import pytest
from click.testing import CliRunner
from tests.cli.unit.test_cli_layout import (
    NAME,
    PROJECT,
    REASON,
    USER,
    at,
    client,
    long_names,
    width,
)
from tests.unit.cli_client import FakeClient

from cavvy.capabilities.serving import call_wire, wire
from cavvy.cli.main import cli

__all__ = ["client", "long_names", "width"]

SERVICE_KEY = wire.ServiceKeyView(
    id="0123456789abcdef",
    label=REASON,
    user=USER,
    per_s=1.5,
    burst=10,
    created_at=at(0),
    expires_at=at(9),
    used_at=at(5),
)


QUEUED = call_wire.QueuedCallView(
    id="01jdqk3w5t9xz7e2aaaaaaaaaa",
    state="waiting",
    method="POST",
    path="/",
    source="bucket",
    object=f"s3://{NAME}/{NAME}",
    user=USER,
    submitted_at=at(0),
    due_at=at(9),
    tries=3,
    problem=REASON,
    status=504,
    answer_headers={},
    ended_at=None,
    expires_at=None,
)


def make_service() -> wire.ServedView:
    return wire.ServedView(
        project=PROJECT,
        name=NAME,
        user=USER,
        state="failing",
        url=f"http://127.0.0.1:65535/{PROJECT}/{NAME}",
        models=[],
        revision=12,
        created_at=at(0),
        ready=10,
        target=12,
        why="backlog",
        least=0,
        most=12,
        problem=REASON,
        replicas=[],
        traffic=None,
        spent_micros=123_456_789,
    )


@pytest.mark.parametrize("width", [80, 50, 200], indirect=True)
@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("services", NAME),
        (f"key list {NAME}", "0123456789abcdef"),
        (f"queue list {NAME}", QUEUED.id),
    ],
)
def test_tables_keep_names_whole(
    long_names: FakeClient, width: int, command: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "list_services", lambda *_: [make_service()])
    monkeypatch.setattr(wire, "list_service_keys", lambda *_: [SERVICE_KEY])
    queue = call_wire.CallQueueView(calls=[QUEUED], counts={"waiting": 1})
    monkeypatch.setattr(call_wire, "list_calls", lambda *_, **asked: queue)
    told = CliRunner().invoke(cli, command.split(), prog_name="cavvy")
    assert shown in told.stdout, told.output
    assert "…" not in told.stdout
