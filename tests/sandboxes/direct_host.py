"""A sandbox host without a server or a job, for tests of what sandboxes do."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.waits import wait_until

from cavvy.capabilities.functions.jobs import JobPlace
from cavvy.capabilities.sandboxes.errors import IsolationMissing
from cavvy.capabilities.sandboxes.hosts import ROOT, dial_host, list_files
from cavvy.capabilities.sandboxes.link import SandboxLink
from cavvy.capabilities.sandboxes.options import SandboxOptions
from cavvy.capabilities.sandboxes.sandbox import Sandbox

PROGRAM = "cavvy/capabilities/sandboxes/on_node/host.py"


class DirectHost:
    """A running host, and a connection to it."""

    def __init__(self, folder: Path, process: "subprocess.Popen[bytes]") -> None:
        self.folder, self.process = folder, process
        self._made: list[socket.socket] = []
        self.meet = f"{folder}/meet.sock"
        wait_until(self._dial, seconds=30)
        self.link = SandboxLink(self._made[0])

    def create(self, **keys: Any) -> Sandbox:
        """Make a sandbox; skip the test on machines that cannot isolate it."""
        keys = {"timeout": "1m", **keys}
        try:
            answer = self.link.ask("create", options=SandboxOptions(**keys).to_wire())
        except IsolationMissing as error:
            if keys.get("isolation") == "required":
                raise
            pytest.skip(f"sandboxes need namespaces: {error}")
        return Sandbox(self.link, JobPlace("default", "job", self.meet), answer["name"])

    def _dial(self) -> bool:
        assert self.process.poll() is None, "the host has ended"
        with suppress(OSError):
            self._made.append(self._connect())
        return bool(self._made)

    def _connect(self) -> socket.socket:
        if self.folder.stat().st_uid == os.geteuid():
            return dial_host(self.meet)
        made = socket.socket(socket.AF_UNIX)  # as a caller from another machine
        try:
            made.connect(f"{self.folder}/host.sock")
        except OSError:
            made.close()
            raise
        return made


@contextmanager
def start_host(user: int | None = None, **variables: str) -> Iterator[DirectHost]:
    """Start a host, as this user, who is not root, or as that of the tests, with more variables."""
    with TemporaryDirectory(prefix="sb-") as top:
        folder = Path(top)
        folder.chmod(0o700)
        lay_out(folder)
        (folder / "host.json").write_text(json.dumps({"idle_s": 600, "env": {}}))
        python = sys.executable
        if user is not None:
            python = find_python()
            for each in (folder, *folder.rglob("*")):
                os.chown(each, user, user)
        program = [python, PROGRAM, f"{folder}/host.json", f"{folder}/meet.sock"]
        who: dict[str, Any] = {} if user is None else {"user": user, "group": user}
        who["env"] = {**os.environ, **variables}
        with subprocess.Popen(program, cwd=folder, stdin=subprocess.DEVNULL, **who) as process:
            try:
                yield DirectHost(folder, process)
            finally:
                process.kill()


def lay_out(folder: Path) -> None:
    """Copy the files that a host needs into a folder, as a job has them."""
    for name, source in list_files().items():
        place = folder / name.removeprefix(f"{ROOT}/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(source.read_bytes())


def find_python() -> str:
    """Return a Python that each user can run; skip the test without one."""
    python = "/usr/bin/python3"
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    if not os.path.exists(python) or subprocess.run([python, "-c", check], check=False).returncode:
        pytest.skip("another user needs a Python of the system, of version 3.11 or newer")
    return python
