"""Prints the summary of a job (result, time by phase, bill) for `cavvy run`, `logs -f` and
`cost`.
"""

from collections.abc import Callable
from datetime import timedelta
from math import ceil
from typing import TYPE_CHECKING

import click

from cavvy.cli.view import formatting
from cavvy.cli.view.layout import takes_style
from cavvy.cli.view.output import TableColumn, pairs_out, rows_out
from cavvy.client.metrics import last_figures
from cavvy.domain.values import replace

if TYPE_CHECKING:
    from cavvy.client.wire import CostView, JobDetail
    from cavvy.domain.offers import Offer
    from cavvy.planner.counterfactual import CounterfactualCost


_CENT = 10_000  # micro-dollars


def summary_out(job: "JobDetail", cost: "CostView") -> None:
    """Print the summary of a followed job to standard error, so that a pipe receives only the
    log.
    """
    import sys

    code = f", exit code {job.exit_code}" if job.exit_code is not None else ""
    lasted = ((job.ended_at or job.since) - job.submitted_at).total_seconds()
    length = formatting.show_seconds(lasted - cost.ended_s)
    click.echo(
        f"\n{click.style(job.phase, fg=formatting.COLORS[job.phase], bold=True)} after "
        f"{length}{code}",
        err=True,
        color=takes_style(sys.stderr),
    )
    pairs: list[tuple[str, object]] = []
    if job.phase != "done":
        pairs.append(("reason", job.reason))
    if (
        result := last_figures(job)
    ) and not sys.stdout.isatty():  # On a terminal, the live line already shows the progress.
        pairs.append(("result", formatting.show_progress(result)))
    pairs.append(("time", time_text(cost)))
    pairs.append(("bill", bill_text(job, cost)))
    pairs_out([(f"  {name}", value) for name, value in pairs], file=sys.stderr)
    elsewhere = price_counterfactuals(job, cost) if job.phase == "done" else []
    if any(each.cost.micros >= _CENT for each in elsewhere):  # `cavvy cost` tells smaller ones, too
        elsewhere_out(elsewhere, file_is_error=True)


def time_text(cost: "CostView") -> str:
    spells = (
        ("queued", cost.queued_s),
        ("starting", cost.starting_s),
        ("running", cost.running_s),
        ("lost", cost.lost_s),
        ("stopping", cost.ending_s),
        *([("ended", cost.ended_s)] if cost.ended_s else []),
    )
    return ", ".join(f"{name} {formatting.show_seconds(seconds)}" for name, seconds in spells)


def bill_text(
    job: "JobDetail | None", cost: "CostView", show: Callable[[int], str] = formatting.show_money
) -> str:
    """Return the bill in one line. `show` formats amounts of micro-dollars. `job` is None if the
    caller may not see the job.
    """
    from cavvy.domain.events import ChargeKind
    from cavvy.domain.units import HourlyRate, format_rate

    timed = {kind.value for kind in ChargeKind if kind.is_machine}
    machines = [charge for charge in cost.charges if charge.kind in timed]
    rates = sorted({charge.rate_micros_per_hour for charge in machines})
    nodes = sum((charge.until - charge.since for charge in machines), timedelta(0)).total_seconds()
    at = " and ".join(format_rate(HourlyRate(rate)) for rate in rates)
    count = len(job.attempts) if job else len({charge.attempt for charge in cost.charges})
    attempts = f"{count} attempt{'s' if count != 1 else ''}"
    times = f", {formatting.show_seconds(nodes)} of node time at {at}" if machines else ""
    times += _list_extras(cost, show)
    over = job is None or all(attempt.phase == "ended" for attempt in job.attempts)
    far = "" if over else " so far"
    bill = f"{show(cost.total_micros)}{far} ({attempts}{times})"
    if not cost.unsure_micros:
        return bill
    more = show(cost.unsure_micros)
    return (
        f"{bill}, and up to {more} more: a provider did not report the times of all nodes, or a "
        "node was lost while it sent a checkpoint; see `cavvy events`"
    )


def _list_extras(cost: "CostView", show: Callable[[int], str]) -> str:
    """Return all charges except charges for machines, such as ", $0.02 for traffic"."""
    from cavvy.domain.events import ChargeKind

    extra = {kind.value for kind in ChargeKind if kind.is_extra}
    extras = sum(each.amount_micros for each in cost.charges if each.kind in extra)
    sent = sum(each.amount_micros for each in cost.charges if each.kind == ChargeKind.TRAFFIC)
    parts = [(extras, "disks and addresses"), (sent, _describe_traffic(cost))]
    return "".join(f", {show(amount)} for {what}" for amount, what in parts if amount)


def _describe_traffic(cost: "CostView") -> str:
    """Return the charged traffic, such as "1.50 GB of traffic (prices of 2026-11-01)"."""
    billed = [each for each in cost.traffic if each.micros_per_gb]
    size = sum(each.bytes for each in billed) / 10**9
    dates = sorted({f"{each.price_as_of}" for each in billed if each.price_as_of})
    return f"{size:.2f} GB of traffic" + (f" (prices of {', '.join(dates)})" if dates else "")


def price_counterfactuals(job: "JobDetail", cost: "CostView") -> "list[CounterfactualCost]":
    """Return the cost of the job on the three cheapest offers that fit the task and have at least
    as much memory as the job used.
    """
    from msgspec.json import decode

    from cavvy.domain.offers import Offer
    from cavvy.domain.tasks import TaskSpec
    from cavvy.planner.counterfactual import SYSTEM_MIB, compare_counterfactuals
    from cavvy.store.snapshot.reader import find_offers

    ran = timedelta(seconds=cost.running_s)
    if not ran or not job.attempts:
        return []
    task, here = decode(job.task, type=TaskSpec), decode(job.attempts[-1].offer, type=Offer)
    used = [node.telemetry for attempt in job.attempts for node in attempt.nodes]
    peak = max((each.get("memory_peak_mib", 0.0) for each in used), default=0.0)
    least = max(task.resources.memory_min_mib or 0, SYSTEM_MIB + ceil(peak))
    offers = find_offers(replace(task.resources, memory_min_mib=least), limit=1000)
    return compare_counterfactuals(task, ran, here, offers)


def elsewhere_out(elsewhere: "list[CounterfactualCost]", file_is_error: bool = False) -> None:
    import sys

    from cavvy.domain.units import format_rate, format_usd

    bases = {e.basis for e in elsewhere}
    columns = [
        TableColumn("offer", "  THE SAME RUN ELSEWHERE", lambda text: f"  {text}"),
        TableColumn("rate", "PRICE", format_rate, right=True),
        TableColumn("cost", "WOULD COST", format_usd, right=True),
        TableColumn("basis", wrap=True, hidden=len(bases) == 1),
    ]
    rows = [(_place_text(e.offer), e.offer.rate.times(1), e.cost, e.basis) for e in elsewhere]
    out = sys.stderr if file_is_error else sys.stdout
    rows_out(columns, rows, file=out)
    if len(bases) == 1:
        out.write(f"  ({bases.pop()})\n")


def _place_text(offer: "Offer") -> str:
    gpus = f" {offer.accelerator}:{offer.accelerators_text}" if offer.accelerator else ""
    return (
        f"{offer.provider} {offer.zone or offer.region} {offer.instance_type}{gpus} "
        f"{offer.purchase}"
    )
