"""The reasons why the catalog lacks on-demand, spot or reserved prices for some machines of the
large clouds.
"""

from collections.abc import Mapping
from functools import cache

from cavvy.catalog.tables import read_table
from cavvy.domain.offers import Purchase


@cache
def list_reasons() -> Mapping[tuple[str, Purchase], str]:
    """Return the reasons why prices are missing, by provider and purchase option. A reason applies
    to accelerator instance types without a price for the purchase option in the current catalog.
    """
    return {
        (row["provider"], Purchase(row["purchase"])): row["reason"]
        for row in read_table(__package__, "unlisted")
    }
