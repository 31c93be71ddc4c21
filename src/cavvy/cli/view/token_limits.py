"""Options and cells for the limits of tokens, which `cavvy token` and `cavvy trust` share."""

import click

from cavvy.cli.view.failure import CommandFailure

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


def show_scopes(scopes: object) -> str:
    return ", ".join(map(str, scopes)) if isinstance(scopes, list) and scopes else "all"


def read_seconds(text: str, option: str, example: str) -> int:
    """Raises CommandFailure."""
    from cavvy.domain.units import UnitError, parse_duration

    try:
        return int(parse_duration(text).total_seconds())
    except UnitError as error:
        raise CommandFailure(f"{option}: {error}", f"write {example}", 2) from error
