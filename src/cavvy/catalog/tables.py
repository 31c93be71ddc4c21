"""Reads tables of facts. The tables are CSV files in the folder of the module that uses them."""

import csv
from collections.abc import Iterable, Mapping
from pkgutil import get_data


def read_table(package: str, name: str) -> Iterable[Mapping[str, str]]:
    """Return the rows of `NAME.csv` in the package's folder, as mappings from column name to
    value."""
    data = get_data(package, f"{name}.csv")
    assert data is not None
    return csv.DictReader(data.decode().splitlines())
