"""The reasons why the catalog lists no price of some kinds for machines of the large clouds."""

from collections.abc import Mapping
from functools import cache

from cavvy.catalog.tables import read_table
from cavvy.domain.offers import Purchase


@cache
def list_reasons() -> Mapping[tuple[str, Purchase], str]:
    """The reason by provider and purchase option. It applies to the accelerated instance types of
    this provider for which the catalog in use has no such price.
    """
    return {
        (row["provider"], Purchase(row["purchase"])): row["reason"]
        for row in read_table(__package__, "unlisted")
    }
