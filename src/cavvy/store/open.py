"""The store that a URL names."""

from cavvy.store.base import Store, StoreUnusable


def open_store(url: str, *, journal: str = "auto", installation: str | None = None) -> Store:
    """The store of a URL: memory:, sqlite:///path or postgresql+psycopg://user@host/name; `await
    store.open()` next.

    `journal` of SQLite is "wal", "delete" for file systems where its shared memory is unsafe, such
    as NFS, or "auto". `installation` is the id that a fresh database of SQLite gets, by default a
    new one. Imports a database driver only where the URL asks for one. Raises StoreUnusable for
    other URLs.
    """
    if url == "memory:":
        from cavvy.store.memory import MemoryStore

        return MemoryStore()
    if url.startswith(("sqlite://", "postgresql")):
        from cavvy.store.sql import SqlStore

        if installation is not None and url.startswith("sqlite://"):
            return SqlStore(url, journal=journal, make_id=lambda: installation)
        return SqlStore(url, journal=journal)
    raise StoreUnusable(
        f"cannot open the store {url!r}: expected memory:, sqlite:///path or postgresql+psycopg://…"
    )
