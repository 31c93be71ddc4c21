"""`cavvy ssh`: opens a shell or runs a command on a job's node. The command also connects plain
`ssh`, `scp`, `sftp` and editors to the node.
"""

import sys

import click

from cavvy.cli.reach.arguments import complete_jobs
from cavvy.cli.reach.session import project_option
from cavvy.cli.reach.tunnel import read_target, with_tunnel
from cavvy.cli.view.failure import CommandFailure

_UNREACHABLE = 255  # the exit code of `ssh` if it cannot reach the machine


@click.command("ssh", context_settings={"ignore_unknown_options": True})
@click.argument("target", required=False, metavar="[NAME[:RANK]]", shell_complete=complete_jobs)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[--] [COMMAND...]")
@project_option
@click.option("-t", "--tty", is_flag=True, help="Allocate a terminal for the command.")
@click.option(
    "--setup",
    is_flag=True,
    help="Configure plain `ssh NAME` and editors for running jobs.",
)
@click.option(
    "--stdio", is_flag=True, help="Speak SSH over standard input and output, for an SSH client."
)
def command(
    target: str | None,
    arguments: tuple[str, ...],
    project: str,
    tty: bool,
    setup: bool,
    stdio: bool,
) -> None:
    """Open a shell on a job's node, or run a command there. Shells and commands start in the folder
    and environment of the job's work.

    The connection goes through the control plane, so the node needs no public address. `cavvy ssh
    --setup` writes ~/.ssh/config.d/cavvy, so that plain `ssh NAME`, scp, sftp, rsync and editors
    work as with any host.
    """
    if setup:
        from cavvy.cli.reach.ssh_config import write_config

        for message in write_config():
            click.echo(message)
        return
    if target is None:
        raise CommandFailure(
            "expected a job", "use `cavvy ssh NAME`, or `cavvy ssh --setup`", exit_code=2
        )
    if stdio:
        _speak(project, target)
        return
    from cavvy.cli.reach.ssh_config import refresh_config
    from cavvy.cli.reach.tunnel import run_here

    refresh_config()
    line = " ".join(arguments) or None
    terminal = (
        sys.stdin.isatty() and sys.stdout.isatty() if line is None else tty and sys.stdin.isatty()
    )
    code = with_tunnel(
        project,
        target,
        lambda tunnel: run_here(tunnel, argv=None, line=line, terminal=terminal),
        lost_code=_UNREACHABLE,
    )
    sys.exit(code)


def _speak(project: str, target: str) -> None:
    from cavvy.cli.reach.sshd import serve_stdio

    read_target(target)
    with_tunnel(project, target, serve_stdio, lost_code=_UNREACHABLE)
