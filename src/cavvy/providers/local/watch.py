"""Tells at once when a process ends, by pidfd; where the system has none, callers find out at
their next look.
"""

import asyncio
import os

from cavvy.providers.local.processes import LocalProcess, lives

_RETRY_S = 2.0


class ProcessWatch:
    """Deaths of watched processes, as a queue of the names that they were watched under."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._queued: set[str] = set()
        self._descriptors: dict[LocalProcess, int] = {}

    async def changed(self) -> str:
        """The name of the next process that ended, or that was announced."""
        name = await self._queue.get()
        self._queued.discard(name)
        return name

    def announce(self, name: str, after_s: float = 0) -> None:
        """Put a name on the queue, now or later."""
        if after_s:
            asyncio.get_running_loop().call_later(after_s, self.announce, name)
        elif name not in self._queued:
            self._queued.add(name)
            self._queue.put_nowait(name)

    def add(self, name: str, process: LocalProcess) -> None:
        """Watch a process; a no-op where it is watched already. One that is gone is announced at
        once.
        """
        if process in self._descriptors or not hasattr(os, "pidfd_open"):
            return
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self.announce(name)
            return
        except OSError:  # no descriptor is left; watch it when somebody has looked again
            self.announce(name, _RETRY_S)
            return
        if not lives(process):
            os.close(descriptor)
            self.announce(name)
            return
        self._descriptors[process] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._ended, name, process)

    def close(self) -> None:
        """Forget all; must run in the loop that watches."""
        for descriptor in self._descriptors.values():
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
        self._descriptors.clear()

    def _ended(self, name: str, process: LocalProcess) -> None:
        descriptor = self._descriptors.pop(process)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        self.announce(name)
