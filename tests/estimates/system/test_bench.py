"""`cavvy bench` measures a script through a real job, and plan uses what it measured."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.system.server_state import home_at

from cavvy.cli.main import cli

pytestmark = pytest.mark.system

SCRIPT = """
import json, time
done, rate = 0, 400.0
begin = time.monotonic()
while True:
    time.sleep(0.05)
    done = int((time.monotonic() - begin) * rate)
    print("CAVVY_PROGRESS " + json.dumps({"done": done}), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    work = tmp_path / "w"
    work.mkdir()
    (work / "s.py").write_text(SCRIPT)
    (work / "task.yaml").write_text(
        "name: toy\nrun: python3 s.py\nworkdir: .\nwork: {samples: 4e5, profile: work.json}\n"
        "resources: {providers: [local]}\n"
    )
    with home_at(tmp_path / "home"):
        yield work


def test_a_minute_of_the_users_script_is_measured(folder: Path) -> None:
    file = str(folder / "task.yaml")
    done = CliRunner().invoke(cli, ["bench", file, "--seconds", "3", "-o", "json"])
    assert done.exit_code == 0, done.output
    kept = json.loads((folder / "work.json").read_text())["measured"]
    assert kept["cpu"] == pytest.approx(
        400, rel=0.5
    )  # the clocks of two busy processes, half a second apart
    [machine] = json.loads((folder / "work.json").read_text())["machines"]
    assert re.fullmatch(r"local/.+:[0-9.]+", machine), machine
    [run] = json.loads(done.stdout)
    assert run["machine"] == machine
    assert run["usd_hr"] is not None
    planned = CliRunner().invoke(cli, ["plan", file, "--here", "-o", "json"])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["placements"][0]["run_time_s"] == pytest.approx(
        4e5 / kept["cpu"], rel=1e-3
    )
    jobs = CliRunner().invoke(cli, ["ps", "--all", "-o", "json"])
    assert [
        job["phase"] for job in json.loads(jobs.stdout) if job["name"].startswith("bench-toy")
    ] in (
        ["stopping"],
        ["stopped"],
    )


def test_a_script_that_says_nothing_is_told(folder: Path) -> None:
    (folder / "s.py").write_text("print('hello')\n")
    done = CliRunner().invoke(cli, ["bench", str(folder / "task.yaml"), "--seconds", "3"])
    assert done.exit_code == 1
    assert "reported no progress" in done.output


def test_a_provider_that_fails_hides_no_measured_rate(folder: Path) -> None:
    """The first provider is measured and paid for before the second one is tried."""
    file = str(folder / "task.yaml")
    asked = ("--provider", "local", "--provider", "lambda", "--seconds", "2", "-o", "json")
    done = CliRunner().invoke(cli, ["bench", file, *asked])
    assert done.exit_code == 1
    assert "lambda" in done.stderr
    [run] = json.loads(done.stdout)
    assert run["machine"].startswith("local/")
    assert run["samples_per_s"] == pytest.approx(400, rel=0.5)


def test_several_runs_are_compared_in_a_plot(folder: Path) -> None:
    file = str(folder / "task.yaml")
    asked = ("--provider", "local", "--provider", "local", "--seconds", "2")
    done = CliRunner().invoke(cli, ["bench", file, *asked])
    assert done.exit_code == 0, done.output
    assert re.search(r"SAMPLES/S +USD/H +USD/1,000", done.stdout), done.stdout
    _, _, plot = done.stdout.partition("USD per 1,000 samples\n")
    assert len(plot.splitlines()) == 2
    assert all(line.startswith("local/") for line in plot.splitlines())
