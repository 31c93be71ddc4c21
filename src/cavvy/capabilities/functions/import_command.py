"""`cavvy import`: rewrites a script that uses modal for Cavvy."""

from pathlib import Path

import click

from cavvy.cli.view.failure import CommandFailure


@click.command("import")
@click.argument("file", metavar="FILE.py", type=click.Path(dir_okay=False))
@click.option(
    "--to",
    "target",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write to FILE instead of standard output.",
)
def command(file: str, target: str | None) -> None:
    """Rewrite a Python script that uses modal for Cavvy.

    What has a counterpart is rewritten; the rest stays as it is. A note for each line that behaves
    otherwise or that you have to change is printed on standard error. The script is not run. The
    exit code is 3 if there is something to change.
    """
    from cavvy.capabilities.functions.modal_script import (
        NoModalScript,
        count_open,
        rewrite_script,
        say_notes,
    )
    from cavvy.cli.view.output_file import write_text

    try:
        made, notes = rewrite_script(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailure(f"{file} cannot be read: {error}", exit_code=2) from error
    except NoModalScript as error:
        hint = "task files of other tools are translated by `cavvy convert`"
        raise CommandFailure(f"{file}: {error}", hint, exit_code=2) from error
    for line in say_notes(file, notes):
        click.echo(line, err=True)
    if target is None:
        click.echo(made, nl=not made.endswith("\n"))
    else:
        write_text(Path(target), made)
        click.echo(f"wrote {target}; try it: cavvy run {target}", err=True)
    if count_open(notes):
        raise SystemExit(3)
