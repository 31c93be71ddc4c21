"""`cavvy key`: manages the keys that clients use to call a service."""

import click

from cavvy.cli.reach.arguments import read_seconds, service_argument
from cavvy.cli.reach.session import project_option, session
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.numbers import NumberRange, count_option, positive_option, read_usd
from cavvy.cli.view.output import TableColumn, output_option, rows_out


@click.group("key", cls=CommandGroup)
def command() -> None:
    """Create, list and revoke keys for calls to a service.

    Requests to a service whose file says `keys: true` need a key, as `Authorization: Bearer KEY` or
    `X-API-Key: KEY`. The service's program does not get the key.
    """


@command.command("create")
@service_argument
@project_option
@click.option("--label", default="", help="A note that shows what the key is for.")
@positive_option("--rate", help="The maximum number of requests per second with this key.")
@count_option(
    "--burst", help="The number of requests that --rate permits at the same time; the default is 1."
)
@count_option(
    "--tokens-per-minute",
    help="The maximum number of tokens of language models per minute: of prompts and completions.",
)
@click.option(
    "--usd-per-day",
    callback=read_usd,
    metavar="USD",
    help="The maximum cost in dollars of the key's requests on a day in UTC.",
)
@click.option(
    "--weight",
    type=NumberRange(min=0.01, max=100),
    default=1.0,
    help="While requests for a language model wait, keys of one priority are served tokens in "
    "proportion to their weights; the default is 1.",
)
@click.option(
    "--priority",
    type=click.Choice(["low", "normal", "high"]),
    default="normal",
    help="While requests wait, those of keys with a higher priority start first, and those with a "
    "lower one are refused first.",
)
@click.option(
    "--residency",
    metavar="PLACE",
    help="Requests with this key must stay in PLACE, which is an area such as eu or a country "
    "such as de.",
)
@click.option("--expires", default="90d", help="How long the key is valid, or `never`.")
def create(
    name: str,
    project: str,
    label: str,
    rate: float | None,
    burst: int | None,
    tokens_per_minute: int | None,
    usd_per_day: int | None,
    weight: float,
    priority: str,
    residency: str | None,
    expires: str,
) -> None:
    """Create a key and print it. The key cannot be shown again."""
    from cavvy.client.service_wire import ServiceKeyAsk, create_service_key

    ask = ServiceKeyAsk(
        label=label,
        per_s=rate,
        burst=burst or 1,
        tokens_per_min=tokens_per_minute,
        micros_per_day=usd_per_day,
        weight=weight,
        priority=priority,
        residency=residency,
        expires_s=None
        if expires == "never"
        else read_seconds(expires, "--expires", "30d, 12h or never"),
    )
    with session() as client:
        made = create_service_key(client, project, name, ask)
    click.echo(
        f"key {made.view.id} of {name}; save it, because it cannot be shown again:", err=True
    )
    click.echo(made.key)


@command.command("list")
@service_argument
@project_option
@output_option
def list_keys(name: str, project: str, output: str) -> None:
    """List the keys of a service."""
    from cavvy.cli.view import formatting
    from cavvy.client.service_wire import list_service_keys

    with session() as client:
        rows = list_service_keys(client, project, name)

    def uses(name: str) -> bool:
        return any(getattr(each, name) is not None for each in rows)

    columns = [
        TableColumn("id"),
        TableColumn("label", wrap=True),
        TableColumn("user", drop=3),
        TableColumn("per_s", "REQ/S", drop=4),
        TableColumn("burst", hidden=True),
        TableColumn(
            "tokens_per_min", "TOKENS/MIN", "{:,}".format, hidden=not uses("tokens_per_min")
        ),
        TableColumn(
            "micros_per_day", "A DAY", formatting.show_money, hidden=not uses("micros_per_day")
        ),
        TableColumn("weight", hidden=all(each.weight == 1 for each in rows)),
        TableColumn("priority", hidden=all(each.priority == "normal" for each in rows)),
        TableColumn("residency", "STAYS IN", drop=3),
        TableColumn("created_at", "CREATED", formatting.show_ago, drop=3),
        TableColumn("used_at", "USED", formatting.show_ago, drop=2),
        TableColumn("expires_at", "EXPIRES", formatting.show_time, drop=1),
    ]
    empty = f"no keys; `cavvy key create {name}` creates a key"
    rows_out(columns, rows, output, empty=empty)


@command.command("revoke")
@service_argument
@click.argument("key_id", metavar="ID")
@project_option
def revoke(name: str, key_id: str, project: str) -> None:
    """Revoke a key immediately."""
    from cavvy.client.service_wire import revoke_service_key

    with session() as client:
        revoke_service_key(client, project, name, key_id)
    click.echo(f"key {key_id} of {name} is revoked")
