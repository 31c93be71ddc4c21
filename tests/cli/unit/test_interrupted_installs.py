"""An installation that is interrupted at any moment leaves nothing half."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.system import packages
from tests.verdict import SkippedForTime
from tests.waits import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[3]
# In the place of dpkg and apt-get: notes what it is asked, and stays in its last step until it may
# end.
TOOL = """#!/bin/sh
echo "$(basename $0) $1 $*" >> "$HOME/asked"
case "$*" in
  *download-only*) ;;
  install*) echo begun >> "$HOME/asked"
    while [ ! -e "$HOME/may-end" ]; do sleep 0.02; done
    echo whole >> "$HOME/asked" ;;
esac
"""
INSTALL = "from tests.system.packages import install_packages; install_packages(['sl'])"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("dpkg", "apt-get"):
        (tools / name).write_text(TOOL)
        (tools / name).chmod(0o755)
    return tmp_path


def start(home: Path) -> "subprocess.Popen[bytes]":
    """A process that installs as root would; the tools are not the machine's."""
    code = f"import os; os.geteuid = lambda: 0; {INSTALL}"
    path = f"{home}/bin:{os.environ['PATH']}"
    env = {"HOME": str(home), "PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", code], env=env, start_new_session=True)


def asked(home: Path) -> list[str]:
    path = home / "asked"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_installation_goes_on_when_the_run_is_killed_and_the_next_waits_for_it(
    home: Path, number: int
) -> None:
    first = start(home)
    wait_until(lambda: "begun" in asked(home))
    os.killpg(first.pid, number)
    first.wait(PATIENCE_S)
    before = len(asked(home))
    second = start(home)
    time.sleep(0.5)  # long enough to begin, were it not for the lock
    begun = len(asked(home))
    (home / "may-end").touch()
    assert second.wait(PATIENCE_S) == 0
    assert begun == before
    assert asked(home).count("whole") == 2
    whole = asked(home).index("whole")
    assert asked(home)[whole + 1] == "dpkg", "what was left is finished before more is installed"


def test_a_folder_counts_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "CACHE", tmp_path)
    folder = tmp_path / "tool"

    def broken(where: Path, left: float) -> None:
        (where / "half").touch()
        raise KeyboardInterrupt

    def late(where: Path, left: float) -> None:
        raise subprocess.TimeoutExpired("pip", left)

    def good(where: Path, left: float) -> None:
        assert not (where / "half").exists()
        (where / "whole").touch()

    def never(where: Path, left: float) -> None:
        raise AssertionError("it is there")

    with pytest.raises(KeyboardInterrupt):
        packages.install_whole(folder, broken)
    assert (folder / "half").exists()
    with pytest.raises(SkippedForTime):
        packages.install_whole(folder, late)
    packages.install_whole(folder, good)
    packages.install_whole(folder, never)
    assert (folder / "whole").exists()
