"""Streams inputs: the work reads the inputs from named pipes while it runs, so they are not stored
on the disk.

A pipe can be read only once. The pipe of a folder contains the files one after another, sorted by
name. If a stream fails, the agent ends the work. The pipe of a failed stream stays open, so that
the work does not mistake incomplete data for the whole input.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import threading
from collections.abc import Callable

from ..allowed_folders import AllowedFolders
from ..config import AgentConfig
from ..documents import WorkConfig
from ..gpu_faults import NETWORK
from ..http_client import StorageTimeout, TransferClient, TransferFailed
from ..sidecar import SidecarPlace
from ..work.process import WorkProcess
from ..work.reaper import ChildCommand, report
from ..work.trees import remove_below
from .fetch import list_files, open_input
from .paths import find_input, list_input_folders
from .transfer import TransferProgress, tell_to


def make_pipe(folders: AllowedFolders, path: str) -> None:
    """Create a named pipe in place of any file at `path`. Raises LeadsOutside, OSError."""
    folder, name = folders.find(path, follow=False, make=True)
    try:
        remove_below(folder, name)
        os.mkfifo(name, 0o600, dir_fd=folder)
    finally:
        os.close(folder)


def open_pipe(folders: AllowedFolders, path: str) -> int:
    """Open a named pipe; wait until the work opens it for reading. Raises OSError if the work has
    replaced the pipe."""
    pipe = folders.open(path, os.O_WRONLY, follow=False)
    if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
        os.close(pipe)
        raise OSError(errno.EINVAL, "the work has replaced the pipe with another file", path)
    return pipe


def stream_inputs(config: AgentConfig, wanted: list[tuple[int, str, str]], channel: int) -> int:
    """Fill the pipe of each input in `wanted` (index, URL, path) as fast as the work reads it;
    return when all inputs are complete.
    """
    lock, folders = threading.Lock(), list_input_folders(config)
    failed: list[str] = []

    def run(index: int, source: str, path: str) -> None:
        try:
            InputStream(config, folders, index, source, path, channel).run()
        except (TransferFailed, OSError) as error:
            with lock:
                if not failed:
                    failed.append(source)
                    reason = f"the input {source} could not be streamed: {error}"
                    outcome = (
                        NETWORK if isinstance(error, StorageTimeout) else "exit"
                    )  # a storage timeout is retried, as for copied inputs
                    report(channel, outcome, reason)

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in wanted]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    while failed:
        signal.pause()  # keep the pipes open until the agent has ended the work
    return 0


class InputStream:
    """Streams one input into one pipe."""

    def __init__(
        self,
        config: AgentConfig,
        folders: AllowedFolders,
        index: int,
        source: str,
        path: str,
        channel: int,
    ) -> None:
        self._folders, self._path = folders, path
        self._meter = TransferProgress(f"input {source}", tell_to(channel))
        self._transfers = TransferClient(config, f"inputs/{index}", self._meter.waits)

    def run(self) -> None:
        """Write the input's files to the pipe one after another. Raises TransferFailed, OSError."""
        pipe = open_pipe(self._folders, self._path)  # blocks until the work reads
        try:
            for entry in list_files(self._transfers):
                for data in open_input(self._transfers, entry, self._path, self._meter).read():
                    left = memoryview(data)
                    while left:
                        left = left[os.write(pipe, left) :]
                    self._meter.moved(len(data))
                self._meter.moved(0, 1)
        except BrokenPipeError:
            pass  # the work has closed the pipe, because it needs no more data
        else:
            os.close(pipe)
        self._meter.end()


class PipeStreams:
    """The process that fills the pipes while the work runs. If the process fails, `failure` is the
    reason, `outcome` is the outcome of the work, and `stop` is called to end the work. `say`
    reports progress. Raises OSError.
    """

    def __init__(self, place: SidecarPlace, work: WorkConfig, stop: Callable[[], None]) -> None:
        self._say, self._stop = place.say, stop
        config = place.config
        self.failure, self.outcome = "", "exit"
        self._over = False
        wanted = [
            (at, work.inputs[at].source, find_input(config, at, work.inputs[at].target))
            for at in work.streams
        ]
        command = ChildCommand(
            [],
            dict(os.environ),
            config.home,
            lambda channel: stream_inputs(config, wanted, channel),
        )
        self._process = WorkProcess(place.loop, command, heard=self._heard, ended=self._ended)

    def end(self) -> None:
        """Kill the process that writes into the pipes, because the work has ended."""
        self._over = True
        self._process.kill()

    def _ended(self, code: int | None) -> None:
        if code != 0:
            self._fail("the process that streams the inputs was killed", "exit")

    def _heard(self, line: bytes) -> None:
        if not line.startswith(b"moved "):
            result = json.loads(line)
            self._fail(str(result["reason"]), str(result["outcome"]))
        elif not self._over:
            self._say("event", name="moved", text=line[6:].decode("utf-8", "replace"))

    def _fail(self, reason: str, outcome: str) -> None:
        if not self.failure and not self._over:
            self.failure, self.outcome = reason, outcome
            self._stop()
