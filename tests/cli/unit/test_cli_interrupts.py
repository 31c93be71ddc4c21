"""Ctrl-C while a job is being submitted: the job that the server has queued is named."""

import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.unit.cli_client import FakeClient, client

from cavvy.cli.main import cli
from cavvy.cli.reach.interrupts import held_interrupt
from cavvy.client import ApiError, wire

__all__ = ["client"]


def interrupt(times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGINT)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["run", *arguments], prog_name="cavvy")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "task.yaml"
    path.write_text("name: train\nrun: echo hi\n")
    return str(path)


def test_a_job_that_was_queued_is_named(
    client: FakeClient, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(text: str, **how: object) -> wire.Submitted:
        interrupt()
        return wire.Submitted(id="new", project="default", name="train-7", phase="queued")

    monkeypatch.setattr(client, "submit", submit)
    found = run(file)
    assert found.exit_code == 130
    assert "detached: train-7 keeps running" in found.stderr
    assert "cavvy stop train-7" in found.stderr


def test_the_second_time_gives_up(
    client: FakeClient, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(text: str, **how: object) -> wire.Submitted:
        interrupt(2)
        raise AssertionError("the request goes on")

    monkeypatch.setattr(client, "submit", submit)
    found = run(file)
    assert found.exit_code == 130
    assert "`cavvy ps` shows whether the server has started it" in found.stderr


def test_who_has_interrupted_is_not_asked_for_consent(
    client: FakeClient, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(text: str, **how: object) -> wire.Submitted:
        interrupt()
        raise ApiError("consent-needed", "it costs $5", "", 402)

    monkeypatch.setattr(client, "submit", submit)
    found = run(file)
    assert (found.exit_code, "$5" in found.output) == (130, False)


def test_what_was_there_before_is_there_after() -> None:
    before = signal.getsignal(signal.SIGINT)
    with held_interrupt() as interrupted:
        assert not interrupted()
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ValueError, match="wrong"), held_interrupt():
        raise ValueError("wrong")
    assert signal.getsignal(signal.SIGINT) is before
