"""A sandbox host without a server or a job, for tests of what sandboxes do."""

import json
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
from cavvy.capabilities.functions.meeting import dial_here
from cavvy.capabilities.sandboxes.errors import IsolationMissing
from cavvy.capabilities.sandboxes.link import SandboxLink
from cavvy.capabilities.sandboxes.on_node import host
from cavvy.capabilities.sandboxes.options import SandboxOptions
from cavvy.capabilities.sandboxes.sandbox import Sandbox


class DirectHost:
    """A running host, and a connection to it."""

    def __init__(self, folder: Path, process: "subprocess.Popen[bytes]") -> None:
        self.folder, self.process = folder, process
        self._made: list[socket.socket] = []
        self.meet = f"{folder}/meet.sock:key"
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
            self._made.append(dial_here(self.meet))
        return bool(self._made)


@contextmanager
def start_host(idle_s: float = 60.0) -> Iterator[DirectHost]:
    """Start a host."""
    with TemporaryDirectory(prefix="sb-") as top:
        folder = Path(top)
        folder.chmod(0o700)
        (folder / "host.json").write_text(json.dumps({"idle_s": idle_s, "env": {}}))
        program = [sys.executable, host.__file__, f"{folder}/host.json", f"{folder}/meet.sock:key"]
        with subprocess.Popen(program, stdin=subprocess.DEVNULL) as process:
            try:
                yield DirectHost(folder, process)
            finally:
                process.kill()
