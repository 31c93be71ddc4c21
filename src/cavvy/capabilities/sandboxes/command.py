"""`cavvy sandbox`: makes, lists and ends sandboxes, and runs programs in them."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import TYPE_CHECKING, Any

import click

from cavvy.cli.reach.session import project_option
from cavvy.cli.task.load import yes_option
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.numbers import positive_option
from cavvy.cli.view.output import TableColumn, json_option, json_out, output_option, rows_out
from cavvy.sdk.errors import CavvyError

if TYPE_CHECKING:
    from cavvy.capabilities.sandboxes.program import SandboxOutput, SandboxProcess

_PIECE = 64 << 10
_ID = click.argument("sandbox", metavar="ID")


@click.group("sandbox", cls=CommandGroup)
def command() -> None:
    """Run untrusted code in sandboxes.

    A sandbox has no network, unless asked for, and sees no files of the machine but its programs.
    It ends after its timeout, with its files.
    """


@command.command("create")
@project_option
@click.option("--timeout", default="5m", show_default=True, help="After which it ends.")
@positive_option("--cpu", default=1.0, show_default=True, help="Its CPUs.")
@click.option("--memory", default="2GB", show_default=True, help="Its memory.")
@click.option("--disk", default="1GB", show_default=True, help="The size of its files, in memory.")
@click.option("--title", default="", help="A text that lists show.")
@click.option(
    "--pip", "packages", multiple=True, metavar="PACKAGE", help="A package to install; repeatable."
)
@click.option("--network", is_flag=True, help="Let it send requests to the internet.")
@click.option(
    "--dict", "dicts", multiple=True, metavar="NAME", help="A dict that it may use; repeatable."
)
@click.option(
    "--queue", "queues", multiple=True, metavar="NAME", help="A queue that it may use; repeatable."
)
@click.option("--required", is_flag=True, help="Refuse a machine that lacks any isolation.")
@click.option("--free", is_flag=True, help="Use only machines that cost nothing.")
@yes_option
@json_option
def create(project: str, packages: tuple[str, ...], output: str, **given: Any) -> None:
    """Make a sandbox, and print its ID."""
    from cavvy.capabilities.functions.image import FunctionImage
    from cavvy.capabilities.sandboxes.sandbox import Sandbox

    given["consent"] = given.pop("yes")
    given["isolation"] = "required" if given.pop("required") else "best"
    if packages:
        given["image"] = FunctionImage.python().pip_install(*packages)
    with _failures():
        made = Sandbox.create(project=project, **given)
    if output == "json":
        json_out({"id": made.id})
    else:
        click.echo(made.id)


@command.command("list")
@project_option
@click.option("--ended", is_flag=True, help="Also show ended sandboxes whose host still runs.")
@output_option
def list_all(project: str, ended: bool, output: str) -> None:
    """List a project's sandboxes."""
    from cavvy.capabilities.sandboxes.sandbox import Sandbox

    with _failures():
        rows = [
            {**each._asdict(), "seconds": round(each.seconds, 1), "left_s": round(each.left_s, 1)}
            for each in Sandbox.list(project=project, ended=ended)
        ]
    columns = [
        TableColumn("id"),
        TableColumn("title", hidden=not any(row["title"] for row in rows)),
        TableColumn("state"),
        TableColumn("why", hidden=not ended),
        TableColumn("seconds"),
        TableColumn("left_s", "LEFT", drop=1),
        TableColumn("programs", drop=2),
        TableColumn("cpu", drop=3),
        TableColumn("memory_mib", drop=4),
    ]
    rows_out(columns, rows, output, empty="no sandboxes; make one with `cavvy sandbox create`")


@command.command("exec", context_settings={"ignore_unknown_options": True})
@_ID
@click.argument("words", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
@project_option
@click.option("--workdir", help="The folder in which it runs.")
def run(sandbox: str, words: tuple[str, ...], project: str, workdir: str | None) -> None:
    """Run a program in a sandbox, with this command's input and outputs, and exit with its exit
    code: `cavvy sandbox exec ID -- python3 -c 'print(1)'`.
    """
    from cavvy.capabilities.sandboxes.sandbox import Sandbox

    with _failures():
        process = Sandbox.from_id(sandbox, project=project).exec(
            *words, workdir=workdir, text=False
        )
        if not sys.stdin.isatty():
            Thread(target=_send_input, args=(process,), daemon=True).start()
        errors = Thread(target=_show, args=(process.stderr, sys.stderr), daemon=True)
        errors.start()
        try:
            _show(process.stdout, sys.stdout)
            errors.join()
            code = process.wait()
        except BaseException:  # the user has interrupted it
            process.kill()
            raise
    sys.exit(code if code >= 0 else 128 - code)


@command.command("rm")
@click.argument("sandboxes", nargs=-1, required=True, metavar="ID...")
@project_option
def remove(sandboxes: tuple[str, ...], project: str) -> None:
    """End sandboxes, with their programs and files."""
    from cavvy.capabilities.sandboxes.sandbox import Sandbox

    for each in sandboxes:
        with _failures():
            Sandbox.from_id(each, project=project).terminate()
        click.echo(f"{each} has ended")


@contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except CavvyError as error:
        raise CommandFailure(error.message, error.hint) from error


def _show(output: "SandboxOutput", file: Any) -> None:
    """Write an output to a file. A terminal gets nothing that could change it."""
    from cavvy.cli.view.job_output import EscapeFilter

    is_safe: Callable[..., bytes] = EscapeFilter().take
    filtered = file.isatty()
    for data in output.read_pieces():
        file.buffer.write(is_safe(data) if filtered else data)
        file.buffer.flush()
    if filtered:
        file.buffer.write(is_safe(b"", final=True))
        file.buffer.flush()


def _send_input(process: "SandboxProcess") -> None:
    try:
        while data := os.read(0, _PIECE):
            if not process.write_bytes(data):
                return
        process.write_bytes(b"", last=True)
    except CavvyError:
        return  # who waits for the program reports it
