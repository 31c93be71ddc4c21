"""Drives a headless Chromium through the DevTools protocol: pages are opened, and JavaScript is run
in them. The browser reads commands from its descriptor 3 and writes answers to its descriptor 4.
"""

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.system.tied import start_tied
from tests.waits import wait_until

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless",
    "--no-sandbox",  # containers do not permit its own one
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-pipe",
)
# The descriptors of the arguments become 3 and 4, and the browser replaces this program.
_LAUNCHER = """import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])"""
_LOWEST = 10  # descriptors from here on are neither 3 nor 4
_REPORTS = {"Runtime.exceptionThrown", "Log.entryAdded"}


class CommandRefused(Exception):
    """Raised if the browser cannot run a command, for example because the page is replaced."""


@contextmanager
def chromium(folder: Path) -> Iterator["Tab"]:
    """Start the browser with a profile in the folder. Without one, the test is skipped."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip("there is no Chromium: sudo apt-get install -y chromium")
    commands, to_browser = os.pipe()
    from_browser, answers = os.pipe()
    theirs = [fcntl.fcntl(each, fcntl.F_DUPFD, _LOWEST) for each in (commands, answers)]
    for each in (commands, answers):
        os.close(each)
    argv = [sys.executable, "-c", _LAUNCHER, *theirs, program, *_FLAGS, "about:blank"]
    argv.insert(-1, f"--user-data-dir={folder / 'profile'}")
    with (folder / "chromium.log").open("wb") as said:
        process = start_tied(argv, pass_fds=theirs, stdout=said, stderr=said)
    for each in theirs:
        os.close(each)
    try:
        with os.fdopen(to_browser, "wb", 0) as writes, os.fdopen(from_browser, "rb") as reads:
            yield Tab(writes, reads)
    finally:
        process.kill()
        process.wait()


class Tab:
    """The browser's tab. `errors` are what the tab's pages reported as errors."""

    def __init__(self, writes: Any, reads: Any) -> None:
        self._writes = writes
        self._reads = reads
        self._pending = b""
        self._count = 0
        self._session: dict[str, str] = {}
        self.errors: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Run a command of the protocol, and return its result. Raises CommandRefused."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": parameters} | self._session
        self._writes.write(json.dumps(command).encode() + b"\0")
        while True:
            message = self._read()
            hint = message.get("params", {}).get("entry", {}).get("level") == "verbose"
            if message.get("method") in _REPORTS and not hint:
                self.errors.append(json.dumps(message["params"]))
            if message.get("id") == self._count:
                if "error" in message:
                    raise CommandRefused(f"{method}: {message['error']}")
                return dict(message["result"])

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression, or of its promise, in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def open(self, address: str) -> None:
        """Open a page, and wait until its script has run."""
        loader = self.call("Page.navigate", url=address).get("loaderId")
        assert loader, address
        self.wait("document.readyState === 'complete'")

    def wait(self, script: str) -> None:
        """Wait until an expression in the page is true. Meanwhile, the page may be replaced."""

        def look() -> bool:
            try:
                answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
            except CommandRefused:
                return False
            return bool(answer["result"].get("value")) and "exceptionDetails" not in answer

        wait_until(look, lambda: f"{script}: {self.evaluate('document.body.innerText')[:2000]}")

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._pending:
            piece = self._reads.read1(1 << 20)
            assert piece, "the browser has ended; chromium.log says why"
            self._pending += piece
        message, _, self._pending = self._pending.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found
