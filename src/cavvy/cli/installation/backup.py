"""`cavvy server backup`: writes an archive of the server."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EISDIR
from typing import BinaryIO

import click


@click.command("backup")
@click.argument("file", metavar="FILE")
def command(file: str) -> None:
    """Write an archive of the database, keys, logs, uploaded folders and checkpoints to FILE, or to
    standard output if it is -.

    The server may run meanwhile. With the archive, all secrets of the server can be read: store it
    in a safe place. Settings and credentials of clouds are not in it.
    """
    import sys

    from cavvy import settings
    from cavvy.api.backup import back_up
    from cavvy.api.state_dir import StateDir
    from cavvy.cli.installation.failures import folder_failures

    with folder_failures():
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
        f"backed up {rows} rows and {len(manifest.files)} files of {manifest.folder}", err=True
    )
    if file != "-":
        click.echo(f"to check the archive: cavvy server restore --dry-run {file}", err=True)


@contextmanager
def _new_file(path: str) -> Iterator[BinaryIO]:
    """Yield a file that only this user can read, and that gets its name when it is complete. Raises
    OSError.
    """
    if os.path.isdir(path):
        raise IsADirectoryError(EISDIR, "it is a folder; give the name of a new file", path)
    part = f"{path}.part"
    with suppress(FileNotFoundError):
        os.unlink(part)  # a file or link that is there may belong to someone else
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
