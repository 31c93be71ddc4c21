"""Ranks for tests: processes forked from a warm one, each with the environment that its test gives
it. Scripts are forked, too, and so are the ranks that torchrun starts: most of their CPU time would
be the import of PyTorch.

The warm process has PyTorch imported and has computed nothing, so that a rank starts in
milliseconds and without threads that a fork would lose. Ranks meet in a store that the test itself
holds, so no port is chosen twice. They compute on one thread by their environment:
torch.set_num_threads, which ends the threads of a pool that it has just made, was seen to hang
there for good on a loaded machine.
"""

import atexit
import faulthandler
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NoReturn
from unittest import mock

import torch.distributed as dist
import torch.distributed.run
from tests.waits import PATIENCE_S

WARM = multiprocessing.get_context("forkserver")
WARM.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch.distributed.run",
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
    ends otherwise than with `code`, or with minus the number of a signal. `arguments` begin with
    the path of the script.
    """
    ended, said, errors = Script(["-W", "error", *arguments], env, folder).result()
    assert ended == code, errors
    return said


class Script:
    """A script in the place of a `subprocess.Popen`. `words` are the arguments of Python: `-m` and a
    module, or the path of a script, and what it is given. Of Python's own options, `-u` has no
    effect, and `-W error` has. Its output goes to a file of the folder unless a file is named.

    With `-m torch.distributed.run`, torchrun itself runs, and its ranks are forked.
    """

    def __init__(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        folder: Path | str,
        log: Path | str | None = None,
    ) -> None:
        warm_up()
        number = next(_numbers)
        self._streams = (
            [Path(log)] * 2
            if log
            else [Path(folder) / f"{name}-{number}" for name in ("said", "errors")]
        )
        self._process = WARM.Process(
            target=_be_script, args=([*words], dict(env), str(folder), self._streams)
        )  # no daemon: it may start processes

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
            raise subprocess.TimeoutExpired("script", timeout or 0.0)
        return self._process.exitcode

    def result(self) -> tuple[int, str, str]:
        """The exit code, and what it wrote into its outputs. Whoever takes too long is killed."""
        try:
            self.wait(LONGEST_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        said, errors = (each.read_text() for each in self._streams)
        return self.wait(), said, errors


_numbers = count()


def _be_script(words: list[str], env: dict[str, str], folder: str, streams: list[Path]) -> None:
    os.setsid()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND  # both may be one file
    for number, stream in enumerate(streams, 1):
        os.dup2(os.open(stream, flags, 0o600), number)
    os.chdir(folder)
    _be_python(words, env)


def _be_python(words: list[str], env: Mapping[str, str]) -> NoReturn:
    """Be `python WORDS`, and end as Python does: its threads first, then what was registered."""
    os.environ.clear()
    os.environ.update(env)
    sys.orig_argv = [sys.executable, *words]
    code: Any = 0
    try:
        _run_main(words)
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - as Python does
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # there is one
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _run_main(words: list[str]) -> None:
    while words[0] in ("-u", "-W"):
        if words.pop(0) == "-W":
            warnings.simplefilter(words.pop(0))  # type: ignore[arg-type]  # "error"
    if words[0] != "-m":
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).parent))
        runpy.run_path(words[0], run_name="__main__")
        return
    sys.argv = words[1:]
    if words[1] == "torch.distributed.run":
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = ForkedRank  # type: ignore[misc,assignment]
        torch.distributed.run.main(words[2:])
    else:
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)


class ForkedRank:
    """What torchrun starts, in the place of a `subprocess.Popen`: a fork of torchrun."""

    def __init__(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        stdout: IO[str] | None,
        stderr: IO[str] | None,
        start_new_session: bool,
    ) -> None:
        self.returncode: int | None = None
        assert args[0] == sys.executable
        assert start_new_session
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)  # torchrun handles them
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number, file in ((1, stdout), (2, stderr)):
                if file is not None:
                    os.dup2(file.fileno(), number)
            _be_python([*args[1:]], env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (LONGEST_S if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() >= until:
                raise subprocess.TimeoutExpired("rank", timeout or LONGEST_S)
            time.sleep(0.02)
        return code
