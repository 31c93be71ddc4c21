"""Requests to a service at the gateway, and answers in OpenAI's format; `cavvy call`, `cavvy chat`
and the console use it.

Shows the tokens of language models and their price, as it was measured.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from msgspec import DecodeError
from msgspec.json import decode

from cavvy.domain.units import Money, format_usd

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from cavvy.client.ledger_wire import TokensView


CHAT_PATH = "/v1/chat/completions"


class ServiceSilent(Exception):
    """Raised if a service's gateway does not answer."""


@contextmanager
def open_answer(
    url: str,
    path: str,
    method: str,
    body: bytes | None,
    headers: Mapping[str, str],
    timeout_s: float,
) -> "Iterator[HTTPResponse]":
    """Yield the response before its body is read. Raises ServiceSilent."""
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    where = urlsplit(url)
    kind = HTTPSConnection if where.scheme == "https" else HTTPConnection
    connection = kind(where.hostname or "", where.port, timeout=timeout_s)
    try:
        connection.request(method, where.path + path, body, headers)
        yield connection.getresponse()
    except (OSError, HTTPException) as error:
        raise ServiceSilent(f"{url}: {error or type(error).__name__}") from error
    finally:
        connection.close()


def find_model(body: bytes) -> str:
    """Return the first model of a list in OpenAI's format, or ""."""
    with suppress(ValueError, LookupError, TypeError):
        return str(_decode(body)["data"][0]["id"])
    return ""


def say_problem(body: bytes) -> str:
    """Return the message of an error in OpenAI's format, or else the whole text."""
    with suppress(ValueError, LookupError, TypeError):
        found = _decode(body)
        message = found.get("error", found)["message"] if isinstance(found, dict) else None
        if isinstance(message, str):
            return message
    return body.decode(errors="replace")


def find_text(data: bytes, key: str) -> str:
    """Return the text of a whole answer (`key` is "message") or of one event ("delta"). Raises
    ValueError if the answer is not JSON.
    """
    found = _decode(data)
    choices = found.get("choices") if isinstance(found, dict) else None
    for choice in choices or ():
        return (choice.get(key) or {}).get("content") or ""
    return ""


def _decode(body: bytes) -> Any:
    """Raises ValueError if the body is not JSON."""
    try:
        return decode(body)
    except (DecodeError, RecursionError) as error:  # others are ValueError already
        raise ValueError(str(error)) from error


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
