"""`cavvy import`: rewrites a script that uses modal for Cavvy."""

import sys
from pathlib import Path

import click

from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.layout import terminal_width, wrap_message
from cavvy.cli.view.output_file import replace_option, write_draft


@click.command("import")
@click.argument("file", metavar="FILE.py", type=click.Path(dir_okay=False))
@click.option(
    "--to",
    "target",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Write to FILE instead of standard output.",
)
@replace_option
def command(file: str, target: str | None, replaces: bool) -> None:
    """Rewrite a Python script that uses modal for Cavvy.

    What has a counterpart is rewritten; the rest stays as it is. A note for each line that behaves
    otherwise or that you have to change is printed on standard error. The script is not run. The
    exit code is 3 if there is something to change. Before another text in FILE is replaced, you are
    asked.
    """
    from cavvy.capabilities.functions.modal_script import (
        NoModalScript,
        count_open,
        rewrite_script,
        say_notes,
    )

    try:
        made, notes = rewrite_script(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailure(f"{file} cannot be read: {error}", exit_code=2) from error
    except NoModalScript as error:
        hint = "task files of other tools are translated by `cavvy convert`"
        raise CommandFailure(f"{file}: {error}", hint, exit_code=2) from error
    width = terminal_width(sys.stderr)
    for line in say_notes(file, notes):
        click.echo(wrap_message(line, width), err=True)
    if target is None:
        click.echo(made, nl=not made.endswith("\n"))
    else:
        write_draft(Path(target), made, replaces=replaces)
        left = count_open(notes)
        rest = f"; {left} to change before it runs" if left else f"; try it: cavvy run {target}"
        click.echo(f"wrote {target}{rest}", err=True)
    if count_open(notes):
        raise SystemExit(3)
