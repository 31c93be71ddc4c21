"""The catalog's tables of facts, which are CSV files beside this module."""

import csv
from collections.abc import Iterable, Mapping
from pkgutil import get_data


def read_table(name: str) -> Iterable[Mapping[str, str]]:
    """The rows of `NAME.csv`, by the names in its first line."""
    data = get_data(__package__, f"{name}.csv")
    assert data is not None
    return csv.DictReader(data.decode().splitlines())
