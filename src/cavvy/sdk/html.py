"""Shows a job in a notebook."""

from datetime import UTC, datetime, timedelta
from html import escape
from typing import TYPE_CHECKING

from cavvy.domain.units import HourlyRate, Money, format_duration, format_rate, format_usd

if TYPE_CHECKING:
    from decimal import Decimal

    from cavvy.sdk.status import JobStatus

# colors that can be read on light and on dark pages
_COLORS = {
    "queued": "#b58900",
    "starting": "#2aa198",
    "running": "#3a9d23",
    "stopping": "#b58900",
    "done": "#3a9d23",
    "failed": "#dc322f",
    "stopped": "#a34fa8",
}


def show_job(status: "JobStatus", note: str = "") -> str:
    """Return an HTML table with the state, the offer, the price and the cost of a job."""
    color = _COLORS.get(status.phase, "inherit")
    rows = [
        ("job", f"{escape(status.name)} <small>({escape(status.id)})</small>"),
        ("state", f'<b style="color:{color}">{escape(status.phase)}</b>{_since(status)}'),
        ("reason", escape(status.reason)),
        ("place", escape(status.placement or "")),
        ("price", _price(status)),
        ("spent", format_usd(Money(_micros(status.spent_usd)))),
        ("note", escape(note)),
    ]
    cells = "".join(
        f'<tr><th style="text-align:left">{name}</th><td style="text-align:left">{text}</td></tr>'
        for name, text in rows
        if text
    )
    return f"<table>{cells}</table>"


def _since(status: "JobStatus") -> str:
    end = status.ended_at
    if end is not None:
        return f" after {format_duration(end - status.submitted_at)}"
    return f" for {format_duration(max(datetime.now(UTC) - status.since, timedelta(0)))}"


def _price(status: "JobStatus") -> str:
    rate = status.rate_usd_per_hour
    return "" if rate is None else format_rate(HourlyRate(_micros(rate)))


def _micros(usd: "Decimal") -> int:
    return int(usd * 1_000_000)
