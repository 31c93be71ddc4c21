"""What can be rented: the observed markets, and the providers' quotas."""

import time
from collections.abc import Sequence
from datetime import datetime

from starlette.requests import Request

from cavvy.client import ApiClient, ApiError
from cavvy.client.wire import MarketListing, QuotaReport, QuotaRow
from cavvy.console.memory import Memory
from cavvy.console.pages.page import Page, Part, is_update, memory_of, try_part

_MOST_ROWS = 300  # rows of a table
_QUOTAS_S = 60.0  # seconds for which the page waits for the providers


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """The quotas are requested only if the user asks for them, because the providers may answer
    slowly. Both tables may be a minute old.
    """
    text = (request.query_params.get("text") or "").strip()
    memory = memory_of(request)
    markets = memory.recall("markets", lambda: try_part(lambda: _list_markets(client)))
    quotas = Part[QuotaReport](None)
    wants_quotas = "quotas" in request.query_params
    if wants_quotas and not is_update(request):  # updates do not replace the quotas
        quotas = _find_quotas(client, memory)
    found = [each for each in markets.value or [] if _matches(text, each.market)]
    limits = [each for each in quotas.value.quotas if _fits(text, each)] if quotas.value else []
    shown = [each for each in limits if each.limit or text]
    return Page(
        "Capacity",
        "capacity.html",
        {
            "text": text,
            "refused_markets": markets,
            "markets": found[:_MOST_ROWS],
            "markets_left_out": len(found[_MOST_ROWS:]),
            "wants_quotas": wants_quotas,
            "refused_quotas": quotas,
            "quotas": shown[:_MOST_ROWS],
            "quotas_left_out": len(shown[_MOST_ROWS:]),
            "zero_quotas": len(limits) - len(shown),
            "untold": quotas.value.untold if quotas.value else [],
        },
    )


def _list_markets(client: ApiClient) -> Sequence[MarketListing]:
    """Return the markets, those with the most launches first."""
    return sorted(client.markets(), key=lambda each: (-each.granted - each.refused, each.market))


def _find_quotas(client: ApiClient, memory: Memory) -> Part[QuotaReport]:
    """Raises ApiError if the user is no longer signed in."""
    client.until = time.monotonic() + _QUOTAS_S
    try:
        return Part(memory.recall("quotas", client.quotas))
    except ApiError as error:
        if error.status == 401:
            raise
        return Part(None, error.message)


def _fits(text: str, quota: QuotaRow) -> bool:
    return _matches(text, quota.provider, quota.region, quota.zone, quota.family, quota.name)


def _matches(text: str, *values: str) -> bool:
    return any(text.casefold() in each.casefold() for each in values)
