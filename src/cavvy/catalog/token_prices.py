"""What public APIs ask for the tokens of models that one can also serve oneself."""

import re
from collections.abc import Sequence
from decimal import Decimal
from functools import cache

from cavvy.catalog.tables import read_table
from cavvy.domain.values import Struct

# The prices without discounts, as `scripts/catalog/token_prices.py` found them. They go stale.
TOKEN_PRICE_SOURCE = "genai-prices 0.2.3, 2026-11"
# what names of files, repositories and offers add to the name of a model: its format, or how an API
# serves it
_ADDED = re.compile(
    r"(?:bf16|fp16|fp8|fp4|nvfp4|mxfp4|int8|int4|awq|gptq|gguf|w4a16|w8a8|w8a16|bnb4bit|4bit|8bit|"
    r"q[2-8](?:km|ks|0|1)|dynamic|quantized|turbo|fast|lite|hf)$"
)


class ApiPrice(Struct, frozen=True, kw_only=True):
    """Micro-dollars for a million tokens of prompts, of prompts that were cached, and of
    completions."""

    api: str
    prompt: int
    cached: int
    completion: int

    def price(self, prompt: int, cached: int, completion: int) -> int:
        """Return the price of these tokens in millionths of micro-dollars, which needs no rounding.
        `cached` is a part of `prompt`."""
        whole = (prompt - cached) * self.prompt + cached * self.cached
        return whole + completion * self.completion


def find_name(model: str) -> str:
    """Return the name by which prices of a model are stored, such as `llama318binstruct` for
    `hf://meta-llama/Meta-Llama-3.1-8B-Instruct-FP8@main`: without organization, revision, format
    and punctuation.
    """
    name = model.lower().rsplit("/", 1)[-1]
    name = re.sub(r"[^a-z0-9]", "", re.split("[:@]", name)[0].removesuffix(".gguf"))
    if name.startswith("metallama"):
        name = name.removeprefix("meta")
    while (shorter := _ADDED.sub("", name)) and shorter != name:
        name = shorter
    return name


def list_api_prices(model: str) -> Sequence[ApiPrice]:
    """Return the prices of all known APIs for a model; none for an unknown model."""
    return _read_prices().get(find_name(model), ())


@cache
def _read_prices() -> dict[str, tuple[ApiPrice, ...]]:
    found: dict[str, tuple[ApiPrice, ...]] = {}
    for row in read_table(__package__, "token_prices"):
        numbers = {
            name: int(Decimal(row[name]) * 1_000_000) for name in ("prompt", "cached", "completion")
        }
        price = ApiPrice(api=row["api"], **numbers)
        found[row["model"]] = (*found.get(row["model"], ()), price)
    return found
