"""The price catalog in one SQLite file, called a snapshot. `CatalogSnapshot` answers the queries of
`catalog/`. Other modules of this package write, compare and replace snapshots.
"""

from cavvy.store.snapshot.reader import CatalogSnapshot

__all__ = ["CatalogSnapshot"]
