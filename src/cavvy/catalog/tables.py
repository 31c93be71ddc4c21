"""Read tables of facts, which are CSV files in the same folder as the modules that use them."""

import csv
from collections.abc import Iterable, Mapping
from pkgutil import get_data


def read_table(package: str, name: str) -> Iterable[Mapping[str, str]]:
    """The rows of `NAME.csv` in the package's folder, as mappings from column name to value."""
    data = get_data(package, f"{name}.csv")
    assert data is not None
    return csv.DictReader(data.decode().splitlines())
