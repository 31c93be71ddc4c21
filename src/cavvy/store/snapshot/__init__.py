"""The price catalog as one SQLite file: `CatalogSnapshot` answers what `catalog/` asks; the others
write and replace it.
"""

from cavvy.store.snapshot.reader import CatalogSnapshot

__all__ = ["CatalogSnapshot"]
