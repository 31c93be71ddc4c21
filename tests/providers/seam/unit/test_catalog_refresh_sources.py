"""A refresh of all price lists: one that fails, or whose format has changed, stops no other."""

from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cavvy.cli.main import cli
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.providers import prices
from cavvy.providers.prices import PriceError, PriceQuery, ProviderPrices
from cavvy.store.snapshot import choose
from cavvy.store.snapshot.refresh import write_snapshot

TODAY = date(2026, 11, 20)
OFFERS = [
    Offer(
        provider=provider,
        region="r",
        instance_type="t",
        vcpus=8,
        memory_mib=32768,
        rate=HourlyRate(1_000_000),
        source="a test",
        as_of=TODAY,
    )
    for provider in ("azure", "vultr")
]


@dataclass
class Source:
    """A price list that answers with the prices of the old catalog, or raises an error."""

    provider: str
    error: Exception | None = None
    title: str = "a price list"

    def fetch(self, query: PriceQuery) -> ProviderPrices:
        if self.error is not None:
            raise self.error
        return ProviderPrices(offers=[each for each in OFFERS if each.provider == self.provider])


def refresh(monkeypatch: pytest.MonkeyPatch, home: Path, *sources: Source) -> Result:
    write_snapshot(home / "old.db", OFFERS, [], as_of=TODAY)
    monkeypatch.setattr(choose, "SHIPPED", home / "old.db")
    monkeypatch.setenv("CAVVY_HOME", str(home))
    monkeypatch.setattr(prices, "list_sources", lambda: {each.provider: each for each in sources})
    monkeypatch.setattr(prices, "list_unavailable", dict)
    return CliRunner().invoke(cli, ["catalog", "refresh"], prog_name="cavvy")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("retailPrice"), "azure: the format of this source has changed: a price list"),
        (TypeError("str is no dict"), "TypeError: str is no dict"),
        (PriceError("HTTP 500"), "azure: HTTP 500"),
    ],
)
def test_a_source_that_fails_is_named_and_the_others_are_refreshed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, said: str
) -> None:
    done = refresh(monkeypatch, tmp_path, Source("azure", error), Source("vultr"))
    assert done.exit_code == 1
    assert said in done.stderr
    assert "vultr: " in done.stderr
    assert "1 of the sources could not be read; the old prices" in " ".join(done.stderr.split())
    assert list(tmp_path.rglob("catalog.db"))


def test_no_catalog_is_written_if_every_source_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    done = refresh(monkeypatch, tmp_path, Source("azure", KeyError("Items")))
    assert done.exit_code == 1
    assert "the format of this source has changed" in done.stderr
    assert not list(tmp_path.rglob("catalog.db"))
