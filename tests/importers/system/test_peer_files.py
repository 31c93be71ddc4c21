"""SkyPilot and dstack files run on this machine as in those tools."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.server_state import home_with_jobs

pytestmark = pytest.mark.system

MOUNTS = """\
workdir: .
envs: {X: }
file_mounts: {~/set: ../set, conf/other.txt: other.txt}
setup: echo "setup ${CUDA_VISIBLE_DEVICES-none}"
run: |
  cd ~/sky_workdir
  cat ~/set/a conf/other.txt
  false
  echo "$SKYPILOT_JOB_RANK $X"
"""
CONFIGURATION = """\
type: task
resources: {disk: 1GB.., memory: 1GB.., cpu: 1..}
repos: ['.:PLACE/repo']
files: [../other.txt:PLACE/file]
commands: [pwd, cat PLACE/file, 'false', echo never]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with files, a home of its own, and a server."""
    for path, text in (("set/a", "one\n"), ("other.txt", "two\n"), ("work/b", ""), ("home/c", "")):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with home_with_jobs(tmp_path / "state"):
        yield tmp_path


def run(folder: Path, name: str, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    file = folder / "work" / name
    file.write_text(text.replace("PLACE", str(folder)))
    command = [str(Path(sys.executable).with_name("cavvy")), "run", f"work/{name}", *options]
    return subprocess.run(
        command, cwd=folder, env=os.environ, capture_output=True, text=True, check=False
    )


def test_a_skypilot_file_with_mounts_and_several_commands(folder: Path) -> None:
    done = run(
        folder,
        "a.yaml",
        MOUNTS,
        *("--env", "X=y"),
        *("--send", "set", "--send", "other.txt"),  # what lies outside of the task's folder
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["setup none", "one", "two", "0 y"]


def test_a_dstack_configuration_with_files_and_a_repository(folder: Path) -> None:
    done = run(folder, "b.dstack.yml", CONFIGURATION, "--send", "other.txt")
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines() == [str(folder / "repo"), "two"]
