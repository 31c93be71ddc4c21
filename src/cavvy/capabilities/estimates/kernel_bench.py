"""Measures the kernels of accelerators for `cavvy bench --kernels`, on this machine or in jobs, and
keeps the results as device profiles.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from cavvy.cli.view.failure import CommandFailure, escape_controls
from cavvy.cli.view.output import TableColumn, json_out, rows_out

if TYPE_CHECKING:
    from cavvy.client import ApiClient

_MARK = "CAVVY_KERNEL "  # begins each line that the program prints for this module
_PROGRAM = "bench_kernels.py"
_LIMIT = "45m"  # for a node's start, PyTorch's installation and two minutes of measurement
# errors of lines that a node changed, or two processes printed into each other
_WRONG = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
_TOLD = 25  # kernels between two lines of progress, if the output is no terminal


def measure_here() -> dict[str, Any]:
    """Measure this machine's accelerator, and return its device profile. Raises CommandFailure."""
    from importlib.util import find_spec

    from cavvy.packages import extra_command

    if find_spec("torch") is None:
        hint = f"`{extra_command('train')}`, or name a rented accelerator with --gpu"
        raise CommandFailure("torch is not installed for the Python that runs cavvy", hint)
    words = [sys.executable, "-W", "ignore", str(_program())]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            return collect(process.stdout)
        finally:
            process.terminate()


def measure_job(
    client: "ApiClient", gpu: str | None, provider: str | None, consent: bool
) -> dict[str, Any]:
    """Measure an accelerator of a provider in a job, and return its device profile. Raises
    CommandFailure.
    """
    from cavvy.cli.reach.session import named, task_project
    from cavvy.cli.task.load import read_task
    from cavvy.cli.task.submission import make_origin, submit

    with TemporaryDirectory() as folder:
        Path(folder, _PROGRAM).write_bytes(_program().read_bytes())
        file = Path(folder, "task.yaml")
        file.write_text(make_task(gpu, provider))
        loaded = read_task(str(file), {})
        project = task_project(None, loaded.task)
        origin = make_origin(client, project, loaded, loaded.text)
        job = submit(
            client,
            loaded.text,
            path=str(file),
            params={},
            project=project,
            origin=origin,
            consent=consent,
        )
    try:
        return collect(_split(client.logs(project, job.name, follow=True)))
    except CommandFailure as error:
        hint = f"`cavvy logs {named(project, job.name)}` shows the job's output"
        raise CommandFailure(error.message, hint) from error


def make_task(gpu: str | None, provider: str | None) -> str:
    """Return the task file of the job. The job installs PyTorch if its node has none."""
    from cavvy.sdk.values import write_text

    resources: dict[str, Any] = {"gpu": gpu or 1}
    if provider:
        resources["providers"] = [provider]
    return write_text(
        {
            "name": "bench-kernels",
            "workdir": ".",
            "setup": "python3 -c 'import torch' || pip install torch numpy",
            "run": f"python3 -W ignore {_PROGRAM}",
            "resources": resources,
            "limits": {"duration": _LIMIT},
        }
    )


def _program() -> Path:
    return Path(__file__).parent / "tracer" / _PROGRAM


def _split(chunks: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a log."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
    yield rest.decode(errors="replace")


def collect(lines: Iterable[str]) -> dict[str, Any]:
    """Return the device profile of the printed lines, and show the progress. Other lines are
    ignored. Raises CommandFailure if the measurement did not finish.
    """
    profile: dict[str, Any] = {"accelerator": None, "source": "measured by `cavvy bench --kernels`"}
    rows: list[dict[str, Any]] = []
    last, total = "", 0
    from cavvy.planner.estimate.measured import check_row, read_device

    for line in lines:
        _, mark, text = line.partition(_MARK)
        if not mark:
            last = line.strip() or last
            continue
        try:
            part: dict[str, Any] = json.loads(text)
            if "error" in part:
                hint = "`cavvy bench --kernels --gpu NAME` measures a rented accelerator"
                raise CommandFailure(str(part["error"]), hint)
            if "row" in part:
                row = dict(check_row(part["row"]))
                rows.append(row)
                _tell(len(rows), total, f"{row['name']} {row['precision']}")
            elif "about" in part or "end" in part:
                profile |= part.get("about") or part["end"]
            elif "total" in part:
                total = int(part["total"])
            else:
                profile |= part
        except _WRONG as error:
            raise _say_wrong(error, text) from error
    if "seconds" not in profile:
        raise CommandFailure(
            f"the measurement ended after {len(rows)} of {total or 'all'} kernels",
            f"its last output was: {last}" if last else "",
        )
    try:
        if not isinstance(profile["device"], str):
            raise TypeError("the device has no name")
        profile |= {"accelerator": _find_name(profile["device"]), "kernels": rows}
        profile["skipped"] = [str(each) for each in profile["skipped"]]
        read_device(profile)
        json.dumps(profile, allow_nan=False)
    except _WRONG as error:
        raise _say_wrong(error, last) from error
    return profile


def _say_wrong(error: Exception, line: str) -> CommandFailure:
    message = f"the measurement printed what is no device profile: {error!r:.200}"
    return CommandFailure(message, f"the line was: {line.strip():.200}" if line else "")


def _tell(done: int, total: int, name: str) -> None:
    """Show the number of measured kernels: in one line of a terminal, otherwise now and then."""
    text, name = f"{done} of {total} kernels", escape_controls(name)
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        click.echo(f"\r\x1b[K{text}: {name[:50]}{end}", err=True, nl=False)
    elif done % _TOLD == 0:
        click.echo(text, err=True)


def keep(profile: Mapping[str, Any], file: str | None) -> Path:
    """Write a device profile to `file` or, if it is None, to the folder in which estimates look for
    profiles of this user's accelerators. Returns the path.
    """
    from cavvy.cli.task.profiles import devices_folder
    from cavvy.cli.view.output_file import make_folder, write_text

    name = profile["accelerator"] or "".join(filter(str.isalnum, profile["device"]))[:80]
    path = Path(file) if file else devices_folder() / f"{name}.json"
    make_folder(path.parent)
    write_text(path, json.dumps(profile, separators=(",", ":")) + "\n")
    return path


def show(profiles: Sequence[Mapping[str, Any]], output: str) -> None:
    """Print the profiles as JSON, or a table with the best rates of each kind of kernel."""
    if output == "json":
        json_out(profiles)
        return
    rows_out(_COLUMNS, [row for each in profiles for row in _summarize(each)], output)
    for profile in profiles if output == "table" else ():
        for row in profile["kernels"]:
            if "error" in row:
                size = "x".join(map(str, row["shape"]))
                name = f"{row['name']} {row['precision']} {size}"
                told = escape_controls(f"not measured: {name}: {row['error']}")
                click.echo(told, err=True)
        if profile["skipped"]:
            left = len(profile["skipped"])
            click.echo(f"not measured: the last {left} kernels, for lack of time", err=True)


_COLUMNS = (
    TableColumn("accelerator", "ACCELERATOR"),
    TableColumn("kernels", "KERNELS"),
    TableColumn("precision", "PRECISION"),
    TableColumn("number", "NUMBER"),
    TableColumn("tflops", "BEST TFLOP/S", lambda rate: f"{rate:,.0f}"),
    TableColumn("gb_s", "BEST GB/S", lambda rate: f"{rate:,.0f}"),
    TableColumn("shortest_us", "SHORTEST US", lambda us: f"{us:,.1f}"),
)


def _summarize(profile: Mapping[str, Any]) -> list[list[Any]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in profile["kernels"]:
        if row.get("us"):
            groups.setdefault((row["kind"], row["precision"]), []).append(row)
    return [
        [
            profile["accelerator"] or profile["device"],
            *key,
            len(rows),
            max(row["flops"] / row["us"] for row in rows) / 1e6 or None,
            max(row["bytes"] / row["us"] for row in rows) / 1e3,
            min(row["us"] for row in rows),
        ]
        for key, rows in sorted(groups.items())
    ]


def _find_name(device: str) -> str | None:
    from cavvy.catalog.accelerators import find_accelerator

    found = find_accelerator(device)
    return found.accelerator.name if found else None
