"""`cavvy server audit`: reads, exports and checks the audit log of the server."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cavvy.cli.reach.arguments import since_option
from cavvy.cli.reach.session import session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.numbers import count_option
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.client.account_wire import AuditLogRow
    from cavvy.domain.audit import AuditRecord, ChainHead, SealedRecord

_PROGRESS = 10_000  # records after which progress is shown


@click.group("audit", cls=CommandGroup)
def command() -> None:
    """Read the log of all changes and refusals.

    The server appends a record for each request that changes something and for each refused
    request. Each record contains the hash of the record before it, so a change of the log can be
    detected. The command needs the role auditor or admin.
    """


@command.command("list")
@click.option("-p", "--project", help="Show only this project.")
@click.option("--account", help="Show only requests of this account.")
@click.option("--refused", is_flag=True, help="Show only refused requests.")
@since_option
@count_option("-n", "--limit", most=1000, default=50, help="The number of records.")
@output_option
def list_records(
    project: str | None,
    account: str | None,
    refused: bool,
    since: datetime | None,
    limit: int,
    output: str,
) -> None:
    """Show the most recent records, the newest last."""
    import json

    from cavvy.client.account_wire import read_newest

    with session() as client:
        found = read_newest(
            client,
            limit,
            project=project,
            account=account,
            outcome="refused" if refused else None,
            since=None if since is None else since.isoformat(),
        )
    records = [json.loads(row.text) for row in found]
    if output == "json":
        from cavvy.cli.view.output import json_out

        json_out(records)
        return
    columns = [
        TableColumn("number", "#"),
        TableColumn("at", "TIME"),
        TableColumn("account"),
        TableColumn("address", "FROM", drop=2),
        TableColumn("outcome", drop=1),
        TableColumn("action", wrap=True),
        TableColumn("details", wrap=True),
    ]
    rows = [
        (
            record["number"],
            datetime.fromisoformat(record["at"]),
            _show_account(record),
            record["address"] or "-",
            record["outcome"],
            record["action"] or "-",
            _show_details(record),
        )
        for record in records
    ]
    rows_out(columns, rows, output, empty="no records")


@command.command("export")
@click.option("-o", "--output", "file", metavar="FILE", default="-", help="The file to write.")
def export(file: str) -> None:
    """Write all records as lines of JSON, for archives and for `cavvy server audit verify FILE`."""
    from msgspec.json import encode

    from cavvy.cli.view.output_file import check_output, open_output
    from cavvy.client.account_wire import read_all
    from cavvy.domain.units import format_count

    count = 0
    opened = nullcontext(sys.stdout.buffer) if file == "-" else open_output(Path(file))
    if file != "-":
        check_output(Path(file))  # before a server is started
    with session() as client, opened as out:
        for row in read_all(client):
            out.write(encode(row) + b"\n")
            count += 1
            if count % _PROGRESS == 0:
                click.echo(f"{count:,} records", err=True)
    if file != "-":
        click.echo(f"wrote {format_count(count, 'record')} to {file}", err=True)


@command.command("verify")
@click.argument("file", required=False)
@click.option(
    "--head",
    "kept",
    metavar="NUMBER:HASH",
    multiple=True,
    help="The last line of an earlier check; repeatable.",
)
def verify(file: str | None, kept: tuple[str, ...]) -> None:
    """Check that no record was changed, removed or inserted, on the server or in an exported FILE.
    The exit code is 1 if the check fails.

    The last line of the output states where the log ends. Store the last line outside of the
    server. A later check with --head LINE proves that the log still contains all records up to the
    record in LINE.
    """
    from cavvy.client.account_wire import read_all
    from cavvy.domain.audit import read_head
    from cavvy.domain.units import format_count

    try:
        heads = [read_head(text) for text in kept]
    except ValueError as error:
        raise CommandFailure(f"--head: {error}", exit_code=2) from error
    if file is not None:
        count, end = _check(_read_file(file), heads)
    else:
        with session() as client:
            count, end = _check(map(_seal, read_all(client)), heads)
    click.echo(f"{format_count(count, 'record')} {'is' if count == 1 else 'are'} intact", err=True)
    click.echo(str(end))


def _check(records: "Iterable[SealedRecord]", heads: "list[ChainHead]") -> "tuple[int, ChainHead]":
    """Check that the log's hash chain is intact and contains the records `heads`. Returns the
    number of records and the head of the log's hash chain. Raises CommandFailure.
    """
    from cavvy.domain.audit import CUT, EMPTY, ChainBroken, check_chain, read_head

    end, expected = EMPTY, {head.number: head for head in heads}
    first = 0  # the number of the first record
    try:
        for record, end in check_chain(records):
            first = first or end.number
            if record.action == CUT and (gone := _note_cut(record)) in map(str, heads):
                expected.pop(read_head(gone).number, None)  # the last of the removed records
            head = expected.pop(end.number, None)
            if head is not None and head != end:
                raise ChainBroken(end.number, f"the record's hash is {end.hash}, not {head.hash}")
            if end.number % _PROGRESS == 0:
                click.echo(f"{end.number:,} records", err=True)
    except ChainBroken as error:
        raise CommandFailure(
            f"the log is not intact: {error}",
            "compare the log with an export or a backup that is older than the change",
        ) from error
    missing = [head for head in expected.values() if head.number > 0]
    if old := [head for head in missing if head.number < first]:
        raise CommandFailure(
            f"record {old[0].number} was removed because of its age, so --head cannot be checked",
            "check an export that contains the record: cavvy server audit verify FILE --head LINE",
        )
    if missing:
        raise CommandFailure(
            f"the log ends at record {end.number}, but an earlier check found record "
            f"{missing[0].number}",
            "compare the log with an export or a backup that is older than the change",
        )
    return (end.number - first + 1 if first else 0), end


def _note_cut(record: "AuditRecord") -> str:
    """Tell which older records were removed, and return the last of them as NUMBER:HASH."""
    told = record.after or {}
    gone = str(told.get("removed_to", ""))
    number = gone.partition(":")[0]
    click.echo(
        f"the records up to {number} were removed on {record.at:%Y-%m-%d}, because they were older "
        f"than {told.get('days')} days ({told.get('rule')})",
        err=True,
    )
    return gone


def _seal(row: "AuditLogRow") -> "SealedRecord":
    from msgspec import convert
    from msgspec.structs import asdict

    from cavvy.domain.audit import SealedRecord

    return convert(asdict(row), SealedRecord)


def _read_file(file: str) -> "Iterator[SealedRecord]":
    from msgspec import MsgspecError
    from msgspec.json import decode

    from cavvy.domain.audit import SealedRecord

    try:
        opened = click.open_file(file, "rb")
    except OSError as error:
        told, hint = (
            f"cannot read {file}: {error.strerror}",
            "`cavvy server audit export` writes a file of audit records",
        )
        raise CommandFailure(told, hint, exit_code=2) from error
    with opened as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield decode(line, type=SealedRecord)
            except MsgspecError as error:
                raise CommandFailure(
                    f"{file}, line {number}: this is not a record",
                    "the file must be written by `cavvy server audit export`",
                ) from error


def _show_account(record: "dict[str, Any]") -> str:
    if not record["signed_in"]:
        return "-"
    return record["account"] or "(owner)"


def _show_details(record: "dict[str, Any]") -> str:
    parts = [f"{name}={value}" for name, value in record["target"].items()]
    for name in ("before", "after"):
        parts += [f"{name} {key}={value}" for key, value in (record[name] or {}).items()]
    if record["left_out"]:
        parts.append(f"{record['left_out']} more refusals were not recorded")
    return ", ".join([*([record["code"]] if record["code"] else []), *parts])
