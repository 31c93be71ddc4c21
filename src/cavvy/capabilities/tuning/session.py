"""Starts a training script, measures it in windows of steps, and ends it."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

# Seconds until the first step must have run. Imports, compilation and reading the first data may
# take long.
START_S = 600.0
WINDOW_S = 600.0


class ScriptError(Exception):
    """Raised if the script failed or cannot be measured."""


class TimeLimitReached(ScriptError):
    """Raised when the time limit has passed. Earlier measurements remain valid."""


class RankMissing(ScriptError):
    """Raised if the script failed because it needs the environment variables of torchrun."""


class ScriptEnded(ScriptError):
    """Raised if the script's plain loop ended during a window."""


class TuningSession:
    """One run of a script in `ranks` processes on this machine. The script pauses between windows.
    `until` is the time limit on the monotonic clock.

    A single process runs without torchrun, and runs under torchrun if the script failed because
    torchrun's environment variables are missing.

    A script with a plain loop sends one complete report per rank and then ends. With `levers` (see
    `probe.levers`), a script with a plain loop also pauses between windows.

    Raises: ScriptError: the script ended or did not report in time. The message ends with the last
    lines of the script's output.
    """

    def __init__(
        self,
        script: str,
        arguments: Sequence[str] = (),
        *,
        ranks: int = 1,
        plan: "dict[str, Any] | None" = None,
        python: str = sys.executable,
        until: float = inf,
        levers: "dict[str, Any] | None" = None,
    ) -> None:
        self._until = until
        self._script, self._arguments, self._ranks = script, arguments, ranks
        self._plan, self._levers, self._python = plan, levers, python
        self._is_under_torchrun = ranks > 1
        self._open()

    def _open(self) -> None:
        ranks = self._ranks
        self._folder = Path(tempfile.mkdtemp(prefix="cavvy-tune-"))
        self._log = self._folder / "log"
        where = str(self._folder / "s")
        module = ["-m", "cavvy.capabilities.tuning.probe", where, self._script, *self._arguments]
        if self._is_under_torchrun:
            torchrun = "-m torch.distributed.run --standalone --nproc-per-node"
            module = [*torchrun.split(), str(ranks), *module]
        self._links: list[Any] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(where)
        self._listener.listen(ranks)
        self._process = self._start([self._python, *module])
        try:
            self._meet(ranks)
            said = [self._hear(link, START_S) for link in self._links]
        except RankMissing:
            self.close()
            if self._is_under_torchrun:
                raise
            self._is_under_torchrun = True
            self._open()
            return
        except BaseException:
            self.close()
            raise
        order = sorted(range(ranks), key=lambda n: said[n].get("rank", 0))
        self._links = [self._links[n] for n in order]
        self.facts: dict[str, Any] = said[order[0]]
        self.reports = [said[n] for n in order]  # the first report of each rank

    @property
    def is_plain(self) -> bool:
        """Whether the script has a plain loop."""
        return bool(self.facts.get("plain"))

    def restart(self) -> None:
        """Start the script again, for example after its plain loop has ended."""
        self.close()
        self._open()

    def _start(self, command: list[str]) -> "subprocess.Popen[bytes]":
        with self._log.open("wb") as log:
            return subprocess.Popen(
                command,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        """Return the environment of the script. The environment contains no variables for reports
        to an agent. Variables for the plan file and the levers are added.
        """
        own = ("CAVVY_PROGRESS_FILE", "CAVVY_NOTICE")
        env = {name: value for name, value in os.environ.items() if name not in own}
        env["CAVVY_TUNE_UNTIL"] = str(self._until)
        if self._levers is not None:
            env["CAVVY_TUNE_LEVERS"] = json.dumps(self._levers)
        if self._plan is not None:
            (self._folder / "plan.json").write_text(json.dumps(self._plan))
            env["CAVVY_TRAIN_PLAN"] = str(self._folder / "plan.json")
        return env

    def measure(
        self, mode: str = "", *, steps: int, skip: int, **more: Any
    ) -> list[dict[str, Any]]:
        """Measure one window of steps. Returns the reports of all ranks, in rank order."""
        return self.ask({"mode": mode, "steps": steps, "skip": max(skip, 1), **more})

    def ask(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        for link in self._links:
            try:
                link.sendall(json.dumps(command).encode() + b"\n")
            except OSError as error:
                raise ScriptError(f"the script ended\n{self._tail()}") from error
        return [self._hear(link, WINDOW_S) for link in self._links]  # in rank order

    def close(self) -> None:
        for link in self._links:
            link.close()  # Closing the connection ends the script.
        self._listener.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        with suppress(ProcessLookupError):
            # This signal also ends the child processes of the script.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "TuningSession":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _meet(self, ranks: int) -> None:
        until = monotonic() + START_S
        while len(self._links) < ranks:
            self._check_limit()
            ready, _, _ = select.select([self._listener], [], [], 0.5)
            if ready:
                self._links.append(self._listener.accept()[0])
            elif self._process.poll() is not None or monotonic() > until:
                raise ScriptError(f"the script did not start\n{self._tail()}")

    def _hear(self, link: Any, patience: float) -> dict[str, Any]:
        until, line = monotonic() + patience, b""
        while not line.endswith(b"\n"):
            self._check_limit()
            ready, _, _ = select.select([link], [], [], 1.0)
            piece = link.recv(65536) if ready else b""
            line += piece
            if (ready and not piece) or monotonic() > until:
                raise ScriptError(
                    f"the script {'ended' if ready else 'made no step'}\n{self._tail()}"
                )
        heard: dict[str, Any] = json.loads(line)
        if "failed" in heard:
            kind = RankMissing if heard.get("needs_rank") else ScriptError
            raise kind(f"{heard['failed']}\n{self._tail()}")
        if "ended" in heard:
            raise ScriptEnded(
                f"the script's loop ended after {heard['ended']} steps, which are too few for a "
                "window of steps: train for more epochs, or measure fewer steps (--steps)"
            )
        return heard

    def _check_limit(self) -> None:
        if monotonic() > self._until:
            raise TimeLimitReached("the time limit has passed")

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])


def count_ready(facts: dict[str, Any]) -> int:
    """Return how many batches can at most be ready when a window begins.
    Batches that are already prepared would hide how slow reading is. The number includes batches
    that worker processes prepare, batches that they have sent, and batches that are already on the
    device.
    """
    plan = facts["plan"]
    readers, prefetch = max(plan["workers"], 1), plan["prefetch"]
    read = readers * max(prefetch, plan["threads"]) + prefetch * plan["workers"]
    return int(read + facts["staged"])
