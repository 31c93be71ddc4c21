"""The tokens of language models, and what they cost, as text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cavvy.domain.units import Money, format_usd

if TYPE_CHECKING:
    from cavvy.client.ledger_wire import TokensView


def rate_tokens(micros: int, tokens: "Sequence[TokensView]") -> int | None:
    """Return the micro-dollars for a million tokens, rounded once. `micros` is all that was spent,
    with cold starts and idle time.
    """
    whole = sum(each.prompt + each.completion for each in tokens)
    return round(micros * 1_000_000 / whole) if whole else None


def rate_apis(tokens: "Sequence[TokensView]") -> list[tuple[str, int]]:
    """Return the micro-dollars for a million of the same tokens at each public API that has all
    the models, the cheapest first: as many tokens of prompts, cached tokens and completions.
    """
    from cavvy.catalog.tables import list_api_prices

    whole = sum(each.prompt + each.completion for each in tokens)
    used = [each for each in tokens if each.prompt + each.completion]
    found: dict[str, list[int]] = {}
    for each in used:
        for price in list_api_prices(each.model):
            found.setdefault(price.api, []).append(
                price.price(each.prompt, each.cached, each.completion)
            )
    rates = [
        (api, round(sum(costs) / whole)) for api, costs in found.items() if len(costs) == len(used)
    ]
    return sorted(rates, key=lambda each: (each[1], each[0]))


def show_apis(tokens: "Sequence[TokensView]") -> str:
    """Return what the three cheapest public APIs ask, or an empty text if none has the models."""
    from cavvy.catalog.tables import TOKEN_PRICE_SOURCE

    rates = rate_apis(tokens)
    if not rates:
        return ""
    shown = ", ".join(f"{show_rate(micros)} at {api}" for api, micros in rates[:3])
    more = f" and {len(rates) - 3} more" if len(rates) > 3 else ""
    return f"the same tokens cost {shown} per million{more} ({TOKEN_PRICE_SOURCE})"


def show_rate(micros: int) -> str:
    return format_usd(Money(micros), 4 if micros < 100_000 else 2)


def show_priced_tokens(micros: int, tokens: "Sequence[TokensView]") -> str:
    """Return the tokens and what was spent for a million of them, or an empty text without
    tokens."""
    rate = rate_tokens(micros, tokens)
    return "" if rate is None else f"{show_tokens(tokens)}; {show_rate(rate)} per million"


def show_tokens(tokens: "Sequence[TokensView]") -> str:
    prompt, cached, completion, estimated = (
        sum(getattr(each, name) for each in tokens)
        for name in ("prompt", "cached", "completion", "estimated")
    )
    text = f"{prompt:,} of prompts ({cached:,} cached), {completion:,} of completions"
    return f"{text}, {estimated:,} of them estimated" if estimated else text
