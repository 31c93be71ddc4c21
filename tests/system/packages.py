"""What tests install for themselves: one process at a time, and a process that waits for another
has an end.
"""

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

CACHE = Path.home() / ".cache" / "cavvy-tests"
APT_LOCK = (
    CACHE / "apt.lock"
)  # held by whoever runs apt-get: what reads its lists does not wait for who writes them


@contextmanager
def alone(name: str, seconds: float) -> Iterator[None]:
    """No other process of this user is in a block of this name. Raises TimeoutError where one
    stays for too long.
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
                    raise TimeoutError(
                        f"another process has been installing {name} for {seconds:.0f} s"
                    ) from None
                time.sleep(0.1)
        yield


def install_packages(names: Sequence[str], seconds: float = 270) -> str:
    """Install Debian's packages where that needs no question; why that did not work, "" where it
    did.
    """
    by_hand = f"apt-get install -y --no-install-recommends {' '.join(names)}"
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return f"to install what is missing: sudo {by_hand}"
    give_up = time.monotonic() + seconds
    try:
        with alone(APT_LOCK.stem, seconds):
            for command in ("apt-get update", by_hand):
                subprocess.run(
                    [*command.split(), "-q", "-o", "DPkg::Lock::Timeout=60"],
                    env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    check=command == by_hand,  # without the newest lists it may still work
                    timeout=max(1.0, give_up - time.monotonic()),
                )
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        return f"{by_hand}: {error} {said.decode(errors='replace').strip()[-300:]}"
    return ""
