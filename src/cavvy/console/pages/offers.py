"""What can be rented: offers by price and performance, with filters; the observed markets, and the
providers' quotas.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from urllib.parse import urlencode

from msgspec import Struct
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cavvy.catalog.accelerators import Precision, find_accelerator
from cavvy.client import ApiClient, ApiError
from cavvy.client.wire import MarketListing, OfferPage, OfferView, QuotaReport, QuotaRow
from cavvy.console import charts
from cavvy.console.memory import Memory
from cavvy.console.pages.page import (
    USUAL_PROJECT,
    Page,
    Part,
    find_project,
    is_update,
    list_projects,
    memory_of,
    try_part,
)
from cavvy.console.render import show_price
from cavvy.domain.units import is_whole

# drawn by `cavvy catalog diagram` for each release, with what each shows
_PICTURES = (
    ("decision", "How a place is chosen: facts, weights, and the answer with the runner-up"),
    ("costs", "The lowest prices of accelerators, on demand and on spot"),
    ("generations", "Peak rates of accelerators by the year of their announcement"),
    ("regions", "The regions of the providers"),
    ("hybrid", "Own machines, clouds and devices at the edge"),
    ("containers", "Which providers run and build container images"),
    ("serverless", "Replicas that are scaled to zero, and managed endpoints"),
)
_SHOWN, _MOST_SHOWN = 40, 100  # rows of the table: at first, and if more are asked for
_TEXTS = ("gpu", "provider", "region")
_PURCHASES = {"": "auto", "spot": "only", "on-demand": "never"}
_COUNTS = (1, 2, 4, 8)  # numbers of GPUs with a link
_HOURS = (1, 8, 24, 168)  # lengths of a run with a link
_WORD = re.compile(r"[A-Za-z0-9.:+_-]{1,80}")  # links of other pages write no other keys


class RatedOffer(Struct, frozen=True, kw_only=True):
    """An offer with its peak rate in BF16 (or FP16, else FP32) of all accelerators, in TFLOP/s,
    dense, by the vendor's data sheet; None if it is unknown.
    """

    offer: OfferView
    tflops: float | None

    @property
    def tflops_per_dollar(self) -> float | None:
        """The peak rate for one dollar an hour."""
        rate = self.offer.rate_micros_per_hour / 1e6
        return self.tflops / rate if self.tflops and rate else None


_SORTS: Mapping[str, Callable[[RatedOffer], tuple[float, ...]]] = {
    "price": lambda each: (each.offer.rate_micros_per_hour,),
    "gpu-price": lambda each: (
        not each.offer.accelerators,
        each.offer.rate_micros_per_hour / (each.offer.accelerators or 1),
    ),
    "performance": lambda each: (-(each.tflops or 0.0),),
    "value": lambda each: (-(each.tflops_per_dollar or 0.0),),
    "memory": lambda each: (-each.offer.accelerator_memory_mib * each.offer.accelerators,),
}


def make(client: ApiClient, request: Request, now: datetime) -> Page:
    """Raises ApiError, HTTPException."""
    asked = request.query_params
    given = {name: text for name in _TEXTS if (text := (asked.get(name) or "").strip())}
    project = asked.get("project") or find_project(client, request)
    buy, ready = asked.get("buy") or "", bool(asked.get("ready"))
    sort, hours = asked.get("sort") or "price", asked.get("hours") or "1"
    if buy not in _PURCHASES or sort not in _SORTS:
        raise HTTPException(
            400, f"`buy` must be spot or on-demand, and `sort` one of {', '.join(_SORTS)}."
        )
    if not (is_whole(hours) and len(hours) < 6 and int(hours)):
        raise HTTPException(400, f"`hours` must be a number from 1 to 99999, not {hours!r}.")
    given |= {"buy": buy} if buy else {}
    given |= {"ready": "1"} if ready else {}
    given |= {"project": project} if project != USUAL_PROJECT else {}
    wanted = {
        **{name: given.get(name) for name in _TEXTS},
        "gpu": given.get("gpu") or "gpu",
        "spot": _PURCHASES[buy],
        "ready": ready,
    }
    found = memory_of(request).recall(
        ("offers", project, *sorted(wanted.items(), key=str)),
        partial(_ask, client, project, wanted),
    )
    page = found.value or OfferPage(offers=[], total=0)
    rated = sorted(map(_rate, page.offers), key=_SORTS[sort])
    extra = {"sort": sort} if sort != "price" else {}
    extra |= {"hours": hours} if hours != "1" else {}
    is_long = asked.get("rows") == "more"
    shown = rated[: _MOST_SHOWN if is_long else _SHOWN]

    def link(**more: object) -> str:
        return "/offers?" + urlencode({**given, **extra, **more})

    model = given.get("gpu", "gpu").partition(":")[0]
    return Page(
        "Offers",
        "offers.html",
        {
            "project": project,
            "projects": sorted({*list_projects(client, request), project}),
            "given": {**dict.fromkeys((*_TEXTS, "buy", "ready"), ""), **given},
            "refusal": found.refusal,
            "rows": shown,
            "total": page.total,
            "left_out": page.total - len(shown),
            "longer": "" if is_long or len(rated) <= _SHOWN else link(rows="more"),
            "hours": int(hours),
            "chart": charts.scatter(_list_points(shown)) if rated else None,
            "counts": [(each, link(gpu=f"{model}:{each}")) for each in _COUNTS],
            "lengths": [(each, link(hours=each)) for each in _HOURS],
            "sorts": [(each, link(sort=each), each == sort) for each in _SORTS],
            "pictures": _PICTURES,
        },
    )


def starter(asked: Mapping[str, str]) -> str:
    """Return a task file for the hardware that a link of this page names."""
    given = {name: text for name, text in asked.items() if _WORD.fullmatch(text)}
    lines = ["name: hello", "resources:"]
    lines += [f"  {key}: {given[key]}" for key in ("gpu", "spot") if key in given]
    lines += [f"  {key}: [{given[key]}]" for key in ("providers", "regions") if key in given]
    return "\n".join([*lines, "run: nvidia-smi", ""])


def _ask(client: ApiClient, project: str, wanted: Mapping[str, object]) -> Part[OfferPage]:
    """Raises ApiError."""
    try:
        return Part(client.offers(project, **wanted))
    except ApiError as error:
        if error.status not in (400, 403, 404, 422):
            raise
        return Part(None, error.message)


def _rate(offer: OfferView) -> RatedOffer:
    known = find_accelerator(offer.accelerator) if offer.accelerator else None
    peak = known.accelerator.peak if known else {}
    rates: Sequence[float | None] = [
        peak.get(each) for each in (Precision.BF16, Precision.FP16, Precision.FP32)
    ]
    best = next((each for each in rates if each), None)
    tflops = None if best is None else best * offer.accelerators / 1e12
    return RatedOffer(offer=offer, tflops=tflops)


def _list_points(rated: Sequence[RatedOffer]) -> Sequence[charts.Point]:
    """Return the offers with a known price and rate; the number is that of their row."""
    return [
        charts.Point(
            x=each.offer.rate_micros_per_hour / 1e6,
            y=each.tflops,
            group=each.offer.accelerator or "",
            label=f"{each.offer.provider} {each.offer.instance_type}, {each.offer.purchase}: "
            f"{each.offer.accelerators:g} × {each.offer.accelerator}, "
            f"{show_price(each.offer.rate_micros_per_hour)}/h, {each.tflops:,.0f} TFLOP/s",
            number=number,
        )
        for number, each in enumerate(rated)
        if each.tflops and each.offer.rate_micros_per_hour
    ]


_MOST_ROWS = 300  # rows of a table
_QUOTAS_S = 60.0  # seconds for which the page waits for the providers


def make_capacity(client: ApiClient, request: Request, now: datetime) -> Page:
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
