"""`cavvy server backup`: writes an archive of the server."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EINVAL, EISDIR
from typing import BinaryIO

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
    from cavvy.cli.installation.failures import folder_failures
    from cavvy.cli.reach.end_signals import ended_by_signals
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
            with _new_file(file) as out:
                manifest = back_up(home, configured, out)
    rows = sum(each.rows for each in manifest.tables)
    click.echo(
        f"backed up {format_count(rows, 'row')} and {format_count(len(manifest.files), 'file')} of "
        f"{manifest.folder}",
        err=True,
    )
    if file != "-":
        click.echo(f"to check the archive: cavvy server restore --dry-run {file}", err=True)


def _is_special(path: str) -> bool:
    """Return whether `path` is no place for a file: a device, a pipe, a socket, or a link to a
    file that a process has open, such as /dev/stdout.
    """
    if os.path.islink(path) and os.readlink(path).startswith("/proc/"):
        return True
    return os.path.exists(path) and not os.path.isfile(path)


@contextmanager
def _new_file(path: str) -> Iterator[BinaryIO]:
    """Yield a file that only this user can read. The file gets its final name when it is complete.
    Raises OSError.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(EISDIR, "FILE is a folder; give the name of a new file", path)
    if _is_special(path):  # root would replace it with the archive
        text = "FILE is a device, pipe or socket; use - to write to standard output"
        raise OSError(EINVAL, text, path)
    part = f"{path}.part"
    with suppress(FileNotFoundError):
        os.unlink(part)  # an existing file or link may belong to another user
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, path)
    except OSError as error:
        error.filename = path
        raise
    finally:
        with suppress(FileNotFoundError):
            os.unlink(part)
