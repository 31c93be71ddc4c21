"""A program in the agent's place, packed as the agent is."""

import asyncio
import io
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

from tests.waits import patience

from cavvy.providers.base import GangState, Provider


class StandInPlace(ABC):
    """A place whose gangs are such programs. They need a moment, and time passes for the provider
    only."""

    pause_s = 0.02  # between two looks
    later = timedelta(0)

    @abstractmethod
    async def _settled(self) -> bool:
        """Whether nothing is on its way."""

    async def settle(self) -> None:
        async with patience():
            while not await self._settled():
                await asyncio.sleep(self.pause_s)

    async def until_ended(self, gang: str, providers: Iterable[Provider]) -> None:
        async with patience():
            for provider in providers:
                while any(seen.state is not GangState.ENDED for seen in await provider.gangs(gang)):
                    await asyncio.sleep(self.pause_s)

    async def wait(self, length: timedelta) -> None:
        self.later += length


STAND_IN = Path(__file__).with_name("agent_stand_in.py")


def pack_stand_in(program: str | None = None) -> bytes:
    """An archive of that program, or of the stand-in that obeys files; the same bytes each time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo("__main__.py"), program or STAND_IN.read_text())
    return buffer.getvalue()
