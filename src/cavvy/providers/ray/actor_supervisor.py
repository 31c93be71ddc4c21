"""Supervises the agent of one rank on a Ray node: fetches and starts the agent, ends the agent on
request, and reports when the agent has exited.

This process is detached from the Ray worker that starts it. If the worker dies, this process's
standard input closes, and this process orders the agent to exit within the agent's grace period.
The program reads a line of JSON, and later the line `stop`. The program prints a line of JSON when
the agent runs, and another line when the agent has exited. The program uses only the standard
library of Python 3.8, and nothing from Ray.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import select
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# seconds that this process tries to reach the control plane before the agent runs
PATIENCE_S = 300.0
AGAIN_S = 2.0
LOOK_S = 0.1
CHUNK = 65536


class FetchFailed(Exception):
    pass


def fetch(address: str, digest: str, path: str) -> None:
    """Fetch a file and check its hash, so that the source of the file need not be trusted."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            with opener.open(address + "/boot/v1/" + digest, timeout=60) as answer:
                content = answer.read()
            if hashlib.sha256(content).hexdigest() == digest:
                break
            why = "the file's hash differs from the expected hash"
        except (OSError, http.client.HTTPException) as error:
            why = str(error)
        if time.monotonic() > until:
            raise FetchFailed(f"cannot fetch the agent from {address}: {why}")
        time.sleep(AGAIN_S)
    fresh = f"{path}.{os.getpid()}"
    with open(fresh, "wb") as file:
        file.write(content)
    os.rename(fresh, path)


def tell(**what: Any) -> None:
    try:
        os.write(1, json.dumps(what).encode() + b"\n")
    except OSError:
        return  # the worker has exited


class ActorSupervisor:
    def __init__(self, boot: dict[str, Any]) -> None:
        self.boot = boot
        root = os.path.expandvars(os.path.expanduser(boot["folder"]))
        self.home = os.path.join(root, "gangs", boot["config"]["gang"], str(boot["rank"]))
        self.agent = os.path.join(root, boot["agent"] + ".pyz")
        self.config = os.path.join(self.home, "config.json")
        self.log = os.path.join(self.home, "agent.log")
        self.cache = os.path.join(root, "cache")
        self.heard = True  # True while the input is open
        self.stopping = 0.0  # the time when the agent is killed; 0 if no stop was requested

    def run(self) -> None:
        os.makedirs(os.path.join(self.home, "work"), mode=0o700, exist_ok=True)
        config = dict(self.boot["config"], home=os.path.join(self.home, "work"), cache=self.cache)
        with open(
            os.open(self.config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
            "w",
            encoding="utf-8",
        ) as file:
            json.dump(config, file)
        if not self.has_agent():
            fetch(config["address"], self.boot["agent"], self.agent)
        code = self.follow(self.start(), told=False)
        # Retry undelivered messages until the lease ends. Then this process exits, even if messages
        # are still undelivered.
        until = time.monotonic() + config["lease_s"]
        while (
            code in (1, os.EX_TEMPFAIL)
            and self.heard
            and not self.stopping
            and time.monotonic() < until
        ):
            self.wait(5.0)
            code = self.follow(self.start("--deliver"), told=True)
        left = dict(code=code, exit=self.read_exit(), said=self.read_log() if code else "")
        self.clear()  # before the report, because this process may be killed after the report
        tell(**left)

    def has_agent(self) -> bool:
        """Return whether the node has the agent. Jobs run as the same user and can change it."""
        try:
            with open(self.agent, "rb") as file:
                return bool(hashlib.sha256(file.read()).hexdigest() == self.boot["agent"])
        except OSError:
            return False

    def clear(self) -> None:
        """Remove the rank's folder, and also the gang's folder if no other rank of the gang is left
        on the node.
        """
        shutil.rmtree(self.home, ignore_errors=True)
        try:
            os.rmdir(os.path.dirname(self.home))
        except OSError:
            return

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                [self.boot["python"], "-I", "-S", self.agent, *options, self.config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def follow(self, agent: subprocess.Popen[bytes], *, told: bool) -> int:
        if not told:
            tell(pid=agent.pid)
        killed = asked = False
        while agent.poll() is None:
            self.wait(LOOK_S)
            if self.stopping and not asked:
                asked = True
                agent.send_signal(signal.SIGTERM)
            elif self.stopping and not killed and time.monotonic() > self.stopping:
                killed = True
                agent.kill()
        return agent.returncode

    def wait(self, seconds: float) -> None:
        """Wait until the given time has passed, a stop is requested, or standard input ends."""
        if not self.heard:
            time.sleep(seconds)
        elif select.select([0], [], [], seconds)[0]:
            order = os.read(0, CHUNK)
            self.heard = bool(order)
            self.stopping = self.stopping or time.monotonic() + self.boot["leave_s"]

    def read_exit(self) -> Any:
        try:
            with open(os.path.join(self.home, "work", "exit.json"), encoding="utf-8") as file:
                return json.load(file)
        except (OSError, ValueError):
            return None

    def read_log(self) -> str:
        try:
            with open(self.log, "rb") as file:
                return file.read()[-1000:].decode(errors="replace")
        except OSError:
            return ""


def main() -> int:
    line = b""
    # read one byte at a time, so that nothing after the first line is consumed
    while not line.endswith(b"\n"):
        line += os.read(0, 1) or b"\n"
    boot = json.loads(line)
    # Ray kills the children of a worker that exits; after the fork, this process is not a child of
    # the worker
    if os.fork():
        os._exit(0)
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    hold = ActorSupervisor(boot)
    try:
        hold.run()
    except (OSError, FetchFailed) as error:
        hold.clear()
        tell(failed=str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
