"""`cavvy model`: publishes models in numbered, signed versions."""

import getpass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.capabilities.models import key_command, wheels
from cavvy.capabilities.models.conversion import convert_confined
from cavvy.capabilities.models.version_files import (
    VersionFiles,
    copy_source,
    find_source,
    hash_files,
    upload_folder,
)
from cavvy.cli.reach.arguments import replace_option
from cavvy.cli.reach.published import find_version
from cavvy.cli.reach.session import any_project_option, call_server, project_option, session
from cavvy.cli.view import formatting
from cavvy.cli.view.failure import CommandFailure, escape_controls, note_out
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import (
    TableColumn,
    json_option,
    json_out,
    output_option,
    pairs_out,
    rows_out,
)
from cavvy.domain.units import format_count
from cavvy.frame.discover import find_capabilities, load_all
from cavvy.packages import extra_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cavvy.client import ApiClient
    from cavvy.client.landing import Receipts
    from cavvy.client.model_wire import ModelView

_NAMED = 8  # maximum number of files that a message names


@click.group("model", cls=CommandGroup)
def command() -> None:
    """Publish models in numbered, signed versions."""


command.add_command(key_command.command)


@command.command("publish")
@click.argument("source", metavar="JOB|FILE|FOLDER|URL")
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
    "conversions",
    type=click.Choice(["onnx", "int8", "fp16"]),
    multiple=True,
    help="Convert the weights of an ONNX model here, before it is uploaded; `onnx` first converts "
    "a TorchScript model (.pt), and compares the outputs on the samples of --evaluate. Repeatable.",
)
@click.option(
    "--evaluate",
    metavar="SET",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Measure the model on this set: a .npz file with an array for each input and perhaps "
    "`labels`, or bodies of requests as JSON lines, perhaps each with `label`. With --convert, "
    "every second sample calibrates, and the others measure.",
)
@click.option(
    "--key",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Sign the version with this key, of `cavvy model key set`.",
)
@wheels.packages_options
@project_option
@json_option
def publish(
    source: str,
    name: str,
    main: str,
    residency: str,
    notes: tuple[str, ...],
    conversions: tuple[str, ...],
    evaluate: Path | None,
    key: Path | None,
    packages: Path | None,
    targets: tuple[str, ...],
    project: str,
    output: str,
) -> None:
    """Publish the next version of a model: the newest checkpoint of a job, a file or a folder.

    A URL is that of a repository of the Hugging Face Hub, hf://ORGANISATION/NAME@REVISION/PATH
    (with HF_TOKEN if it needs one), or of a version in an MLflow registry, models:/NAME/NUMBER or
    models:/NAME@ALIAS (at MLFLOW_TRACKING_URI). `cavvy model push` writes to MLflow.

    The server signs the version, and devices accept only what is signed; a model with a key of
    `cavvy model key set` is signed here with --key, or later by `cavvy model sign`. What --convert
    and --evaluate measure is kept with it: `accuracy` and `accuracy_before` the conversion,
    `agreement` with the original on the set (or on random inputs), and `speed_up`. A model's files
    are programs: they are converted and measured where they can read and write nothing of yours,
    which needs Linux 5.13; elsewhere, convert the model in a job.

    With --packages, the version carries Python packages: a device installs them beside its own,
    before the trial, and its engine finds them first. They come and go with the version. A job or
    folder with `packages/NAME.whl` has them too. Services in the cloud do not install them.
    """
    from tempfile import TemporaryDirectory

    measured, signing = _read_notes(notes), key_command.read_key(key)
    with session() as client, TemporaryDirectory(prefix="cavvy-model-") as fresh:
        if signing:
            key_command.check_key(client, project, name, signing)
        files = find_source(client, project, source, Path(fresh, "pulled"))._replace(main=main)
        if conversions or evaluate or packages:
            model = copy_source(client, project, files, Path(fresh, "model"))
            if conversions or evaluate:
                main, figures = _measure(model, main, conversions, evaluate)
                measured |= figures
            if packages:
                wheels.collect_wheels(client, project, packages, targets, model)
            files = files._replace(folder=model, below="", main=main)
        made = _publish(client, project, name, files, residency, measured)
        if signing:
            hashes = None if files.folder is None else hash_files(files.folder)
            key_command.sign_version(client, project, made.name, signing, hashes, main)
    _say_published(made, signed=made.signed or bool(signing), output=output)


@command.command("sign")
@click.argument("name", metavar="MODEL@NUMBER|LABEL")
@click.option(
    "--key",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="The key of `cavvy model key set`.",
)
@click.option(
    "--files",
    type=click.Path(exists=True, path_type=Path),
    help="Sign only if the version has these files: a file or a folder.",
)
@project_option
def sign(name: str, key: Path, files: Path | None, project: str) -> None:
    """Sign a version of a model that was published without its key, such as a job's checkpoint.

    Without --files, what the server stores is signed, and the SHA-256 of each file is printed. The
    program of devices, cavvy.edge@NUMBER, must be the one of this installation; if it was deployed
    with packages, --files is a folder that has them as `packages/NAME.whl`.
    """
    signing = key_command.read_key(key)
    assert signing is not None
    wanted = None if files is None else hash_files(files)
    with session() as client:
        found = find_version(client, project, name)
        for _, list_files in load_all(lambda each: each.own_models):
            if (program := list_files(found.model)) is None:
                continue
            if wanted is None and len(found.files) > len(program):
                raise CommandFailure(
                    f"{found.name} has Python packages, which run with all rights on devices",
                    "compare them with yours: --files FOLDER, with packages/NAME.whl in it",
                    exit_code=2,
                )
            wanted = program if wanted is None else program | wanted
        signed = key_command.sign_version(client, project, found.name, signing, wanted)
    for path, digest in signed.items():
        click.echo(f"{digest}  {escape_controls(path)}")
    click.echo(f"{found.name} is signed")


def _publish(
    client: "ApiClient",
    project: str,
    name: str,
    files: VersionFiles,
    residency: str,
    notes: dict[str, float],
) -> "ModelView":
    from cavvy.capabilities.models.wire import ModelAsk, publish_model

    snapshot = files.snapshot
    if files.folder is not None:
        snapshot = upload_folder(client, project, files.folder)
    asked = ModelAsk(
        name=name,
        snapshot=snapshot,
        main=files.main,
        below=files.below,
        job=files.job,
        residency=residency,
        notes=notes,
        made_by=getpass.getuser(),
    )
    return publish_model(client, project, asked)


def _say_published(made: "ModelView", *, signed: bool, output: str) -> None:
    if output == "json":
        from msgspec.structs import replace

        json_out(replace(made, signed=signed))
        return
    told = [f"{key} {value:g}" for key, value in made.notes.items()]
    size = formatting.show_size(made.size)
    click.echo(f"published {made.name}: {', '.join([escape_controls(made.main), size, *told])}")
    if not signed:
        click.echo(f"no device gets it before: cavvy model sign {made.name} --key FILE")
    commands = (command for each in find_capabilities().capabilities for command in each.commands)
    if any(each.name == "edge" for each in commands):
        click.echo(f"to bring it to devices: cavvy edge deploy {made.name} --site SITE")


def _measure(
    folder: Path, main: str, conversions: "Sequence[str]", evaluate: Path | None
) -> tuple[str, dict[str, float]]:
    """Convert and evaluate the model in `folder`. Return its main file and what was measured."""
    measured = dict[str, float]()
    if "onnx" in conversions:
        main, figures = _convert_to_onnx(folder, main, evaluate)
        measured |= figures
    for each in [each for each in conversions if each != "onnx"] or [""]:
        measured |= _convert(folder, main, each, evaluate)
    return main, measured


@command.command("list")
@any_project_option
@output_option
def list_all(project: str | None, output: str) -> None:
    """List published models."""
    from cavvy.client.model_wire import list_models

    found = call_server(list_models, project)
    rows = [
        {
            "name": each.name,
            "project": each.project,
            "main": each.main,
            "labels": ", ".join(each.labels),
            "signed": each.signed,
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
        TableColumn("labels", wrap=True),
        TableColumn("signed", "SIGNED", lambda signed: "yes" if signed else "no", drop=2),
        TableColumn("size", "SIZE", formatting.show_size),
        TableColumn("job", drop=1),
        TableColumn("notes", wrap=True),
        TableColumn("made_by", "BY", drop=5),
        TableColumn("created_at", "CREATED", formatting.show_time, drop=4),
    ]
    rows_out(columns, rows, output, empty="no models; `cavvy model publish` publishes one")


@command.command("show")
@click.argument("name", metavar="MODEL@NUMBER|LABEL")
@project_option
@json_option
def show(name: str, project: str, output: str) -> None:
    """Show a version of a model: its files, what was measured, and what devices fetch for it.

    A device that serves a former version fetches a delta, if it is smaller than the file.
    """
    found = call_server(find_version, project, name)
    if output == "json":
        json_out(found)
        return
    pairs: dict[str, object] = {
        "model": found.name,
        "main": found.main,
        "labels": ", ".join(found.labels) or "none",
        "signed": "yes" if found.signed else f"no: cavvy model sign {found.name} --key FILE",
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


@command.command("promote")
@click.argument("name", metavar="MODEL@NUMBER|LABEL")
@click.option("--label", default="production", help="The label to move.", show_default=True)
@project_option
@json_option
def promote(name: str, label: str, project: str, output: str) -> None:
    """Move a label, such as production, to a version of a model, also to an older one.

    MODEL@LABEL then stands for this version in `cavvy edge deploy`, `cavvy deploy` and `cavvy model
    pull`. Devices and services that have another version keep it until the next deployment.
    """
    from cavvy.capabilities.models.wire import promote_model

    with session() as client:
        version = find_version(client, project, name)
        made = promote_model(client, project, version.model, label, version.number)
    if output == "json":
        json_out(made)
        return
    former = f"; it was {made.former}" if made.former not in ("", made.name) else ""
    click.echo(f"{version.model}@{label} is {made.name}{former}")


@command.command("unlabel")
@click.argument("name", metavar="MODEL@LABEL")
@project_option
@json_option
def unlabel(name: str, project: str, output: str) -> None:
    """Take a label, such as production, from a model. Devices and services keep their version."""
    from cavvy.capabilities.models.wire import unlabel_model

    model, _, label = name.rpartition("@")
    if not model or not label or label.isdecimal():
        raise CommandFailure(
            f"{name} is no label of a model",
            "expected MODEL@LABEL, such as defects@production; `cavvy model list` lists labels",
            exit_code=2,
        )
    made = call_server(unlabel_model, project, model, label)
    if output == "json":
        json_out(made)
        return
    click.echo(f"{name} is no longer {made.former}")


@command.command("pull")
@click.argument("name", metavar="MODEL@NUMBER|LABEL")
@click.option(
    "--out",
    metavar="FOLDER",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder to write; the default is MODEL-NUMBER.",
)
@replace_option
@project_option
@json_option
def pull(name: str, out: Path | None, replace: bool, project: str, output: str) -> None:
    """Download the files of a version of a model, and check the SHA-256 of each.

    A download that was cut goes on where it ended, and files that are there already are only
    checked. Into a folder with files of yours, they are written after a question, which shows their
    names and how they differ; those stay. Files that git, Cavvy, shells or editors here would obey,
    such as .git and .envrc, are left out and named.
    """
    from cavvy.cli.reach.received import find_obeyed_files, is_git_folder, is_in_git_folder
    from cavvy.client.blobs import download_files
    from cavvy.client.landing import Receipts

    with session() as client:
        found = find_version(client, project, name)
        folder = out or Path(f"{found.model}-{found.number}")
        if is_git_folder(folder) or is_in_git_folder(folder):
            raise CommandFailure(
                f"{folder} is in a git folder, and nothing was written", "name another with --out"
            )
        left = find_obeyed_files(each.path for each in found.files)
        files = [(each.path, each.sha256, each.size) for each in found.files]
        files = [each for each in files if each[0] not in left]
        try:
            with Receipts(folder) as receipts:
                _agree_to_files(client, project, folder, files, receipts, replace)
                fetched = download_files(client, project, files, folder, receipts.note)
        except OSError as error:
            told = f"{error.filename or folder} cannot be written: {error.strerror}"
            raise CommandFailure(told, "name another folder with --out", exit_code=2) from error
    if output == "json":
        where = {"name": found.name, "folder": str(folder)}
        json_out({**where, "fetched": fetched, "left_out": left})
        return
    if left:
        more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
        named = ", ".join(left[:_NAMED])
        note_out(
            f"left out, because git, Cavvy, shells or editors here would obey them: {named}{more}"
        )
    same = "" if fetched == len(files) else f", {len(files) - fetched} there already"
    size = formatting.show_size(sum(each[2] for each in files))
    click.echo(f"{found.name} is in {folder}: {format_count(len(files), 'file')}, {size}{same}")


def _agree_to_files(
    client: "ApiClient",
    project: str,
    folder: Path,
    files: "Sequence[tuple[str, str, int]]",
    receipts: "Receipts",
    replace: bool,
) -> None:
    """Ask the user about files that arrive in a folder of theirs. Raises CommandFailure."""
    from cavvy.cli.reach.received import PREVIEW_BYTES, PREVIEWS, agree_to_arrival
    from cavvy.client.blobs import has_file, read_blob

    known = {path: (digest, size) for path, digest, size in files}
    new, changed = receipts.find_doubtful(known)
    differing = dict[str, bytes | None]()
    for path in changed:
        digest, size = known[path]
        if not has_file(folder, path, digest):
            small = size <= PREVIEW_BYTES and len(differing) < PREVIEWS
            differing[path] = read_blob(client, project, digest) if small else None
    agree_to_arrival(folder, new, differing, replace=replace)


@command.command("push")
@click.argument("name", metavar="MODEL@NUMBER|LABEL")
@click.argument("target", metavar="models:/NAME")
@project_option
@json_option
def push(name: str, target: str, project: str, output: str) -> None:
    """Register a version of a model in an MLflow registry, as the next version of a model there.

    The registry is that of MLFLOW_TRACKING_URI, with MLFLOW_TRACKING_TOKEN, or
    MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD. The files become artifacts of a run in
    its experiment `cavvy`.
    """
    from tempfile import TemporaryDirectory

    from cavvy.client.blobs import download_files
    from cavvy.client.mlflow import MlflowRegistry, RegistryRefused

    with session() as client, TemporaryDirectory(prefix="cavvy-model-") as fresh:
        found = find_version(client, project, name)
        folder = Path(fresh, "model")
        files = [(each.path, each.sha256, each.size) for each in found.files]
        try:
            registry = MlflowRegistry()
            download_files(client, project, files, folder)
            made = registry.push(target, folder, f"{found.name} of project {project}")
        except RegistryRefused as error:
            raise CommandFailure(str(error), exit_code=2) from error
    if output == "json":
        json_out({"name": found.name, "registered": made})
        return
    click.echo(f"{found.name} is {made} in the MLflow registry")


def _convert_to_onnx(
    folder: Path, main: str, evaluate: Path | None
) -> tuple[str, dict[str, float]]:
    """Put an ONNX model in the place of a TorchScript one. Return its path in the folder, and what
    was measured."""
    known = sorted(str(each.relative_to(folder)) for each in folder.rglob("*.pt"))
    if main not in known and (main or len(known) != 1):
        raise CommandFailure(
            f"--convert onnx needs a TorchScript model; found {', '.join(known) or 'no .pt file'}",
            "name the file with --main; torch.jit.trace(MODEL, SAMPLE).save(FILE) writes one",
            exit_code=2,
        )
    if evaluate is None:
        raise CommandFailure(
            "--convert onnx needs samples to compare the outputs on",
            "add --evaluate SET.npz, with an array for each input",
            exit_code=2,
        )
    if not find_spec("torch"):
        raise CommandFailure("--convert onnx needs torch", "install PyTorch where cavvy runs")
    _check_packages()
    path = folder / (main or known[0])
    target = path.with_suffix(".onnx")
    figures = convert_confined(path, "onnx", target, evaluate)
    path.unlink()
    return str(target.relative_to(folder)), figures


def _check_packages() -> None:
    if missing := [name for name in ("onnxruntime", "onnx", "numpy") if not find_spec(name)]:
        raise CommandFailure(
            f"--convert and --evaluate need {', '.join(missing)}", extra_command("onnx")
        )


def _convert(folder: Path, main: str, convert: str, evaluate: Path | None) -> dict[str, float]:
    """Convert the file to serve in its place, if asked, and return what was measured."""
    known = sorted(str(each.relative_to(folder)) for each in folder.rglob("*.onnx"))
    if main not in known and (main or len(known) != 1):
        told = ", ".join(known) or "no .onnx file"
        raise CommandFailure(
            f"--convert and --evaluate need an ONNX model; found {told}",
            "name the file with --main; export a model of another form to ONNX in its job",
            exit_code=2,
        )
    _check_packages()
    path = folder / (main or known[0])
    target = path.with_name(f"{path.name}.converted")
    figures = convert_confined(path, convert, target, evaluate)
    if target.exists():
        target.rename(path)
    return figures


def _read_notes(notes: tuple[str, ...]) -> dict[str, float]:
    try:
        return {key: float(value) for key, value in (each.split("=", 1) for each in notes)}
    except ValueError as error:
        raise CommandFailure(
            "--note: expected NAME=NUMBER, such as accuracy=0.97", exit_code=2
        ) from error
