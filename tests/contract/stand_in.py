"""A program in the agent's place, packed as the agent is."""

import asyncio
import io
import time
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from datetime import timedelta
from pathlib import Path

from tests.waits import LONGEST_PAUSE_S, patience

from cavvy.providers.base import GangState, Provider


class StandInPlace(ABC):
    """A place whose gangs are such programs. They need a moment, and time passes for the provider
    only."""

    pause_s = 0.02  # between two looks, at least
    later = timedelta(0)

    @abstractmethod
    async def _settled(self) -> bool:
        """Whether nothing is on its way."""

    async def settle(self) -> None:
        await self._until(self._settled)

    async def until_ended(self, gang: str, providers: Iterable[Provider]) -> None:
        for provider in providers:

            async def ended(provider: Provider = provider) -> bool:
                seen = await provider.gangs(gang)
                return all(each.state is GangState.ENDED for each in seen)

            await self._until(ended)

    async def _until(self, true: Callable[[], Awaitable[bool]]) -> None:
        """Look again and again. What is waited for has the machine for two thirds of the time."""
        began = time.monotonic()
        async with patience():
            while not await true():
                took = time.monotonic() - began
                await asyncio.sleep(max(self.pause_s, min(LONGEST_PAUSE_S, 2 * took)))
                began = time.monotonic()

    async def wait(self, length: timedelta) -> None:
        self.later += length


STAND_IN = Path(__file__).with_name("agent_stand_in.py")


def pack_stand_in(program: str | None = None) -> bytes:
    """An archive of that program, or of the stand-in that obeys files; the same bytes each time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py"), program or STAND_IN.read_text())
    return buffer.getvalue()
