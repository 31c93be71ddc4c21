"""Ranks for tests: processes forked from a warm one, each with the environment that its test gives
it.

The warm process has PyTorch imported and has computed nothing, so that a rank starts in
milliseconds and without threads that a fork would lose. Ranks meet in a store that the test itself
holds, so no port is chosen twice. They compute on one thread by their environment:
torch.set_num_threads, which ends the threads of a pool that it has just made, was seen to hang
there for good on a loaded machine.
"""

import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from tests.waits import PATIENCE_S

WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "sklearn.datasets",
        "tests.train.programs",
    ]
)
LONGEST_S = 240.0
Work = Callable[..., Any]


@cache
def warm_up() -> None:
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
        multiprocessing.forkserver.ensure_running()


class Ranks:
    """Some processes that run the same function, as torchrun would start them."""

    def __init__(
        self, size: int, work: Work, *args: Any, folder: Path, env: dict[str, str] | None = None
    ) -> None:
        warm_up()
        self._store = dist.TCPStore(
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=PATIENCE_S),
        )
        self._pipes: list[Connection] = []
        self._folder = folder
        self.processes = []
        for rank in range(size):
            mine = {
                name: value for name, value in os.environ.items() if not name.startswith("CAVVY_")
            }
            mine |= {"XDG_CACHE_HOME": str(folder / "cache"), **(env or {})}
            if size > 1:
                mine |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
                mine |= {"LOCAL_WORLD_SIZE": str(size)}
                mine |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
                mine |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
            ours, theirs = WARM.Pipe(duplex=False)
            process = WARM.Process(
                target=_be_rank, args=(theirs, mine, str(folder), work, args), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid or 0, number)

    def heard(self, rank: int) -> Any:
        """The next thing that a rank said; EOFError once it is gone."""
        if not self._pipes[rank].poll(LONGEST_S):
            for process in self.processes:
                if process.is_alive():
                    os.kill(process.pid or 0, signal.SIGABRT)  # each says where it is
                    process.join(10)
            where = "\n".join(path.read_text() for path in sorted(self._folder.glob("stacks-*")))
            self.end()
            raise AssertionError(f"rank {rank} said nothing for {LONGEST_S:.0f} s\n{where}")
        return self._pipes[rank].recv()

    def rest(self, rank: int) -> list[Any]:
        """All that a rank which has been killed had said and nobody has heard."""
        said = []
        with suppress(EOFError, ConnectionResetError):
            while True:
                said.append(self.heard(rank)[1])
        return said

    @staticmethod
    def pause(seconds: float) -> None:
        time.sleep(seconds)

    def end(self) -> list[int | None]:
        """Wait for all; exit codes by rank. Whoever takes too long is killed."""
        for process in self.processes:
            process.join(LONGEST_S)
            if process.is_alive():
                process.kill()
                process.join()
        return [process.exitcode for process in self.processes]

    def results(self, exit_code: int = 0) -> list[Any]:
        """What each rank's work returned; fails where one ended otherwise."""
        found = []
        for rank in range(len(self.processes)):
            kind, value = "said", None
            while kind == "said":
                try:
                    kind, value = self.heard(rank)
                except EOFError:
                    kind, value = "gone", None
            found.append(value)
            if kind == "raised":
                self.end()
                raise AssertionError(f"rank {rank}: {value}")
        assert self.end() == [exit_code] * len(self.processes)
        return found


def run(
    size: int, work: Work, *args: Any, folder: Path, env: dict[str, str] | None = None
) -> list[Any]:
    return Ranks(size, work, *args, folder=folder, env=env).results()


def _be_rank(pipe: Connection, env: dict[str, str], folder: str, work: Work, args: Any) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    warnings.simplefilter("error")
    faulthandler.enable(open(f"stacks-{env.get('RANK', '0')}-{os.getpid()}", "w"))  # noqa: SIM115 - until it ends
    try:
        value = work(lambda said: pipe.send(("said", said)), *args)
        pipe.send(("result", value))
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001 - told to the test
        pipe.send(("raised", traceback.format_exc()))
        sys.exit(1)
    finally:
        pipe.close()


def run_script(arguments: list[str], env: dict[str, str], folder: Path, code: int = 0) -> str:
    """What a script prints that runs in a folder, as `python -W error` would run it. Fails if it
    ends otherwise than with `code`, or with minus the number of a signal.

    `arguments` begin with the path of the script. Most of its CPU time would be its imports, which
    the warm process has done.
    """
    warm_up()
    streams = [folder / "said", folder / "errors"]
    process = WARM.Process(target=_be_script, args=(arguments, env, folder, streams), daemon=True)
    process.start()
    process.join(LONGEST_S)
    if process.is_alive():
        process.kill()
        process.join()
    said, errors = (each.read_text() for each in streams)
    assert process.exitcode == code, errors
    return said


def _be_script(
    arguments: list[str], env: dict[str, str], folder: Path, streams: list[Path]
) -> None:
    for number, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    warnings.simplefilter("error")
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")
