"""`cavvy model`: publishes models for devices at the edge."""

import getpass
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import any_project_option, project_option, session
from cavvy.cli.view import formatting
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import (
    TableColumn,
    json_option,
    json_out,
    output_option,
    pairs_out,
    rows_out,
)
from cavvy.packages import extra_command

if TYPE_CHECKING:
    from cavvy.client import ApiClient

_BELOW = "model"  # the folder into which a job's checkpoint is copied


@click.group("model", cls=CommandGroup)
def command() -> None:
    """Publish models in numbered, signed versions."""


@command.command("publish")
@click.argument("source", metavar="JOB|FILE|FOLDER")
@click.option("--name", required=True, help="The model's name, such as defects.")
@click.option("--main", default="", metavar="PATH", help="The file to serve, if there are several.")
@click.option(
    "--residency", default="", help="Only devices with the label residency=VALUE may get it."
)
@click.option(
    "--note", "notes", multiple=True, metavar="NAME=NUMBER", help="A measured value; repeatable."
)
@click.option(
    "--convert",
    type=click.Choice(["int8", "fp16"]),
    help="Convert the weights of an ONNX model here, before it is uploaded.",
)
@click.option(
    "--evaluate",
    metavar="SET",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Measure the model on this set: a .npz file with an array for each input and perhaps "
    "`labels`, or bodies of requests as JSON lines, perhaps each with `label`. With --convert, "
    "every second sample calibrates, and the others measure.",
)
@project_option
@json_option
def publish(
    source: str,
    name: str,
    main: str,
    residency: str,
    notes: tuple[str, ...],
    convert: str | None,
    evaluate: Path | None,
    project: str,
    output: str,
) -> None:
    """Publish the next version of a model: the newest checkpoint of a job, a file or a folder.

    The server signs the version, and devices accept only what is signed. What --convert and
    --evaluate measure is kept with the version: `accuracy` and `accuracy_before` the conversion,
    `agreement` with the original on the set (or on random inputs), and `speed_up`.
    """
    from tempfile import TemporaryDirectory

    from cavvy.client.edge_wire import ModelAsk, publish_model

    measured = _read_notes(notes)
    with session() as client, TemporaryDirectory(prefix="cavvy-model-") as fresh:
        snapshot = job = below = ""
        if not Path(source).exists() and ("/" in source or Path(source).suffix):
            raise CommandFailure(f"{source}: the file does not exist", exit_code=2)
        if not Path(source).exists():
            snapshot, job, below = _copy_checkpoint(client, project, source)
        if convert or evaluate:
            folder = Path(fresh, "model")
            if Path(source).exists():
                _copy(Path(source), folder)
            else:
                _download(client, project, snapshot, below, folder)
                below = ""
            measured |= _convert(folder, main, convert or "", evaluate)
            snapshot = _upload(client, project, folder)
        elif Path(source).exists():
            snapshot = _upload(client, project, Path(source))
        made = publish_model(
            client,
            project,
            ModelAsk(
                name=name,
                snapshot=snapshot,
                main=main,
                below=below,
                job=job,
                residency=residency,
                notes=measured,
                made_by=getpass.getuser(),
            ),
        )
    if output == "json":
        json_out(made)
        return
    told = [f"{key} {value:g}" for key, value in made.notes.items()]
    size = formatting.show_size(made.size)
    click.echo(f"published {made.name}: {', '.join([made.main, size, *told])}")
    click.echo(f"to bring it to devices: cavvy edge deploy {made.name} --site SITE")


@command.command("list")
@any_project_option
@output_option
def list_all(project: str | None, output: str) -> None:
    """List published models."""
    from cavvy.client.edge_wire import list_models

    with session() as client:
        found = list_models(client, project)
    rows = [
        {
            "name": each.name,
            "project": each.project,
            "main": each.main,
            "size": each.size,
            "job": each.job,
            "notes": ", ".join(f"{key}={value:g}" for key, value in each.notes.items()),
            "made_by": each.made_by,
            "created_at": each.created_at,
        }
        for each in sorted(found, key=lambda one: (one.project, one.model, one.number))
    ]
    columns = [
        TableColumn("name"),
        TableColumn("project", drop=3),
        TableColumn("main", drop=2),
        TableColumn("size", "SIZE", formatting.show_size),
        TableColumn("job", drop=1),
        TableColumn("notes", wrap=True),
        TableColumn("made_by", "BY", drop=5),
        TableColumn("created_at", "CREATED", formatting.show_time, drop=4),
    ]
    rows_out(columns, rows, output, empty="no models; `cavvy model publish` publishes one")


@command.command("show")
@click.argument("name", metavar="MODEL@NUMBER")
@project_option
@json_option
def show(name: str, project: str, output: str) -> None:
    """Show a version of a model: its files, what was measured, and what devices fetch for it.

    A device that serves a former version fetches a delta, if it is smaller than the file.
    """
    from cavvy.client.edge_wire import list_models

    with session() as client:
        known = [each for each in list_models(client, project) if each.project == project]
    found = next((each for each in known if each.name == name), None)
    if found is None:
        same = [each.name for each in known if each.model == name.partition("@")[0]]
        raise CommandFailure(
            f"project {project} has no model {name}",
            f"expected MODEL@NUMBER; published: {', '.join(same or [each.name for each in known])}"
            if known
            else "`cavvy model publish` publishes one",
        )
    if output == "json":
        json_out(found)
        return
    pairs: dict[str, object] = {
        "model": found.name,
        "main": found.main,
        "job": found.job or "none",
        "residency": found.residency or "anywhere",
        "by": found.made_by,
        "created": formatting.show_time(found.created_at),
    }
    for each in found.files:
        told = [
            f"{formatting.show_size(size)} from {base} ({size / each.size:.1%})"
            for base, size in each.deltas.items()
        ]
        pairs[each.path] = ", or ".join([formatting.show_size(each.size), *told])
    pairs |= {key: f"{value:g}" for key, value in found.notes.items()}
    pairs_out(list(pairs.items()))


def _upload(client: "ApiClient", project: str, source: Path) -> str:
    """Upload a file or folder as a snapshot, and return the snapshot's hash."""
    from cavvy.client.upload import upload
    from cavvy.spec.workdir import FreezeError, freeze

    folder, only = (source, None) if source.is_dir() else (source.parent, source.name)
    try:
        snapshot = freeze(folder, only=only)
    except FreezeError as error:
        raise CommandFailure(str(error), exit_code=2) from error
    if not snapshot.entries:
        raise CommandFailure(f"the folder {source} has no files", "publish a folder with a model")
    upload(client, project, snapshot.blobs())
    return snapshot.hash


def _copy_checkpoint(client: "ApiClient", project: str, name: str) -> tuple[str, str, str]:
    """Return a snapshot with a job's newest checkpoint, the job's name, and the checkpoint's
    folder."""
    from cavvy.client.service_wire import make_model_folder

    job = client.job(project, name)
    made = make_model_folder(client, job.project, job.name, [], _BELOW)
    return made.snapshot, job.name, _BELOW


def _copy(source: Path, folder: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, folder)
        return
    folder.mkdir()
    shutil.copy(source, folder)


def _download(client: "ApiClient", project: str, snapshot: str, below: str, folder: Path) -> None:
    """Write the files of a snapshot's folder `below` to a new folder."""
    from cavvy.client.download import download_snapshot

    folder.mkdir()
    download_snapshot(client, project, snapshot, below, folder)


def _convert(folder: Path, main: str, convert: str, evaluate: Path | None) -> dict[str, float]:
    """Convert the file to serve in its place, and return what was measured."""
    known = sorted(str(each.relative_to(folder)) for each in folder.rglob("*.onnx"))
    if main not in known and (main or len(known) != 1):
        told = ", ".join(known) or "no .onnx file"
        raise CommandFailure(
            f"--convert and --evaluate need an ONNX model; found {told}",
            "name the file with --main; export a model of another form to ONNX in its job",
            exit_code=2,
        )
    if missing := [name for name in ("onnxruntime", "onnx", "numpy") if not find_spec(name)]:
        raise CommandFailure(
            f"--convert and --evaluate need {', '.join(missing)}", extra_command("onnx")
        )
    path = folder / (main or known[0])
    target = path.with_name(f"{path.name}.converted")
    words = [sys.executable, "-m", "cavvy.model_server.publish", "--model", str(path)]
    words += ["--convert", convert, "--target", str(target)] if convert else []
    words += ["--samples", str(evaluate.resolve())] if evaluate else []
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        problem = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise CommandFailure(f"the model was not published: {problem}")
    if target.exists():
        target.rename(path)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def _read_notes(notes: tuple[str, ...]) -> dict[str, float]:
    try:
        return {key: float(value) for key, value in (each.split("=", 1) for each in notes)}
    except ValueError as error:
        raise CommandFailure(
            "--note: expected NAME=NUMBER, such as accuracy=0.97", exit_code=2
        ) from error
