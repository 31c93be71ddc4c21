"""`cavvy state list`, with answers of the server that are given."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pytest
from click.testing import CliRunner

from cavvy.capabilities.functions.state import command, wire
from cavvy.cli.main import cli
from cavvy.client import ApiError
from cavvy.client.wire import VolumeView

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Client:
    """A client of a server that does not list volumes, unless some are given."""

    def __init__(self, listed: Sequence[VolumeView] | None = None) -> None:
        self.listed = listed

    def volumes(self, project: str) -> Any:
        if self.listed is None:
            raise ApiError("not-found", "nothing is here", status=404)
        return self.listed


def run(
    monkeypatch: pytest.MonkeyPatch,
    found: list[wire.StateView],
    *words: str,
    volumes: Sequence[VolumeView] | None = None,
) -> Any:
    @contextmanager
    def session() -> Iterator[Client]:
        yield Client(volumes)

    def list_objects(client: Client, project: str, kind: str) -> list[wire.StateView]:
        return [each for each in found if each.kind == kind]

    monkeypatch.setattr(command, "session", session)
    monkeypatch.setattr(wire, "list_objects", list_objects)
    return CliRunner().invoke(cli, ["state", "list", "--project", "p", *words])


def test_dicts_are_listed_though_the_volumes_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made = wire.StateView(
        kind="dict", name="seen", entries=1, bytes=2, user="", created_at=NOW, changed_at=NOW
    )
    done = run(monkeypatch, [made], "-o", "json")
    assert done.exit_code == 0
    assert [each["name"] for each in json.loads(done.stdout)] == ["seen"]
    assert "the volumes of p cannot be listed: nothing is here" in done.stderr.replace("\n", " ")


def test_nothing_is_said_of_volumes_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    done = run(monkeypatch, [])
    assert "project p has no dicts and queues;" in done.stdout + done.stderr


def test_a_volume_is_shown_with_its_host_also_if_the_host_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = VolumeView(
        name="data", provider="local", files=1, size_bytes=2, changed_at=NOW, problem=""
    )
    silent = VolumeView(name="models", provider="ssh", host="h1", problem="h1: cut")
    done = run(monkeypatch, [], volumes=[known, silent])
    assert done.exit_code == 0
    assert "ssh/h1" in done.stdout
    told = " ".join(done.stderr.split())
    assert "the files of the volume models cannot be counted: h1: cut" in told
    rows = json.loads(run(monkeypatch, [], "-o", "json", volumes=[known, silent]).stdout)
    assert [(each["place"], each["bytes"]) for each in rows] == [("local", 2), ("ssh/h1", None)]
