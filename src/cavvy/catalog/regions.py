"""Finds the country and area of a provider's region, so that `--region eu` works as well as exact
names.

Areas are continents in the everyday sense: us, eu (Europe including the United Kingdom, Switzerland
and Norway), asia, north-america (without the us, which is a separate area), south-america, oceania,
africa, middle-east. Countries are ISO 3166 codes (de, jp; `uk` is read as gb). If the location of a
region is unknown, the region matches only its exact name.

`regions.csv` has a row for each country. A row contains a country's area, the words that stand for
the country in names of regions, and the country's regions from the lists that the providers
publish. If providers use the same name for different locations, an entry has the form
PROVIDER/REGION. `co2_g_kwh` is what a kilowatt-hour from the country's grid emitted on average in
the year `co2_year`, in grams of CO2 equivalent with the making of plants and fuel: Ember, Yearly
Electricity Data (CC BY 4.0), as published with CO2.js. Parts of a large country, and the contracts
of a data center, may be far from it.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from cavvy.catalog.tables import read_table

_GOOGLE_ZONE = re.compile(r"([a-z]+-[a-z]+\d+)-[a-z]")
AREAS = ("us", "eu", "asia", "north-america", "south-america", "oceania", "africa", "middle-east")


_OTHER_NAMES = {"uk": "gb", "europe": "eu"}


@cache
def locate(provider: str, region: str) -> tuple[str | None, str | None]:
    """Return the country and the area of a region; each is None if unknown."""
    plain = region.strip().lower()
    known = _countries("regions")
    country = known.get(f"{provider}/{plain}") or known.get(plain) or _country_in_words(plain)
    if country is not None:
        return country, _areas().get(country)
    return None, plain if plain in AREAS else None


def is_region(wanted: str, provider: str, region: str, zone: str | None) -> bool:
    """Return whether `wanted` names the region, its zone, its country or its area, ignoring case.
    If the offer has no zone and `wanted` is a Google zone, the offer's region is compared with the
    region in the zone's name.
    """
    wish = wished_place(wanted)
    if zone is None and region_of_zone(wish) == region.lower():
        return True
    if wish in (region.lower(), (zone or region).lower(), f"{region}/{zone}".lower()):
        return True
    return wish in locate(provider, region)


def region_of_zone(name: str) -> str | None:
    """Return the region of one of Google's zones, such as us-central1 for us-central1-a, or None if
    the text cannot be such a zone."""
    found = _GOOGLE_ZONE.fullmatch(name)
    return None if found is None else found[1]


def is_known_place(wanted: str) -> bool:
    """Return whether a requested location is an area or country of the table. A location that is
    not in the table may be the name of a provider's region.
    """
    return wished_place(wanted) in (*AREAS, *_areas())


def wished_place(wanted: str) -> str:
    wish = wanted.strip().lower()
    return _OTHER_NAMES.get(wish, wish)


def places_of(provider: str, region: str) -> frozenset[str]:
    """Return the names of a region, its country and its area, as far as the country and the area
    are known."""
    return _with_other_names({region.strip().lower(), *locate(provider, region)})


def list_known_places() -> frozenset[str]:
    """Return the names of all areas and countries."""
    return _with_other_names({*AREAS, *_areas()})


def list_places_around(wanted: str) -> frozenset[str]:
    """Return the names of the wanted place (a zone, region, country or area), and of the larger
    places that contain the wanted place."""
    wish = wished_place(wanted)
    return _with_other_names({wish, region_of_zone(wish), *locate("", wish)})


def list_places_within(wanted: str) -> frozenset[str]:
    """Return the wanted place and the places that contain it. If the wanted place is an area, the
    result also contains its countries: a location in one of these countries is in the area.
    """
    wish = wished_place(wanted)
    countries = {each for each, area in _areas().items() if area == wish}
    return list_places_around(wish) | _with_other_names(set(countries))


def _with_other_names(places: set[str | None]) -> frozenset[str]:
    more = {name for name, place in _OTHER_NAMES.items() if place in places}
    return frozenset(each for each in {*places, *more} if each)


def _country_in_words(region: str) -> str | None:
    """Return the country that the name of a region contains, as in `us-texas`, `ch-lug1`,
    `helsinki-finland-1` or `de`, or None if the name contains no country.
    """
    words = re.split(r"[-_ ]+", region)
    if words[0] in _areas():
        return words[0]
    named = _countries("names")
    return next((named[word] for word in words if word in named), None)


class GridIntensity(NamedTuple):
    """The mean emissions of a country's grid in a year, in grams of CO2 for a kilowatt-hour."""

    country: str
    grams: int
    year: int


@cache
def find_grid(provider: str, region: str) -> GridIntensity | None:
    """Return the grid of a region, or None if its country is unknown."""
    country, _ = locate(provider, region)
    return None if country is None else _grids().get(country)


@cache
def _grids() -> Mapping[str, GridIntensity]:
    rows = read_table(__package__, "regions")
    return {
        row["country"]: GridIntensity(row["country"], int(row["co2_g_kwh"]), int(row["co2_year"]))
        for row in rows
    }


@cache
def _countries(column: str) -> Mapping[str, str]:
    """Return the country of each word in a column of `regions.csv`."""
    rows = read_table(__package__, "regions")
    return {word: row["country"] for row in rows for word in row[column].split()}


@cache
def _areas() -> Mapping[str, str]:
    """Return the area of each country."""
    return {row["country"]: row["area"] for row in read_table(__package__, "regions")}
