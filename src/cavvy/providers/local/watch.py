"""Reports the exit of processes immediately, through pidfds. On a system without pidfds, the next
poll detects that a process has exited.
"""

import asyncio
import os

from cavvy.providers.hosts.changed_gangs import ChangedGangs
from cavvy.providers.local.processes import LocalProcess, lives

_RETRY_S = 2.0


class ProcessWatch:
    """A queue of names. Each watched process has a name. When the process exits, the name is added
    to the queue.
    """

    def __init__(self) -> None:
        self._changes = ChangedGangs()
        self._descriptors: dict[LocalProcess, int] = {}

    async def changed(self) -> str:
        """Wait for the next name in the queue and return it."""
        return await self._changes.get()

    def announce(self, name: str, after_s: float = 0) -> None:
        """Add a name to the queue, immediately or after a delay."""
        if after_s:
            asyncio.get_running_loop().call_later(after_s, self.announce, name)
        else:
            self._changes.put(name)

    def add(self, name: str, process: LocalProcess) -> None:
        """Watch a process, unless the process is already watched. If the process has already
        exited, its name is added to the queue immediately.
        """
        if process in self._descriptors or not hasattr(os, "pidfd_open"):
            return
        try:
            descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            self.announce(name)
            return
        except OSError:  # no file descriptor is free; the next poll tries again
            self.announce(name, _RETRY_S)
            return
        if not lives(process):
            os.close(descriptor)
            self.announce(name)
            return
        self._descriptors[process] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._ended, name, process)

    def close(self) -> None:
        """Stop watching. The method must be called in the event loop that watches the processes."""
        for descriptor in self._descriptors.values():
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
        self._descriptors.clear()

    def _ended(self, name: str, process: LocalProcess) -> None:
        descriptor = self._descriptors.pop(process)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        self.announce(name)
