"""`cavvy schedules`: only what repeats, with its line and its next time."""

import json
from datetime import UTC, datetime

from click.testing import CliRunner
from msgspec import Raw
from msgspec.json import encode
from tests.unit.cli_client import FakeClient, client, make_job

from cavvy.cli.main import cli
from cavvy.domain.tasks import JobSchedule, TaskSpec

__all__ = ["client"]


def test_what_repeats_is_listed_with_its_next_time(client: FakeClient) -> None:
    task = TaskSpec(
        name="nightly", run="x", schedule=JobSchedule(cron="0 3 * * 1-5", time_zone="Europe/Berlin")
    )
    client.all_jobs["nightly"] = make_job(
        "nightly",
        "queued",
        task=Raw(encode(task)),
        held=True,
        not_before=datetime(2027, 1, 4, 2, tzinfo=UTC),
    )
    told = CliRunner().invoke(cli, ["schedules"], prog_name="cavvy")
    assert told.exit_code == 0, told.output
    head, *lines = [" ".join(line.split()) for line in told.stdout.splitlines()]
    assert head == "NAME PROJECT CRON ZONE NEXT (UTC)"
    assert lines == ["nightly default 0 3 * * 1-5 Europe/Berlin 2027-01-04 02:00:00"]
    (row,) = json.loads(
        CliRunner().invoke(cli, ["schedules", "-o", "json"], prog_name="cavvy").stdout
    )
    assert (row["cron"], row["next_at"]) == ("0 3 * * 1-5", "2027-01-04T02:00:00+00:00")


def test_a_schedule_whose_account_is_disabled_says_so(client: FakeClient) -> None:
    task = TaskSpec(name="nightly", run="x", schedule=JobSchedule(cron="0 3 * * *"))
    why = "no run starts, because the account ada is disabled"
    client.all_jobs["nightly"] = make_job(
        "nightly", "queued", task=Raw(encode(task)), held=True, barred=True, reason=why
    )
    told = CliRunner().invoke(cli, ["schedules"], prog_name="cavvy")
    head, *lines = [" ".join(line.split()) for line in told.stdout.splitlines()]
    assert head.endswith("NOTE")
    assert why in " ".join(lines)


def test_nothing_that_repeats_is_said_with_what_to_do(client: FakeClient) -> None:
    told = CliRunner().invoke(cli, ["schedules"], prog_name="cavvy")
    assert "no job repeats" in told.output
