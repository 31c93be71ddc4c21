"""A refresh of all price lists: one that fails, or whose format has changed, stops no other."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cavvy.cli.main import cli
from cavvy.providers import prices
from cavvy.providers.prices import PriceError, PriceQuery, ProviderPrices
from cavvy.store.snapshot import CatalogSnapshot
from cavvy.store.snapshot.choose import SHIPPED


@dataclass
class Source:
    """A price list that answers with the shipped prices, or raises an error."""

    provider: str
    error: Exception | None = None
    title: str = "a price list"

    def fetch(self, query: PriceQuery) -> ProviderPrices:
        if self.error is not None:
            raise self.error
        with CatalogSnapshot.open(SHIPPED) as shipped:
            mine = [each for each in shipped.all_offers() if each.provider == self.provider]
        return ProviderPrices(offers=mine)


def refresh(monkeypatch: pytest.MonkeyPatch, home: Path, *sources: Source) -> Result:
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
