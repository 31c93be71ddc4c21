"""Providers state the currency of their prices once, and the account converts."""

from datetime import UTC, datetime

import pytest

from cavvy.catalog.tables import find_rate
from cavvy.domain.units import UnitError
from cavvy.providers.base import Manifest
from cavvy.providers.registry import check_settings
from cavvy.providers.vm.abilities import make_manifest
from cavvy.providers.vm.account import RestAccount
from cavvy.providers.vm.keys import ApiKeySource

KEYS = ApiKeySource(provider="steppe", variables=("STEPPE_KEY",), files=(), made_at="there")


def manifest(currency: str) -> Manifest:
    return make_manifest(
        "steppe",
        "the Steppe",
        machine="a server",
        deletion="x",
        rights="x",
        unsupported={},
        settings=(KEYS.setting(),),
        endpoint="https://steppe.example",
        currency=currency,
    )


def account(currency: str, **table: float) -> RestAccount:
    settings = check_settings(manifest(currency), table)
    return RestAccount(settings, lambda: datetime.now(UTC), KEYS, lambda told: ("", ""))


def test_a_price_is_converted_by_the_dated_rate_or_by_the_setting() -> None:
    assert account("USD").rate("0.84").micros_per_hour == 840_000
    assert account("EUR").rate("0.84").micros_per_hour == 974_988
    assert account("EUR", usd_per_eur=1.25).rate(0.84).micros_per_hour == 1_050_000
    assert account("EUR", usd_per_eur=1.0).rate("730", hours=730).micros_per_hour == 1_000_000


def test_the_rate_and_its_date_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPPE_KEY", "x")
    (setting,) = [each for each in manifest("EUR").settings if each.name == "usd_per_eur"]
    assert (setting.default, setting.unit) == (1.1607, "USD")
    assert "European Central Bank on 2025-10-21" in setting.consequence
    assert setting.maximum is not None
    assert 4 < setting.maximum < 100, "yen for a dollar instead of dollars for a yen"
    assert ("prices", "in EUR, at $1.2 each (`usd_per_eur`)") in account(
        "EUR", usd_per_eur=1.2
    ).identity()
    assert "prices" not in dict(account("USD").identity())


@pytest.mark.parametrize("price", ["", "NaN", "-1", "Infinity", "n/a", "1,20"])
def test_what_is_no_price_is_refused(price: str) -> None:
    with pytest.raises(UnitError):
        account("EUR").rate(price)


def test_an_unknown_currency_names_the_known_ones() -> None:
    assert find_rate("usd").usd == 1
    with pytest.raises(LookupError, match="no exchange rate is known for 'XXX'; known are AUD, B"):
        find_rate("XXX")
