"""Shows the tokens of language models and their price, as it was measured."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cavvy.cli.view.formatting import show_money

if TYPE_CHECKING:
    from cavvy.client.ledger_wire import TokensView


def rate_tokens(micros: int, tokens: "Sequence[TokensView]") -> int | None:
    """Return the micro-dollars for a million tokens, rounded once. `micros` is all that was spent,
    with cold starts and idle time.
    """
    whole = sum(each.prompt + each.completion for each in tokens)
    return round(micros * 1_000_000 / whole) if whole else None


def show_rate(micros: int) -> str:
    return show_money(micros, 4 if micros < 100_000 else 2)


def show_tokens(tokens: "Sequence[TokensView]") -> str:
    prompt, cached, completion, estimated = (
        sum(getattr(each, name) for each in tokens)
        for name in ("prompt", "cached", "completion", "estimated")
    )
    text = f"{prompt:,} of prompts ({cached:,} cached), {completion:,} of completions"
    return f"{text}, {estimated:,} of them estimated" if estimated else text
