"""Scripts that `cavvy profile` and `tune` measure, forked from the process of `tests.train.ranks`
that has PyTorch imported: most of such a script's CPU time is its imports, of each rank and of
torchrun itself. Tests that need the real torchrun say so by `real_torchrun`.
"""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.train.ranks import WARM, warm_up
from tests.waits import PATIENCE_S

from cavvy.capabilities.tuning.session import TuningSession

PROBE = ["-m", "cavvy.capabilities.tuning.probe"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
_real: list[None] = []  # not empty while a test needs the real torchrun


class WarmProbe:
    """A script in the place of a `subprocess.Popen`."""

    def __init__(self, words: list[str], env: dict[str, str], log: Path) -> None:
        warm_up()
        environs = [env]
        if words[: len(TORCHRUN)] == TORCHRUN:
            size, words = int(words[len(TORCHRUN)]), words[len(TORCHRUN) + 1 :]
            self._store = dist.TCPStore(  # where the ranks meet
                "127.0.0.1",
                0,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=PATIENCE_S),
            )
            environs = [env | _of_rank(rank, size, self._store.port) for rank in range(size)]
        assert words[: len(PROBE)] == PROBE, words
        given = words[len(PROBE) :], environs, os.getcwd(), str(log)
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


def _of_rank(rank: int, size: int, port: int) -> dict[str, str]:
    """The variables that torchrun gives a rank, as far as our programs and PyTorch read them."""
    return {
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
        **{"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"},
    }


@contextmanager
def warm_probes() -> Iterator[None]:
    """While the block runs, sessions fork their script."""
    warm_up()  # now: a test may have another folder of temporary files
    usual = TuningSession._start

    def start(session: TuningSession, command: list[str]) -> Any:
        under_torchrun = command[1 : len(TORCHRUN) + 1] == TORCHRUN
        if command[1:3] == PROBE or (under_torchrun and not _real):
            return WarmProbe(command[1:], session._environment(), session._log)
        return usual(session, command)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TuningSession, "_start", start)
        yield


@contextmanager
def real_torchrun() -> Iterator[None]:
    """While the block runs, torchrun itself starts the ranks of a session."""
    _real.append(None)
    try:
        yield
    finally:
        _real.pop()


def _be_probe(arguments: list[str], environs: list[dict[str, str]], folder: str, log: str) -> None:
    """Be a script, or torchrun with a script for each of its ranks."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in (1, 2):
        os.dup2(out, number)
    os.chdir(folder)
    env = environs[0] if len(environs) == 1 else _fork_ranks(environs)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["probe", *arguments]
    runpy.run_module(PROBE[1], run_name="__main__", alter_sys=True)


def _fork_ranks(environs: list[dict[str, str]]) -> dict[str, str]:
    """Fork a process for each rank, in which this returns the rank's environment. This process
    ends with the last of them; when one fails, it ends the others, as torchrun does.
    """
    ranks = set()
    for env in environs:
        pid = os.fork()
        if pid == 0:
            return env
        ranks.add(pid)
    failed = False
    while ranks:
        ended, status = os.wait()
        ranks.remove(ended)
        if status and not failed:
            failed = True
            for pid in ranks:
                os.kill(pid, signal.SIGTERM)
    os._exit(int(failed))
