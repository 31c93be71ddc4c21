"""What tests install for themselves: one process at a time, and never half.

A run of the tests may be killed at any moment. What writes to the machine's package database then
goes on to its end without us; what a killed run has left in a folder is thrown away, because a
folder counts only with the mark that is written last.
"""

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.verdict import SkippedForTime

CACHE = Path.home() / ".cache" / "cavvy-tests"
INSTALL_S = 900.0  # for one installation, the wait for those of others included
MARK = "ready"


@contextmanager
def alone(name: str, seconds: float) -> Iterator[int]:
    """No other process of this user is in a block of this name; the lock's descriptor, which a
    child that is to go on may inherit. Raises SkippedForTime where another stays for too long.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    give_up = time.monotonic() + seconds
    with open(CACHE / f"{name}.lock", "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise SkippedForTime(
                        f"another process has been installing {name} for {seconds:.0f} s"
                    ) from None
                time.sleep(0.1)
        yield file.fileno()


def install_whole(
    folder: Path, fill: Callable[[Path, float], object], seconds: float = INSTALL_S
) -> None:
    """Fill a folder once, by a function of it and of the seconds that are left.

    Raises what `fill` raises; SkippedForTime where it takes too long.
    """
    give_up = time.monotonic() + seconds
    with alone(folder.name, seconds):
        if not (folder / MARK).exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            try:
                fill(folder, give_up - time.monotonic())
            except subprocess.TimeoutExpired as error:
                raise SkippedForTime(f"{folder.name} could not be installed: {error}") from error
            (folder / MARK).touch()


def install_packages(names: Sequence[str], seconds: float = INSTALL_S) -> str:
    """Install Debian's packages where that needs no question; why that did not work, "" where it
    did. Raises SkippedForTime where it takes too long.
    """
    by_hand = f"apt-get install -y --no-install-recommends {' '.join(names)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"to install what is missing: sudo {by_hand}"
    give_up = time.monotonic() + seconds
    try:
        with alone("apt", seconds) as lock:
            for command, must in (
                ("dpkg --configure -a", False),  # what an interrupted installation has left
                ("apt-get update -q", False),  # without the newest lists it may still work
                (f"{by_hand} -q --download-only", True),
                (f"{by_hand} -q -o DPkg::Lock::Timeout=600", True),
            ):
                code, said = _finish(command, lock, give_up)
                if code and must:
                    return f"{by_hand}: exit code {code}: {said[-300:]}"
    except OSError as error:
        return f"{by_hand}: {error}"
    return ""


def _finish(command: str, lock: int, give_up: float) -> tuple[int, str]:
    """Run a command that is not to be interrupted: its exit code and its errors.

    It has a session of its own and keeps the lock, so that it comes to its end when this process
    is killed or has no more time, and no other installation begins before.
    """
    path = CACHE / "apt.log"
    with open(path, "wb") as log:
        process = subprocess.Popen(
            command.split(),
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=[lock],
            start_new_session=True,
        )
    try:
        code = process.wait(max(1.0, give_up - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.returncode = 0  # it goes on without us
        raise SkippedForTime(f"{command} takes too long; it goes on") from None
    return code, path.read_text(errors="replace").strip()
