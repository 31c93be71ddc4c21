"""`cavvy exec`: runs a command in the environment of a running job."""

import sys

import click

from cavvy.cli.reach.arguments import job_argument
from cavvy.cli.reach.session import project_option, rank_option, session
from cavvy.cli.reach.tunnel import read_target


@click.command("exec", context_settings={"ignore_unknown_options": True})
@job_argument
@click.argument(
    "arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND..."
)
@project_option
@rank_option
def command(name: str, arguments: tuple[str, ...], project: str, rank: int) -> None:
    """Run a command in the folder and environment of a running job, while the job continues.
    `cavvy exec` exits with the command's exit code.

    cavvy exec digits -- nvidia-smi

    NAME:RANK selects a node; the default is the first node. Use `cavvy ssh` for a command that
    needs input or a terminal.
    """
    exit_code = 0
    name, wanted = read_target(name)
    rank = rank or wanted
    with session() as client:
        for chunk in client.exec(project, name, list(arguments), rank=rank):
            sys.stdout.buffer.write(chunk.data)
            sys.stdout.buffer.flush()
            if chunk.exit_code is not None:
                exit_code = chunk.exit_code
    sys.exit(exit_code)
