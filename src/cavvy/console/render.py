"""Turns values into pages: the templates, and how they show money, times, durations and sizes."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pkgutil import get_data
from typing import Any

from jinja2 import (
    ChoiceLoader,
    Environment,
    FunctionLoader,
    PackageLoader,
    StrictUndefined,
    pass_context,
)
from jinja2.runtime import Context
from markupsafe import Markup, escape

from cavvy import __version__
from cavvy.client.metrics import describe_energy
from cavvy.client.token_prices import show_apis, show_priced_tokens
from cavvy.domain.units import (
    Money,
    format_count,
    format_duration,
    format_measure,
    format_price,
    format_usd,
    is_whole,
)


def render(template: str, values: Mapping[str, Any]) -> str:
    """Return the page of a template. Values are escaped."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("cavvy.console"), FunctionLoader(_read_own)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["version"] = __version__
    environment.filters.update(
        money=show_money,
        price=show_price,
        moment=show_moment,
        ago=show_ago,
        span=show_span,
        percent=show_percent,
        code=show_code,
        log=show_log,
        passed=show_passed,
        placement=read_placement,
        energy=describe_energy,
        priced_tokens=lambda found: show_priced_tokens(found.spent_micros, found.tokens),
        api_prices=show_apis,
        latency=show_latency,
        measure=format_measure,
        figure=name_figure,
    )
    return environment


def _read_own(name: str) -> str | None:
    """Return the text of a capability's template, PACKAGE:FILE, or None if there is none."""
    package, colon, file = name.partition(":")
    text = get_data(package, file) if colon else None
    return None if text is None else text.decode()


def show_money(micros: int | None) -> str:
    return "–" if micros is None else format_usd(Money(micros))


def show_code(text: str) -> Markup:
    """Return a sentence in which what stands between backticks is code."""
    parts = [escape(each) for each in text.split("`")]
    if len(parts) % 2 == 0:
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(each) if number % 2 else each
        for number, each in enumerate(parts)
    )


def show_price(micros: int | None) -> str:
    """Return the price of an hour, which may be far below a cent."""
    return "–" if micros is None else format_price(Money(micros).usd)


def show_span(seconds: float | None) -> str:
    return "–" if seconds is None else format_duration(timedelta(seconds=max(0.0, seconds)))


def show_latency(seconds: float | None) -> str:
    """Return a time below a minute with up to three digits, such as "0.4 ms", "85 ms" or
    "1.25 s"."""
    if seconds is None:
        return "–"
    if 0 < seconds < 0.00095:
        return f"{seconds * 1000:.1g} ms"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.3g} s" if seconds < 59.95 else show_span(seconds)


def show_log(text: str) -> Markup:
    """Return a log with its carriage returns, which HTML would otherwise turn into newlines."""
    return Markup(str(escape(text)).replace("\r", "&#13;"))


def name_figure(name: str) -> str:
    """Return the name of a figure in words, such as "GPU memory"."""
    words = format_measure(name, "").strip()
    return words[:1].upper() + words[1:]


def show_percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def show_moment(moment: datetime | None) -> Markup:
    """Return a moment in UTC, which the page's script turns into the browser's time zone."""
    if moment is None:
        return Markup("–")
    utc = moment.astimezone(UTC)
    return Markup('<time datetime="{}" data-local>{}</time>').format(
        utc.isoformat(timespec="seconds"), f"{utc:%Y-%m-%d %H:%M:%S} UTC"
    )


@pass_context
def show_ago(context: Context, moment: datetime | None) -> Markup:
    """Return the time since a moment, such as "3m05s ago"; the exact moment is its tooltip. The
    page's value `now` is the current time.
    """
    if moment is None:
        return Markup("–")
    utc = moment.astimezone(UTC)
    passed = (context["now"] - utc).total_seconds()
    text = f"{show_span(passed)} ago" if passed >= 0 else f"in {show_span(-passed)}"
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        utc.isoformat(timespec="seconds"), f"{utc:%Y-%m-%d %H:%M:%S}", text
    )


@pass_context
def show_passed(context: Context, since: datetime, until: datetime | None = None) -> str:
    """Return the time from one moment to another, or until now."""
    return show_span(((until or context["now"]) - since).total_seconds())


@dataclass(frozen=True)
class PlacementText:
    """The parts of an offer's key. `purchase` is "" if the text is no key."""

    key: str
    machine: str  # the type of the machine, such as p5.48xlarge
    gpus: str  # the GPUs of one node, such as "8 GPUs"
    where: str  # the account, the region and the zone
    purchase: str


def read_placement(key: str) -> PlacementText:
    """Split a key such as aws/us-east-1/us-east-1a/p5.48xlarge:8/spot. A text that is no key
    becomes the machine.
    """
    account, _, rest = key.partition("/")
    region, _, rest = rest.partition("/")
    rest, _, purchase = rest.rpartition("/")
    machine, _, count = rest.rpartition(":")
    if not (machine and is_whole(count)):
        return PlacementText(key, key, "", "", "")
    zone, _, kind = machine.rpartition("/")
    # A zone's name usually contains its region's name.
    place = [region] if not zone else [zone] if zone.startswith(region) else [region, zone]
    return PlacementText(key, kind, _name_gpus(int(count)), " ".join([account, *place]), purchase)


def _name_gpus(count: int) -> str:
    return format_count(count, "GPU") if count else ""
