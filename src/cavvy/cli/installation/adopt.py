"""`cavvy server adopt`: moves the jobs of an embedded server to PostgreSQL."""

import os

import click

# Readable names of some tables; rows of all other tables are counted as "other rows".
_SHOWN = {
    "jobs": "jobs",
    "events": "events",
    "charges": "charges",
    "secrets": "secrets",
    "accounts": "accounts",
    "audit_log": "audit records",
}


@click.command("adopt")
@click.option("--database", metavar="URL", help="The empty PostgreSQL database for the jobs.")
@click.option(
    "--from",
    "source",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False),
    help="The state folder of the server to be moved. Its files are copied to server.files, or "
    "else to the current state folder.",
)
def command(database: str | None, source: str | None) -> None:
    """Move jobs, history, secrets and accounts from the SQLite file of an embedded server to a
    PostgreSQL database.

    Stop the server first; running jobs continue. The command compares all rows before it ends. If
    the command is interrupted, run the command again.
    """
    from cavvy import settings
    from cavvy.cli.installation.setup import folder_failures
    from cavvy.domain.units import format_count
    from cavvy.server.adopt import MOVED, adopt
    from cavvy.server.state_dir import StateDir

    with folder_failures():
        configured = settings.load()
        url = database or configured.text("server.database")
        if not url:
            raise click.UsageError("give the database with --database URL")
        home = StateDir(str(configured.home))
        folder = StateDir(os.path.abspath(source)) if source else None
        if folder is not None and os.path.realpath(folder.path) == os.path.realpath(home.path):
            folder = None
        done = adopt(home, configured, url, folder)
    rows = {each.table: each.rows for each in done.tables}
    shown = [f"{rows.pop(table)} {text}" for table, text in _SHOWN.items()]
    copied = f", and copied {format_count(done.files, 'file')}" if done.files else ""
    click.echo(
        f"{'had moved' if done.again else 'moved'} {', '.join(shown)} and {sum(rows.values())} "
        f"other rows to PostgreSQL{copied}; compared every row with the original"
    )
    click.echo(f"{(folder or home).file(MOVED)} is the former database, which is no longer used")
    click.echo("start the server: cavvy server start")
