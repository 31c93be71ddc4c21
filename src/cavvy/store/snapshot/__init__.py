"""The price catalog as one SQLite file: `Snapshot` answers what `catalog/` asks; the others
write and replace it.
"""

from cavvy.store.snapshot.reader import Snapshot

__all__ = ["Snapshot"]
