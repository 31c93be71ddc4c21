"""`run --dry-run`, `plan`, `validate` and the Python interface refuse what `cavvy run` refuses."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.system.server_state import home_with_jobs

from cavvy import CavvyError, Client, Task
from cavvy.cli.main import cli

pytestmark = pytest.mark.system

GOOD = "name: good\nworkdir: code\nrun: python a.py\n"
# What is wrong, and what is added to the task file.
WRONG_FILES = {
    "a secret that is not set": "secrets: [NOT_SET]",
    "a project that is archived": "project: closed",
    "a project whose policy refuses the machine": "project: strict",
    "setup.uses of no file": "setup: {run: 'true', uses: [none.txt]}",
    "a file that is too large": "workdir: large",
    "a folder that does not exist": "workdir: nowhere",
    "an upper-case name": "name: UPPER",
    "a project with a wrong name": "project: No_P",
    "a parameter that is missing": "run: echo ${{ params.none }}",
    "a machine with a wrong name": "machine: No_M",
    "a schedule that never comes": "schedule: {cron: '0 0 31 2 *'}",
    "a priority without a bound": "priority: 1000000000000",
    "a tag that is too long": f"tags: {{{'x' * 300}: a}}",
}
# What is wrong, and options of `cavvy run`.
WRONG_OPTIONS = {
    "an upper-case name": ("--name", "UPPER"),
    "an empty name": ("--name", ""),
    "a long name": ("--name", "x" * 64),
    "a project with a wrong name": ("--project", "No_P"),
    "an archived project": ("--project", "closed"),
    "a policy": ("--project", "strict"),
    "a secret": ("--secret", "NOT_SET"),
    "no offer": ("--gpu", "H100:8"),
    "a machine": ("--machine", "No_M"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("refusals")
    (folder / "settings.toml").write_text("[server]\nblob_mib = 1\n")
    for name, text in {"code/a.py": "pass", "large/a.bin": "x" * (1 << 21)}.items():
        (folder / name).parent.mkdir()
        (folder / name).write_text(text)
    with home_with_jobs(folder / "home"):
        for line in (
            "project create closed",
            "project archive closed",
            "project create strict",
            "policy set -p strict --providers aws",
        ):
            assert call(*line.split())[0] == 0, line
        yield folder


def call(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, list(arguments), prog_name="cavvy")
    return done.exit_code, done.output


def make_file(folder: Path, change: str) -> Path:
    key = change.split(":")[0]
    kept = [line for line in GOOD.splitlines() if not line.startswith(f"{key}:")]
    file = folder / "task.yaml"
    file.write_text("\n".join([*kept, change]))
    return file


@pytest.mark.parametrize("what", WRONG_FILES)
def test_a_wrong_file_is_refused_by_every_command(folder: Path, what: str) -> None:
    file = str(make_file(folder, WRONG_FILES[what]))
    ways = ("run -y -d", "run -d --dry-run", "plan", "validate")
    codes = {way: call(*way.split(), file)[0] for way in ways}
    assert all(codes.values()), codes
    with Client() as client, pytest.raises(CavvyError):
        client.submit(Task.from_file(file), consent=True)


@pytest.mark.parametrize("what", WRONG_OPTIONS)
def test_a_dry_run_refuses_the_options_that_a_run_refuses(folder: Path, what: str) -> None:
    file = str(make_file(folder, "priority: 1"))
    run = call("run", "-y", "-d", *WRONG_OPTIONS[what], file)
    dry = call("run", "--dry-run", *WRONG_OPTIONS[what], file)
    assert run[0] == dry[0] != 0, (run, dry)


def test_a_task_that_fits_no_configured_provider_is_noted(folder: Path) -> None:
    file = str(make_file(folder, "resources: {gpu: 'H100:8'}"))
    assert call("run", "-y", "-d", file)[0] == 1
    for way in ("validate", "plan"):
        code, output = call(way, file)
        assert code == 0, output
        assert "note: `cavvy run` would refuse this task now: No offer" in output


def test_a_good_file_is_accepted_by_every_command(folder: Path) -> None:
    file = str(make_file(folder, "priority: 1"))
    for way in ("validate", "plan", "run --dry-run", "run -y -d"):
        code, output = call(*way.split(), file)
        assert code == 0, output
