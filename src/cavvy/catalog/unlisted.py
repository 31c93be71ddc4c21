"""The reasons why the catalog has no on-demand, spot or reserved price for some machines of the
large clouds.
"""

from collections.abc import Mapping
from functools import cache

from cavvy.catalog.tables import read_table
from cavvy.domain.offers import Purchase


@cache
def list_reasons() -> Mapping[tuple[str, Purchase], str]:
    """The reasons, by provider and purchase option. A reason applies to the provider's accelerated
    instance types that have no price for this purchase option in the catalog in use.
    """
    return {
        (row["provider"], Purchase(row["purchase"])): row["reason"]
        for row in read_table(__package__, "unlisted")
    }
