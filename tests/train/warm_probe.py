"""Scripts of one rank that `cavvy profile` and `tune` measure, forked from the process of
`tests.train.ranks` that has PyTorch imported: most of such a script's CPU time is its imports.
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.train.ranks import WARM, warm_up

from cavvy.tuning.session import TuningSession

PROBE = ["-m", "cavvy.tuning.probe"]


class WarmProbe:
    """A script in the place of a `subprocess.Popen`."""

    def __init__(self, arguments: list[str], env: dict[str, str], log: Path) -> None:
        warm_up()
        given = arguments, env, os.getcwd(), str(log)
        self._process = WARM.Process(target=_be_probe, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(PROBE, timeout or 0.0)
        return self._process.exitcode


@contextmanager
def warm_probes() -> Iterator[None]:
    """While the block runs, sessions of one rank fork their script."""
    usual = TuningSession._start

    def start(session: TuningSession, command: list[str]) -> Any:
        if command[1:3] != PROBE:
            return usual(session, command)
        return WarmProbe(command[3:], session._environment(), session._log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TuningSession, "_start", start)
        yield


def _be_probe(arguments: list[str], env: dict[str, str], folder: str, log: str) -> None:
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in (1, 2):
        os.dup2(out, number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.argv = ["probe", *arguments]
    runpy.run_module(PROBE[1], run_name="__main__", alter_sys=True)
