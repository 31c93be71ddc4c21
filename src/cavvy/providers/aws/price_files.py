"""Reads EC2's public price files, which need no credentials: the prices on demand, and those of
standard reservations without upfront payment. The files contain no spot prices.

AWS publishes one file for each region, in CSV with several hundred MB:
https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-the-aws-price-list-bulk-api.html.
A file begins with a few lines about itself; the line of column names begins with "SKU".
"""

import csv
import io
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import BinaryIO

from cavvy.domain.units import HourlyRate, UnitError, parse_rate
from cavvy.domain.values import Struct
from cavvy.http_client import HttpClient, NoReply, is_same_server
from cavvy.providers.prices import PriceError, PriceQuery, read_page

BASE = "https://pricing.us-east-1.amazonaws.com"
SIZE = "about 5 GB"  # an estimate: the files were never downloaded
_INDEX = "/offers/v1.0/aws/AmazonEC2/current/region_index.json"
_TRIES = 5
_MOST_BYTES = 4 << 30  # of one region's file; several hundred MB are expected
_LIMIT_S = 3600.0  # for one region's file
_MONTHS = {"1yr": 12, "3yr": 36}
# These values leave one price per type: Linux, shared hardware, no licence. A file without one of
# the columns has only such machines.
_WANTED = {
    "operatingsystem": "Linux",
    "tenancy": "Shared",
    "preinstalledsw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
    "unit": "Hrs",
    "currency": "USD",
}
_NEEDED = ("instancetype", "termtype", "priceperunit", "leasecontractlength", "purchaseoption")
_RESERVED = {"offeringclass": "standard", "purchaseoption": "No Upfront"}


class RegionPrices(Struct, frozen=True, kw_only=True):
    """The prices of one region: on demand by instance type, and reserved by instance type and
    months."""

    region: str
    rates: dict[str, HourlyRate]
    reserved: dict[tuple[str, int], HourlyRate]


def read_price_files(query: PriceQuery, base: str = BASE) -> Iterator[RegionPrices]:
    """Read the price file of each region in turn. Raises PriceError."""
    client = HttpClient(most_bytes=_MOST_BYTES, limit_s=_LIMIT_S)
    index = read_page(client, base + _INDEX, query.pause, tries=_TRIES, name=base)
    regions = index.get("regions")
    if not isinstance(regions, dict) or not regions:
        raise PriceError(f"{base}{_INDEX} is not in the documented form; nothing was changed")
    for region, told in sorted(regions.items()):
        url = base + str(told["currentVersionUrl"]).removesuffix(".json") + ".csv"
        if not is_same_server(url, base):
            raise PriceError(f"{base}{_INDEX} leads to another server; nothing was changed")
        query.progress(f"EC2's public price files: {region}")
        with tempfile.TemporaryFile() as file:
            _download(client, url, file, query)
            file.seek(0)
            with io.TextIOWrapper(file, encoding="utf-8", newline="") as lines:
                yield _read(region, csv.reader(lines), url)


def _download(client: HttpClient, url: str, file: BinaryIO, query: PriceQuery) -> None:
    fault = ""
    for attempt in range(_TRIES):
        if attempt:
            query.pause(min(2.0**attempt, 30))
        file.seek(0)
        file.truncate()
        try:
            reply = client.send("GET", url, into=file)
        except NoReply as error:
            fault = str(error)
            continue
        if reply.status == 200:
            return
        fault = f"HTTP {reply.status}"
        if not reply.is_passing:
            break
    raise PriceError(f"{url} cannot be read: {fault}; nothing was changed; try again later")


def _read(region: str, lines: Iterable[list[str]], url: str) -> RegionPrices:
    """Raises PriceError if the file is not in the documented form."""
    found = iter(lines)
    names = next((_plain(row) for row in found if row and row[0] == "SKU"), [])
    if missing := [name for name in _NEEDED if name not in names]:
        raise PriceError(f"{url} has no column {missing[0]}; nothing was changed")
    at = {name: names.index(name) for name in names}
    wanted = [(at[name], value) for name, value in _WANTED.items() if name in at]
    prices = RegionPrices(region=region, rates={}, reserved={})
    for row in found:
        if len(row) == len(names) and all(row[place] == value for place, value in wanted):
            _add(prices, {name: row[place] for name, place in at.items()})
    return prices


def _plain(row: list[str]) -> list[str]:
    return [re.sub(r"[^a-z0-9]", "", name.lower()) for name in row]


def _add(prices: RegionPrices, row: Mapping[str, str]) -> None:
    """Add a row's price; a price of 0 belongs to a part of a term that has another price."""
    rate, name = _rate(row["priceperunit"]), row["instancetype"]
    if rate is None or not name:
        return
    months = _MONTHS.get(row["leasecontractlength"].replace(" ", ""))
    if row["termtype"] == "OnDemand":
        prices.rates[name] = rate
    elif months and all(row.get(key) == value for key, value in _RESERVED.items()):
        prices.reserved[name, months] = rate


def _rate(text: str) -> HourlyRate | None:
    try:
        return parse_rate(text) if Decimal(text) > 0 else None
    except (InvalidOperation, UnitError):
        return None
