"""The queue from which `SignalsChanges.changed` returns names."""

import asyncio


class ChangedGangs:
    """A queue of the names of changed gangs. Each name is queued at most once."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._waiting: set[str] = set()

    def put(self, name: str) -> None:
        if name not in self._waiting:
            self._waiting.add(name)
            self._queue.put_nowait(name)

    async def get(self) -> str:
        name = await self._queue.get()
        self._waiting.discard(name)
        return name
