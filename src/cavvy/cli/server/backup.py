"""`cavvy server adopt`, `backup` and `restore`: move the jobs of an embedded server to PostgreSQL,
write an archive of a server, and restore it and compare its database with the nodes that the
providers report.
"""

import os
from typing import TYPE_CHECKING

import click

from cavvy.cli.view.output import TableColumn, output_option, rows_out
from cavvy.named_files import open_named

if TYPE_CHECKING:
    from cavvy.control.decide.restored import JobNumber
    from cavvy.server.restore import RestoreReport
    from cavvy.server.state_dir import StateDir
    from cavvy.settings import Settings


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
def adopt_command(database: str | None, source: str | None) -> None:
    """Move jobs, history, secrets and accounts from the SQLite file of an embedded server to a
    PostgreSQL database.

    Stop the server first; running jobs continue. The command compares all rows before it ends. If
    the command is interrupted, run the command again.
    """
    from cavvy import settings
    from cavvy.cli.server.setup import folder_failures
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


@click.command("backup")
@click.argument("file", metavar="FILE")
def backup_command(file: str) -> None:
    """Write an archive of the database, keys, logs, uploaded folders and checkpoints to FILE, or to
    standard output if FILE is -.

    The server need not stop. Anyone with the archive can read all secrets of the server, so store
    it in a safe place. The archive contains neither settings nor cloud credentials.
    """
    import sys

    from cavvy import settings
    from cavvy.cli.reach.session import ended_by_signals
    from cavvy.cli.server.setup import folder_failures
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


_COLUMNS = (
    TableColumn("finding", wrap=True),
    TableColumn("provider"),
    TableColumn("gang", drop=1),
    TableColumn("nodes"),
    TableColumn("rate_micros_per_hour", "PRICE/H"),
    TableColumn("job", wrap=True),
)


@click.command("restore")
@click.argument("archive", required=False)
@click.option(
    "--database",
    metavar="URL",
    help="Restore into this empty PostgreSQL database instead of SQLite.",
)
@click.option("--dry-run", is_flag=True, help="Check and compare only; change nothing.")
@click.option(
    "--end-access/--keep-access",
    default=None,
    help="End all restored tokens of accounts and keys of services, because some may have been "
    "revoked since the backup; or keep them. Without this option, the command asks in a terminal, "
    "and otherwise keeps them.",
)
@output_option
def restore_command(
    archive: str | None,
    database: str | None,
    dry_run: bool,
    end_access: bool | None,
    output: str,
) -> None:
    """Restore a server into a new state folder, and compare its database with the nodes that the
    providers report. ARCHIVE is a file of `cavvy server backup`, or - for standard input.

    Without ARCHIVE, the command only compares the database with the providers. If you have restored
    the database with its own tools, for example to a point in time, run the comparison before you
    start the server.

    Make sure that the old server no longer runs. Jobs whose nodes no longer exist are run again,
    as after a lost node. Nodes that are not in the database keep running, and cost money, until
    `cavvy nodes gc --remove` removes them.

    Tokens and keys that were revoked since the backup are valid again, and accounts that were
    disabled or removed since the backup can be used again. The command writes to the audit log what
    came back. ID tokens from before the restore cannot sign in.
    """
    from cavvy import settings
    from cavvy.cli.reach.session import ended_by_signals
    from cavvy.cli.server.setup import folder_failures
    from cavvy.server.restore import end_restored_access
    from cavvy.server.state_dir import StateDir

    with folder_failures(), ended_by_signals():
        configured = settings.load()
        home = StateDir(str(configured.home))
        report = _restore(
            home, configured, archive, database, dry_run=dry_run, end_access=end_access or False
        )
        _show(report, output)
        ended = report.access_ended
        if end_access is None and not dry_run and archive != "-" and _may_ask(report):
            ended = click.confirm("End all these tokens and keys?", default=False, err=True)
            if ended:
                end_restored_access(home, configured)
    if dry_run:
        click.echo("nothing was changed", err=True)
        return
    _explain_end(report, ended=ended)
    if archive is not None and output == "table":
        click.echo("restored; start the server: cavvy server start", err=True)


def _restore(
    home: "StateDir",
    configured: "Settings",
    archive: str | None,
    database: str | None,
    *,
    dry_run: bool,
    end_access: bool,
) -> "RestoreReport":
    """Restore the archive, and compare; without an archive, only compare."""
    import sys
    from contextlib import nullcontext

    from cavvy.server.restore import check_restored, restore

    if archive is None:
        if database:
            raise click.UsageError(
                "--database needs an ARCHIVE; without ARCHIVE, the settings name the database"
            )
        return check_restored(home, configured, dry_run=dry_run, end_access=end_access)
    url = database or configured.text("server.database") or None
    with nullcontext(sys.stdin.buffer) if archive == "-" else open_named(archive) as file:
        return restore(home, configured, file, url, dry_run=dry_run, end_access=end_access)


def _show(report: "RestoreReport", output: str) -> None:
    rows_out(
        _COLUMNS,
        _rows(report),
        output,
        empty="the providers report exactly the nodes in the database",
    )
    if output == "table":
        _explain(report)
    _explain_access(report)


def _may_ask(report: "RestoreReport") -> bool:
    import sys

    some = report.access.tokens or report.access.keys
    return bool(some) and sys.stdin.isatty() and sys.stderr.isatty()


def _explain_access(report: "RestoreReport") -> None:
    """Say what comes back with the database. What was revoked since the backup is not known."""
    access = report.access
    made = f"of {report.made_at:%Y-%m-%d %H:%M} UTC " if report.made_at else ""
    counts = [
        _count(access.tokens, "valid token"),
        _count(access.keys, "valid key", "of services"),
        _count(access.accounts, "account", f"({access.disabled} disabled)"),
        _count(access.roles, "role"),
        _count(access.trusts, "trust", "in issuers of ID tokens"),
    ]
    click.echo(f"the database {made}contains {', '.join(counts)}", err=True)
    click.echo(
        "it does not know what was revoked, disabled or removed since then, so all of that counts "
        "again. ID tokens that were issued before the restore are refused",
        err=True,
    )


def _explain_end(report: "RestoreReport", *, ended: bool) -> None:
    access = report.access
    if ended:
        click.echo(
            "all these tokens and keys are ended. People with a trust sign in again; create other "
            "tokens with `cavvy server token create` and keys with `cavvy services key create`",
            err=True,
        )
    elif access.tokens or access.keys:
        click.echo(
            "the tokens and keys are kept. To end all of them, run `cavvy server restore "
            "--end-access` while the server is stopped; to end some, see `cavvy services key "
            "list`, and `token list`, `user list`, `role list` and `trust list` of `cavvy server`",
            err=True,
        )


def _count(number: int, one: str, more: str = "") -> str:
    return f"{number} {one}{'' if number == 1 else 's'} {more}".rstrip()


def _rows(report: "RestoreReport") -> list[tuple[object, ...]]:
    found = report.comparison
    unknown = [
        (
            "not in the database",
            each.provider,
            each.gang,
            each.nodes,
            each.rate and each.rate.micros_per_hour,
            _job(each.attempt),
        )
        for each in found.unknown
    ]
    lost = [
        (
            "still runs here" if each.gang in report.elsewhere else "gone",
            each.provider,
            each.gang,
            0,
            None,
            _job(each.attempt),
        )
        for each in found.lost
    ]
    silent = [
        (f"no answer from {each}", each.provider, None, None, None, None) for each in report.silent
    ]
    return [*unknown, *lost, *silent]


def _job(attempt: "JobNumber | None") -> str | None:
    if attempt is None:
        return None
    return f"{attempt.job} (project {attempt.project}, attempt {attempt.number})"


def _explain(report: "RestoreReport") -> None:
    found = report.comparison
    click.echo(f"{found.found} gangs are both in the database and at their providers", err=True)
    if found.unknown:
        click.echo(
            "nodes that are not in the database keep running; once the server runs, "
            "`cavvy nodes gc` lists them and `cavvy nodes gc --remove` removes them",
            err=True,
        )
    if found.lost:
        click.echo(
            "the nodes of some jobs no longer exist. When the server starts, it runs these jobs "
            "again. It does not run a job again if its task forbids a second run, or if you have "
            "stopped the job",
            err=True,
        )
    if agents := [str(pid) for pids in report.elsewhere.values() for pid in pids]:
        click.echo(
            "some jobs still run on this machine for the old state folder. End them before you "
            f"restore: kill {' '.join(agents)}",
            err=True,
        )
    if report.silent:
        click.echo("run this command again with --dry-run when these providers answer", err=True)
