"""Opens the house for the embedded server: store, places and control over one state folder, and closes it again."""

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from remuda.api.execs import Execs
from remuda.api.home import Home
from remuda.api.house import House
from remuda.api.tokens import load_tokens
from remuda.api.watch import Watch
from remuda.control.agents import AgentDesk, Supplies
from remuda.control.clock import WallClock
from remuda.settings import Settings
from remuda.store.base import Changes, Store
from remuda.store.blobs import BlobStore
from remuda.store.logs import LogStore
from remuda.store.open import open_store
from remuda.store.secrets import Sealer

_MIB = 1024 * 1024


class WatchedStore:
    """A store that wakes whoever waits for news of a job when a write about it is done."""

    def __init__(self, inner: Store, watch: Watch) -> None:
        self._inner = inner
        self._watch = watch

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def commit(self, changes: Changes) -> None:
        """As Store.commit."""
        await self._inner.commit(changes)
        keys = {job.id for job in changes.jobs}
        keys |= {attempt.job_id for attempt in changes.attempts}
        keys |= {event.job_id for event in changes.events}
        self._watch.wake(*keys)


def watched(store: Store, watch: Watch) -> Store:
    """The store, with wake-ups."""
    return cast(Store, WatchedStore(store, watch))


@asynccontextmanager
async def open_house(home: Home, settings: Settings, address: str, stop: Callable[[], None]) -> AsyncIterator[House]:
    """The open house; control runs inside. Raises StoreError, ProviderError."""
    clock, watch = WallClock(), Watch()
    store = open_store(f"sqlite:///{home.file('remuda.db')}", journal="delete" if home.shared else "wal")
    await store.open()
    try:
        seen = watched(store, watch)
        root = Path(home.path)
        sealer = Sealer(root / "key")

        async def open_secrets(project: str, names: Sequence[str]) -> dict[str, str]:
            return {}

        agents = AgentDesk(seen, clock, lambda key: None, Supplies(open_secrets=open_secrets, storage=lambda job: "", accelerators=lambda j, a: 0))
        house = House(
            store=seen,
            agents=agents,
            logs=LogStore(root / "logs", limit=settings.whole("logs.job_mib") * _MIB),
            blobs=BlobStore(root / "blobs"),
            sealer=sealer,
            tokens=load_tokens(home.file("agents.key")),
            execs=Execs(watch),
            watch=watch,
            settings=settings,
            now=clock.now,
            make_id=lambda: secrets.token_hex(8),
            stop=stop,
            address=address,
            started_at=clock.now(),
            database="sqlite",
            on_network=home.shared,
        )
        yield house
    finally:
        await store.close()
