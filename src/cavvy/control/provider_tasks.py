"""The tasks that serve the provider of each account: one task follows the provider's signals,
another task relays agents.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta

from cavvy.control.clock import ControlClock
from cavvy.providers.abilities import (
    RELAYS_AGENTS,
    SIGNALS_CHANGES,
    RelaysAgents,
    SignalsChanges,
    ability,
)
from cavvy.providers.base import Provider, ProviderError

_PAUSE = timedelta(seconds=15)  # pause before a failed task is restarted
_log = logging.getLogger(__name__)


class ProviderTasks:
    """The tasks of all accounts. The tasks run in the group that is passed to `start`; no tasks
    exist before `start` is called.

    `changed` is called with the name of a gang whose provider signals a change. If there are
    several servers, only one of them relays agents.
    """

    def __init__(self, clock: ControlClock, changed: Callable[[str], Awaitable[None]]) -> None:
        self._clock = clock
        self._changed = changed
        self._group: asyncio.TaskGroup | None = None
        self._relaying = False
        self._following: dict[str, asyncio.Task[None]] = {}  # keyed by account, like `_relays`
        self._relays: dict[str, asyncio.Task[None]] = {}

    def start(
        self, group: asyncio.TaskGroup, providers: Mapping[str, Provider], *, relay: bool
    ) -> None:
        """Start to follow the signals of these providers. If `relay` is set, also relay the
        messages of the providers' agents.
        """
        self._group, self._relaying = group, relay
        for account, provider in providers.items():
            self.add(account, provider)

    def add(self, account: str, provider: Provider) -> None:
        """Serve one more provider."""
        if self._group is None:
            return
        if signals := ability(provider, SIGNALS_CHANGES):
            self._following[account] = self._group.create_task(self._follow(account, signals))
        if self._relaying:
            self._start_relay(self._group, account, provider)

    def drop(self, account: str) -> None:
        """Stop serving the provider of this account."""
        for tasks in (self._following, self._relays):
            if account in tasks:
                tasks.pop(account).cancel()

    def set_relaying(self, providers: Mapping[str, Provider], relay: bool) -> None:
        """Start or stop relaying the agents of these providers."""
        while self._relays:
            self._relays.popitem()[1].cancel()
        self._relaying = relay
        if self._group is not None and relay:
            for account, provider in providers.items():
                self._start_relay(self._group, account, provider)

    def _start_relay(self, group: asyncio.TaskGroup, account: str, provider: Provider) -> None:
        if relay := ability(provider, RELAYS_AGENTS):
            self._relays[account] = group.create_task(self._relay(account, relay))

    async def _follow(self, account: str, provider: SignalsChanges) -> None:
        """Report each gang that the provider signals. If signals fail, the regular polls find the
        changes later.
        """
        while True:
            try:
                gang = await provider.changed()
            except (ProviderError, OSError) as error:
                _log.warning(
                    "a provider's signals failed; its gangs are polled instead",
                    exc_info=error,
                    extra={"provider": account},
                )
                await self._pause()
                continue
            await self._changed(gang)

    async def _relay(self, account: str, provider: RelaysAgents) -> None:
        """Run a provider's relay, which connects agents with the server, and restart it whenever it
        fails. Agents continue their work during a restart of the relay.
        """
        while True:
            try:
                await provider.relay()
            except (ProviderError, OSError) as error:
                _log.warning(
                    "a provider's relay failed and is restarted",
                    exc_info=error,
                    extra={"provider": account},
                )
            await self._pause()

    async def _pause(self) -> None:
        await self._clock.sleep_until(self._clock.now() + _PAUSE)
