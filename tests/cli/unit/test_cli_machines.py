"""`cavvy machines`: what it shows, asks and does."""

import json
from datetime import UTC, datetime

import pytest
from click.shell_completion import CompletionItem, ShellComplete
from click.testing import CliRunner
from tests.cli.unit.test_cli_jobs import lines, run
from tests.unit.cli_client import FakeClient, client, make_job, make_machine

from cavvy.cli.main import cli

__all__ = ["client"]


def test_the_list_shows_state_price_and_cost(client: FakeClient) -> None:
    assert "cavvy run --machine" in run("machines").stdout
    stopped = make_machine(
        "old",
        state="stopped",
        placement=None,
        since=None,
        kept_until=None,
        rate_micros_per_hour=None,
        spent_micros=None,
    )
    client.named = [make_machine(), stopped]
    shown = run("machines").stdout
    assert "$3.60/h" in shown
    assert "$0.01" in shown
    assert [line[:2] for line in lines(run("machines"))[1:]] == [
        ["dev", "idle"],
        ["old", "stopped"],
    ]
    rows = json.loads(run("machines", "-o", "json").stdout)
    assert rows[1]["rate_micros_per_hour"] is None


def test_stopping_a_busy_machine_needs_agreement(client: FakeClient) -> None:
    client.named = [make_machine(state="busy", waiting=2)]
    for command in ("stop", "rm"):
        refused = run("machines", command, "dev")
        assert (refused.exit_code, refused.stderr) == (
            2,
            "error: there is no terminal to ask for confirmation\nhint: add --yes\n",
        )
    assert client.asked == []
    assert run("machines", "stop", "dev", "--yes").exit_code == 0
    assert client.asked == [("stop machine", "default", "dev")]


@pytest.mark.parametrize("state", ["starting", "busy", "idle"])
def test_a_started_machine_is_not_started_again(client: FakeClient, state: str) -> None:
    client.named = [make_machine(state=state)]
    answer = run("machines", "start", "dev")
    assert (answer.stdout, answer.exit_code) == (
        f"machine dev is already started: it is {state}\n",
        0,
    )
    assert client.asked == []


def test_rm_stops_a_machine_and_forgets_it(client: FakeClient) -> None:
    client.named = [make_machine()]
    assert run("machines", "rm", "dev").stdout == "machine dev is removed\n"
    assert client.named == []


def test_keep_reads_a_length_of_time(client: FakeClient) -> None:
    client.named = [make_machine()]
    assert run("machines", "keep", "dev", "2h").exit_code == 0
    assert client.asked == [("keep machine", "dev", 7200.0)]
    assert run("machines", "keep", "dev", "soon").exit_code == 2
    client.named = [make_machine(kept_until=datetime(2026, 1, 2, 3, 4, tzinfo=UTC))]
    kept = run("machines", "keep", "dev", "2h").stdout
    assert kept == "machine dev is kept until 2026-01-02 03:04:00 UTC\n", "its budget ends then"


def test_status_and_ps_name_the_machine(client: FakeClient) -> None:
    client.all_jobs["good"] = make_job("good", "done", machine="dev")
    assert ["machine", "dev"] in lines(run("status", "good"))
    assert "MACHINE" in run("ps").stdout


def test_shells_complete_the_names_of_machines(
    client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.named = [make_machine("dev"), make_machine("gpu")]
    monkeypatch.setenv("COMP_WORDS", "cavvy machines stop d")
    monkeypatch.setenv("COMP_CWORD", "3")
    monkeypatch.setenv("_CAVVY_COMPLETE", "bash_complete")
    shown = CliRunner().invoke(cli, [], prog_name="cavvy")
    assert shown.stdout == "plain,dev\n"
    assert [each.value for each in complete("run", "--machine", "")] == ["dev", "gpu"]


def complete(command: str, *words: str) -> list[CompletionItem]:
    found = ShellComplete(cli, {}, "cavvy", "_CAVVY_COMPLETE")
    return found.get_completions([command, *words[:-1]], words[-1])
