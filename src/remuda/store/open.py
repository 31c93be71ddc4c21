"""The store that a URL names."""

from remuda.store.base import Store, Unusable


def open_store(url: str, *, journal: str = "auto") -> Store:
    """The store of a URL: memory:, sqlite:///path or postgresql+psycopg://user@host/name; `await store.open()` next.

    `journal` of SQLite is "wal", "delete" for file systems where its shared memory is unsafe, such as NFS, or "auto".
    Imports a database driver only where the URL asks for one. Raises Unusable for other URLs.
    """
    if url == "memory:":
        from remuda.store.memory import MemoryStore

        return MemoryStore()
    if url.startswith(("sqlite://", "postgresql")):
        from remuda.store.sql import SqlStore

        return SqlStore(url, journal=journal)
    raise Unusable(f"cannot open the store {url!r}: expected memory:, sqlite:///path or postgresql+psycopg://…")
