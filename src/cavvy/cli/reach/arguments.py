"""Arguments and options that several commands share: names with shell completion, times, and
training scripts.

Options and cells for the limits of tokens, which `cavvy server token` and `cavvy server trust`
share.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import NameArgument
from cavvy.cli.view.numbers import Made

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from cavvy.client import ApiClient
    from cavvy.client.maintenance_wire import HostView
    from cavvy.client.pool_wire import PoolView
    from cavvy.client.service_wire import NamedService
    from cavvy.client.wire import JobListing, MachineView

    _Named = HostView | JobListing | MachineView | PoolView | NamedService

replace_option = click.option(
    "--replace",
    is_flag=True,
    help="Also write into a folder with files of yours, and replace them, without a question.",
)


_TIMEOUT_S = 2.0  # maximum seconds that completion waits for the server

CommandFunction = TypeVar("CommandFunction", bound=Callable[..., Any])

scopes_option = click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(["view", "run", "spending", "operate", "audit", "manage"]),
    help="Permit only this kind of action; repeatable. The default is all actions that the "
    "account may take.",
)
within_option = click.option(
    "-p", "--project", help="Permit only this project and its subprojects."
)


def complete_jobs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return names of the project's newest jobs and arrays and of its services, or none if no
    server runs. The jobs of arrays are listed once their dot was written."""
    arrays = "." not in incomplete

    def read(client: "ApiClient", project: str) -> "Sequence[_Named]":
        from cavvy.client import ApiError
        from cavvy.client.service_wire import list_named_services

        found: list[_Named] = [*client.jobs(project, limit=200, arrays=arrays).jobs]
        if arrays:
            with suppress(ApiError):  # the account may see only jobs
                found += list_named_services(client, project)
        return found

    return complete(ctx, read, incomplete)


def complete_machines(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return names of the project's machines, or none if no server runs."""
    return complete(ctx, lambda client, project: client.machines(project), incomplete)


def complete_pools(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return names of the project's pools, or none if no server runs."""
    from cavvy.client.pool_wire import list_pools

    return complete(ctx, list_pools, incomplete)


def complete_hosts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return names of own hosts, or none if no server runs."""
    from cavvy.client.maintenance_wire import list_hosts

    return complete(ctx, lambda client, project: list_hosts(client), incomplete)


def complete(
    ctx: click.Context,
    list_named: "Callable[[ApiClient, str], Sequence[_Named]]",
    incomplete: str,
) -> list[str]:
    from cavvy.cli.reach.session import default_project
    from cavvy.client import ApiError, connect

    try:
        project = ctx.params.get("project") or default_project()
        with connect(start=False, timeout_s=_TIMEOUT_S) as client:
            found = list_named(client, str(project))
    except (ApiError, CommandFailure, OSError):
        return []
    return _matching((each.name for each in found), incomplete)


def complete_providers(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return names of the providers in the catalog and of the providers that can be configured."""
    from cavvy.providers.registry import list_known
    from cavvy.store.snapshot import CatalogSnapshot

    with CatalogSnapshot.open() as snapshot:
        listed = {provider.name for provider in snapshot.providers()}
    return _matching(listed | set(list_known()), incomplete)


def complete_gpus(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return names of accelerators."""
    from cavvy.catalog.accelerators import list_accelerators

    return _matching((each.name for each in list_accelerators()), incomplete)


def complete_regions(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return names of regions in the catalog."""
    from cavvy.store.snapshot import CatalogSnapshot

    with CatalogSnapshot.open() as snapshot:
        return _matching({region for _, region, _ in snapshot.regions()}, incomplete)


def complete_copies(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> "list[CompletionItem]":
    """Return local files, and names of jobs followed by the colon that begins a path on a node."""
    from click.shell_completion import CompletionItem

    jobs = (f"{name}:" for name in complete_jobs(ctx, param, incomplete))
    return [*map(CompletionItem, jobs), CompletionItem(incomplete, type="file")]


def _matching(names: Iterable[str], incomplete: str) -> list[str]:
    begin = incomplete.lower()
    return sorted(name for name in names if name.lower().startswith(begin))


JOBS_LISTING = "`cavvy ps` lists jobs"


def name_argument(listing: str, complete: Callable[..., list[str]]) -> Callable[[Made], Made]:
    return click.argument("name", cls=NameArgument, listing=listing, shell_complete=complete)


job_argument = name_argument(JOBS_LISTING, complete_jobs)


# for commands that find the newest job of the folder's task if no name is given
any_job_argument = click.argument("name", required=False, shell_complete=complete_jobs)


machine_argument = name_argument("`cavvy machines` lists machines", complete_machines)


pool_argument = name_argument("`cavvy pool list` lists pools", complete_pools)


def _read_time(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | None:
    from cavvy.domain.units import UnitError, parse_duration

    if value is None:
        return None
    with suppress(UnitError, OverflowError):
        return datetime.now(UTC) - parse_duration(value)
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(value).astimezone(UTC)
    raise click.BadParameter(f"expected a duration such as 10m or 7d, or a date, not {value!r}")


since_option = click.option(
    "--since",
    metavar="TIME",
    callback=_read_time,
    help="Include only the time after TIME: a duration before now such as 10m or 7d, or a local "
    "date and time.",
)


until_option = click.option(
    "--until",
    metavar="TIME",
    callback=_read_time,
    help="Include only the time before TIME. The format of TIME is the same as for --since.",
)


providers_option = click.option(
    "--provider",
    "providers",
    metavar="NAME",
    multiple=True,
    shell_complete=complete_providers,
    help="Use only this provider; repeatable.",
)


# for commands that never ask, but are used beside others that do
needless_yes_option = click.option(
    "-y",
    "--yes",
    is_flag=True,
    expose_value=False,
    help="Has no effect, because this command never asks for confirmation.",
)


def show_scopes(scopes: object) -> str:
    return ", ".join(map(str, scopes)) if isinstance(scopes, list) and scopes else "all"


def read_seconds(text: str, option: str, example: str) -> int:
    """Raises CommandFailure."""
    from cavvy.domain.units import UnitError, parse_duration

    try:
        return int(parse_duration(text).total_seconds())
    except UnitError as error:
        raise CommandFailure(f"{option}: {error}", f"write {example}", 2) from error
