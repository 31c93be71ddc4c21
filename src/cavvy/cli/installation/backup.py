"""`cavvy server backup`: writes an archive of the server."""

import click


@click.command("backup")
@click.argument("file", metavar="FILE")
def command(file: str) -> None:
    """Write an archive of the database, keys, logs, uploaded folders and checkpoints to FILE, or to
    standard output if FILE is -.

    The server need not stop. Anyone with the archive can read all secrets of the server, so store
    it in a safe place. The archive contains neither settings nor cloud credentials.
    """
    import sys

    from cavvy import settings
    from cavvy.cli.installation.setup import folder_failures
    from cavvy.cli.reach.session import ended_by_signals
    from cavvy.cli.view.new_file import new_file
    from cavvy.domain.units import format_count
    from cavvy.server.backup import back_up
    from cavvy.server.state_dir import StateDir

    with folder_failures(), ended_by_signals():
        configured = settings.load()
        home = StateDir(str(configured.home))
        if file == "-":
            manifest = back_up(home, configured, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        else:
            with new_file(file) as out:
                manifest = back_up(home, configured, out)
    rows = sum(each.rows for each in manifest.tables)
    click.echo(
        f"backed up {format_count(rows, 'row')} and {format_count(len(manifest.files), 'file')} of "
        f"{manifest.folder}",
        err=True,
    )
    if file != "-":
        click.echo(f"to check the archive: cavvy server restore --dry-run {file}", err=True)
