"""The price catalog as one SQLite file: `CatalogSnapshot` answers the queries of `catalog/`; the
other modules write and replace it.
"""

from cavvy.store.snapshot.reader import CatalogSnapshot

__all__ = ["CatalogSnapshot"]
