"""Writes `src/cavvy/catalog/token_prices.csv`: what APIs ask for the tokens of models whose weights
can be served by oneself. Needs the package `genai-prices` (MIT), whose prices these are.

    python scripts/catalog/token_prices.py
"""

import csv
import sys
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Any

from genai_prices.data import providers

from cavvy.catalog.tables import find_name

FILE = Path(__file__).resolve().parents[2] / "src/cavvy/catalog/token_prices.csv"
# APIs that sell only models whose weights cannot be had, or the models of others by subscription
_CLOSED = ("anthropic", "cohere", "cursor", "databricks", "elevenlabs", "github-copilot", "openai")
_CLOSED += (
    "perplexity",
    "quicksilverpro",
    "typesafe",
    "voyageai",
    "x-ai",
    "azure",
    "aws",
    "google",
)
# the beginnings of names of models that no one else can serve
_CLOSED_NAMES = ("claude", "gemini", "chatgpt", "gpt", "grok", "nova-", "o1", "o3", "sonar")


def list_prices() -> Iterator[tuple[str, str, Decimal, Decimal, Decimal]]:
    for provider in providers:
        for model in provider.models if provider.id not in _CLOSED else ():
            name = model.id.lower().rpartition("/")[2]
            price = _find_current(model.prices)
            prompt, completion = _base(price.input_mtok), _base(price.output_mtok)
            cached = _base(price.cache_read_mtok) or prompt
            is_open = name.startswith("gpt-oss") or not name.startswith(_CLOSED_NAMES)
            if prompt and is_open and not model.deprecated and not name.endswith(":free"):
                api = provider.id.removeprefix("huggingface_").removesuffix("-ai")
                yield find_name(model.id), api, prompt, min(cached, prompt), completion


def _find_current(prices: Any) -> Any:
    """Return today's price. Of prices that depend on the hour, the one of most hours is first."""
    if not isinstance(prices, list):
        return prices
    today, found = date.today(), prices[0]
    for each in prices:
        start = getattr(each.constraint, "start_date", None)
        if start is not None and start <= today:
            found = each
    return found.prices


def _base(price: Any) -> Decimal:
    """Return the dollars for a million tokens; of tiers, those of short prompts."""
    return Decimal(getattr(price, "base", price) or 0)


def main() -> None:
    found: dict[tuple[str, str], tuple[Decimal, Decimal, Decimal]] = {}
    for name, api, *price in list_prices():
        kept = found.setdefault((name, api), tuple(price))
        if price[0] + price[2] < kept[0] + kept[2]:
            found[name, api] = tuple(price)
    with FILE.open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("model", "api", "prompt", "cached", "completion"))
        for key in sorted(found):
            rows.writerow((*key, *(f"{each.normalize():f}" for each in found[key])))
    sys.stdout.write(f"{len(found):,} prices of genai-prices {version('genai-prices')}\n")


if __name__ == "__main__":
    main()
