"""Creates the store that a URL names."""

from cavvy.store.base import StoreUnusable
from cavvy.store.sql import Store


def open_store(
    url: str,
    *,
    journal: str = "auto",
    installation: str | None = None,
) -> Store:
    """Create the store for a URL: memory:, sqlite:///path or postgresql+psycopg://user@host/name.
    The caller must call `await store.open()` before the first use of the store.

    `journal` is SQLite's journal mode: "wal", "delete" for file systems without safe shared memory,
    such as NFS, or "auto". `installation` is the ID that a new SQLite database gets, by default a
    random ID. Raises StoreUnusable for a URL of any other form.
    """
    if url == "memory:":
        from cavvy.store.memory import MemoryStore

        return MemoryStore()
    if url.startswith(("sqlite://", "postgresql")):
        if installation is not None and url.startswith("sqlite://"):
            return Store(url, journal=journal, make_id=lambda: installation)
        return Store(url, journal=journal)
    raise StoreUnusable(
        f"cannot open the store {url!r}: expected memory:, sqlite:///path or postgresql+psycopg://…"
    )
