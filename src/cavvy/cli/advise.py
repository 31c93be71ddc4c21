"""`cavvy cost advise` and `cavvy cost reserve`: list avoidable costs with dollars per month and a
remedy for each, and the commitments to clouds that would save money.
"""

from datetime import UTC, datetime, timedelta

import click

from cavvy.cli.reach.arguments import since_option
from cavvy.cli.reach.session import any_project_option, named, session
from cavvy.cli.view import formatting
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, output_option, rows_out
from cavvy.domain.units import format_duration
from cavvy.planner.advice import (
    Waste,
    WasteKind,
    advise,
    advise_machines,
    advise_volumes,
    sort_waste,
)

_PERIOD = timedelta(days=30)


@click.command("advise")
@any_project_option
@since_option
@output_option
def command(project: str | None, since: datetime | None, output: str) -> None:
    """List waste in jobs, machines and volumes, with its cost per 30 days and a remedy.

    The period is from --since, by default 30 days ago, until now. Removed jobs and runs shorter
    than an hour are not included.
    """
    until = datetime.now(UTC)
    found = _find_waste(project, since or until - _PERIOD, until)
    show = formatting.make_money_format(waste.monthly.micros for waste in found)
    columns = [
        TableColumn("job"),
        TableColumn("project", drop=1),
        TableColumn("waste"),
        TableColumn("monthly_micros", "A MONTH", show),
        TableColumn("amount_micros", hidden=True),
        TableColumn("offer", hidden=True),
        TableColumn("ranks", hidden=True),
        TableColumn("remedy", "END IT", wrap=True),
    ]
    rows = [
        (
            waste.job,
            waste.project,
            waste.kind,
            waste.monthly.micros,
            waste.amount.micros,
            None if waste.offer is None else waste.offer.key,
            list(waste.ranks),
            describe_remedy(waste, named(waste.project, waste.job)),
        )
        for waste in found
    ]
    rows_out(columns, rows, output, empty="no waste was found")
    if output == "table" and rows:
        click.echo(f"total {show(sum(waste.monthly.micros for waste in found))} a month")


def _find_waste(project: str | None, since: datetime, until: datetime) -> list[Waste]:
    from cavvy.cli.reach.usage import (
        list_machines,
        list_offers_of,
        list_volumes,
        read_charges,
        read_runs,
    )

    period = until - since
    with session() as client:
        lines = read_charges(client, project, since, until)
        runs = read_runs(client, lines)
    found = advise(runs, list_offers_of(run.offer.provider for run in runs), period)
    found += advise_volumes(list_volumes(lines, until), period)
    found += advise_machines(list_machines(lines, until), period)
    return sort_waste(found)


def describe_remedy(waste: Waste, job: str) -> str:
    """Return the command that avoids the cost, or the change to make in the task file before the
    next run. `job` contains the arguments that name the job.
    """
    offer = waste.offer
    match waste.kind:
        case WasteKind.IDLE_GPU:
            return _end_idle(waste, job)
        case WasteKind.UNUSED_MEMORY if offer is not None:
            return f"resources: {{instance: {offer.instance_type}}}"
        case WasteKind.STARVED:
            return (
                f"add CPUs or data loaders, because the GPU waits for data (`cavvy profile {job}` "
                "shows more)"
            )
        case WasteKind.LARGE_GPU if offer is not None:
            return f"cavvy run TASK.YAML --gpu {offer.accelerator}:{offer.accelerators_text}"
        case WasteKind.SPOT:
            return "cavvy run TASK.YAML --spot"
        case WasteKind.CHECKPOINTS if waste.every is not None:
            return f"checkpoint: {{every: {format_duration(waste.every)}}}"
        case WasteKind.KEPT if waste.machine is not None and waste.machine.idle_now:
            return f"cavvy machines stop {job}"
        case WasteKind.KEPT if waste.machine is not None:
            return f"cavvy machines keep {job} 10m"
        case WasteKind.KEPT:
            return "cavvy run TASK.YAML --keep 10m"
        case WasteKind.VOLUME if waste.volume is not None and waste.volume.provider == "aws":
            volume = waste.volume
            return f"aws ec2 delete-volume --region {volume.region} --volume-id {volume.id}"
        case _:
            return "cavvy nodes gc --remove"


def _end_idle(waste: Waste, job: str) -> str:
    if waste.ranks:
        told = ", ".join(map(str, waste.ranks))
        return f"reduce `nodes`, because rank {told} does not use its GPUs (cavvy status {job})"
    return f"cavvy stop {job}" if waste.unfinished else "limits: {idle: {gpu: 5%, for: 30m}}"


@click.group("reserve", cls=CommandGroup)
def reserve_command() -> None:
    """Find commitments to clouds that would save money. Cavvy does not buy commitments."""


@reserve_command.command("advise")
@any_project_option
@since_option
@output_option
def advise_commitments(project: str | None, since: datetime | None, output: str) -> None:
    """Show which commitments would have been cheaper than the on-demand machines that were used.

    The command reads the use of machines from the ledger, hour by hour, from --since (by default 30
    days ago) until now. The prices come from the catalog.
    """
    from cavvy.cli.reach.usage import list_offers_of, list_used_machines, read_charges
    from cavvy.planner.reservations import advise_reservations

    until = datetime.now(UTC)
    since = since or until - _PERIOD
    with session() as client:
        used = list_used_machines(read_charges(client, project, since, until))
    offers = list_offers_of(machine.kind.provider for machine in used)
    found = advise_reservations(used, offers, since, until)
    show = formatting.make_money_format(each.monthly.micros for each in found)
    columns = [
        TableColumn("provider"),
        TableColumn("region"),
        TableColumn("instance"),
        TableColumn("machines"),
        TableColumn("months"),
        TableColumn("used", show=lambda part: f"{part:.0%}", right=True),
        TableColumn("on_demand_micros_per_hour", "ON DEMAND", drop=1),
        TableColumn("rate_micros_per_hour", "COMMITTED"),
        TableColumn("monthly_micros", "SAVES A MONTH", show),
    ]
    rows = [
        (
            each.offer.provider,
            each.offer.region,
            each.offer.instance_type,
            each.machines,
            each.offer.term_months,
            round(each.used, 3),
            each.on_demand.micros_per_hour,
            each.offer.rate.micros_per_hour,
            each.monthly.micros,
        )
        for each in found
    ]
    rows_out(columns, rows, output, empty="no commitment would have saved money")
