"""Tables of facts, which are CSV files beside the modules that use them."""

import csv
from collections.abc import Iterable, Mapping
from pkgutil import get_data


def read_table(package: str, name: str) -> Iterable[Mapping[str, str]]:
    """The rows of `NAME.csv` in the package's folder, by the names in its first line."""
    data = get_data(package, f"{name}.csv")
    assert data is not None
    return csv.DictReader(data.decode().splitlines())
