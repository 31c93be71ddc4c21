"""`cavvy curves`: what it asks for, draws and prints."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner, Result
from msgspec import structs
from tests.cli.unit.test_cli_names import make_service
from tests.console_rig import CannedClient, listing
from tests.curves.unit.test_curve_part import API, curve, member

from cavvy.capabilities.curves import command as curves_command
from cavvy.capabilities.curves.wire import Curve, Gap, JobCurves
from cavvy.cli.reach.session import failures
from cavvy.client import ApiClient, ApiError
from cavvy.client.array_wire import ArrayDetail

GONE = ApiError("job-not-found", "no job fits", status=404)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    def call(answers: dict[str, Any], *arguments: str) -> tuple[Result, CannedClient]:
        client = CannedClient(answers)

        @contextmanager
        def session() -> Iterator[ApiClient]:
            with failures():
                yield client

        monkeypatch.setattr(curves_command, "session", session)
        return CliRunner().invoke(curves_command.command, [*arguments, "-p", "default"]), client

    return call


def test_curves_are_drawn_and_listed_the_losses_first(run: Any) -> None:
    found = JobCurves(curves=[curve("acc", 0.1, 0.9), curve("loss", 2, 1, 0.5)])
    result, client = run({f"{API}fit/curves": found}, "fit")
    lines = result.output.splitlines()
    assert result.exit_code == 0
    assert lines[0] == "loss, by step"
    assert [line.split()[0] for line in lines[-3:]] == ["NAME", "loss", "acc"]
    assert lines[-2].split()[1:] == ["1", "0", "3", "0.5", "2.0", "0.5"]
    assert "points=400" in client.asked[0]


def test_a_file_has_all_values_or_says_that_it_has_not(run: Any) -> None:
    answers = {f"{API}fit/curves": JobCurves(curves=[curve("loss", 2, 1)])}
    result, client = run(answers, "fit", "loss", "--rank", "0", "-o", "json")
    assert [each["value"] for each in json.loads(result.stdout)] == [2, 1]
    assert result.stderr == ""
    assert all(each in client.asked[0] for each in ("points=20000", "curve=loss", "rank=0"))
    long = structs.replace(curve("loss", 2, 1), count=50_000)
    result, _ = run({f"{API}fit/curves": JobCurves(curves=[long])}, "fit", "-o", "csv")
    assert result.stdout.splitlines()[0] == "job,name,attempt,rank,process,step,time_ms,value"
    assert "loss (2 of 50,000)" in result.stderr


def test_gaps_and_processes_have_columns_if_there_are_any(run: Any) -> None:
    gap = Gap(step=2, time_ms=1_700_000_001_500, value="nan")
    odd = structs.replace(curve("loss", 2, 1), gaps=[gap], gap_count=7, process=3)
    answers = {f"{API}fit/curves": JobCurves(curves=[odd])}
    result, _ = run(answers, "fit")
    words = " ".join(result.output.split())
    assert "NAME ATTEMPT RANK PROCESS VALUES LOW HIGH LAST GAPS" in words
    assert words.endswith("loss 1 0 3 2 1.0 2.0 1.0 7 nan from step 2")
    result, _ = run(answers, "fit", "-o", "csv")
    assert [line.split(",")[-1] for line in result.stdout.splitlines()] == [
        "value",
        "2.0",
        "1.0",
        "nan",
    ]


def test_a_curve_without_finite_values_is_listed(run: Any) -> None:
    gap = Gap(step=2, time_ms=5, value="inf")
    odd = Curve(
        name="loss",
        attempt=1,
        rank=0,
        count=0,
        steps=[],
        times_ms=[],
        values=[],
        low=None,
        high=None,
        last=None,
        gaps=[gap],
        gap_count=1,
    )
    result, _ = run({f"{API}fit/curves": JobCurves(curves=[odd])}, "fit")
    assert "loss has no finite values" in result.output
    assert "1 inf from step 2" in result.output


def test_an_array_has_a_line_for_each_of_its_jobs(run: Any) -> None:
    row = listing("fits", id="id-fits", phase="running", members={"running": 3})
    members = [member(0), member(1), member(2, attempt=0, phase="queued")]
    answers = {
        f"{API}fits/curves": GONE,
        f"{API}fits": GONE,
        "/v1/projects/default/arrays/fits": ArrayDetail(array=row, parallel=2, jobs=members),
        "/v1/projects/default/curves": JobCurves(
            curves=[structs.replace(curve("loss", 2, each), job=f"fits.{each}") for each in (0, 1)]
        ),
    }
    result, client = run(answers, "fits")
    assert [line.split()[:2] for line in result.output.splitlines()[-3:]] == [
        ["JOB", "NAME"],
        ["fits.0", "loss"],
        ["fits.1", "loss"],
    ]
    assert "job=id-0&job=id-1&" in client.asked[-1]
    result, _ = run(answers, "fits", "--rank", "1")
    assert (result.exit_code, "--rank" in result.output) == (2, True)


def test_the_replicas_of_a_service_have_a_line_each(run: Any) -> None:
    answers = {
        f"{API}web/curves": GONE,
        f"{API}web": GONE,
        "/v1/projects/default/arrays/web": GONE,
        "/v1/projects/default/services/web": make_service("ready"),
        "/v1/projects/default/curves": JobCurves(
            curves=[structs.replace(curve("loss", 2), job="web.1")]
        ),
    }
    result, client = run(answers, "web")
    assert result.output.splitlines()[-1].split()[:2] == ["web.1", "loss"], result.output
    assert "job=id-of-web.1&" in client.asked[-1]


def test_what_is_not_there_is_said(run: Any) -> None:
    others = ("arrays/x", "services/x")
    missing = {f"{API}x/curves": GONE, f"{API}x": GONE}
    missing |= {f"/v1/projects/default/{each}": GONE for each in others}
    missing |= {"/v1/machines": []}
    none = {f"{API}fit/curves": JobCurves(curves=[])}
    for answers, arguments, told in (
        (missing, ["x"], "no job fits"),
        (none, ["fit"], "no values yet"),
        (none, ["fit", "acc"], "no acc"),
    ):
        result, _ = run(answers, *arguments)
        assert (result.exit_code, told in result.output) == (1, True), result.output
