"""The queue for `SignalsChanges.changed`."""

import asyncio


class ChangedGangs:
    """Names of changed gangs; each is queued once."""

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
