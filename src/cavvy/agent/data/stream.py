"""Streams inputs: the work reads them from pipes while it runs, and no file is stored on the disk.

A pipe can be read only once. It contains the files of a folder one after another, sorted by name.
If a stream fails, its pipe stays open, so that the work cannot mistake a part for the whole. The
agent then ends the work.
"""

from __future__ import annotations

import os
import signal
import threading

from ..config import AgentConfig
from ..http_client import StorageTimeout, TransferClient, TransferFailed
from ..notices.faults import NETWORK
from ..work.reaper import report
from .fetch import list_files, open_input
from .transfer import TransferProgress, tell_to


def make_pipe(path: str) -> None:
    """Create a named pipe in place of any file at `path`. Raises OSError."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.lexists(path):
        os.unlink(path)
    os.mkfifo(path, 0o600)


def stream_inputs(config: AgentConfig, wanted: list[tuple[int, str, str]], channel: int) -> int:
    """Fill the pipe of each input in `wanted` (index, URL, path) as fast as the work reads it;
    return when all are complete.
    """
    lock = threading.Lock()
    failed: list[str] = []

    def run(index: int, source: str, path: str) -> None:
        try:
            InputStream(config, index, source, path, channel).run()
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
    """Stream one input into one pipe."""

    def __init__(
        self, config: AgentConfig, index: int, source: str, path: str, channel: int
    ) -> None:
        self._path = path
        self._meter = TransferProgress(f"input {source}", tell_to(channel))
        self._transfers = TransferClient(config, f"inputs/{index}", self._meter.waits)

    def run(self) -> None:
        """Write the input's files to the pipe one after another. Raises TransferFailed, OSError."""
        pipe = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)  # blocks until the work reads
        try:
            for entry in list_files(self._transfers):
                for data in open_input(self._transfers, entry, self._path, self._meter).read():
                    left = memoryview(data)
                    while left:
                        left = left[os.write(pipe, left) :]
                    self._meter.moved(len(data))
                self._meter.moved(0, 1)
        except BrokenPipeError:
            pass  # the work has read as much as it needs
        else:
            os.close(pipe)
        self._meter.end()
