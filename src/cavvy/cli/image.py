"""`cavvy image`: builds a container image for a task and shows the size of its layers. An image
with the same contents is built only once.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import click

from cavvy.cli.task.load import param_option, read_any_task, read_params, task_argument
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, rows_out

if TYPE_CHECKING:
    from cavvy.client.landing import Landing
    from cavvy.domain.tasks import ImageBuild, TaskSpec
    from cavvy.spec.dockerfile import DockerfileRecipe
    from cavvy.spec.workdir import FolderEntry, FolderSnapshot

ENGINES = ("podman", "docker")


@click.group("image", cls=CommandGroup)
def command() -> None:
    """Build container images of tasks."""


@command.command("build")
@task_argument
@click.option(
    "--base",
    default="",
    show_default=False,
    metavar="IMAGE",
    help="Build on IMAGE instead of the default base image for the accelerators.",
)
@click.option(
    "--push",
    "push",
    metavar="NAME",
    help="Push the image to a registry as NAME, with the login of podman or docker.",
)
@click.option("--print", "show", is_flag=True, help="Print the Dockerfile and build nothing.")
@param_option
def build(file: str, base: str, push: str | None, show: bool, param: tuple[str, ...]) -> None:
    """Build an image that contains the result of the task's `setup`. To use the image, set `image`
    in a task file to the image's name.

    The image's name is a hash of the setup, the files and the base image, so equal images are built
    only once. If the task's `image` is a Dockerfile, that Dockerfile is built.
    """
    task = read_any_task(file, read_params(param))
    recipe = _recipe(task, base)
    if show:
        click.echo(recipe.text.rstrip("\n"))
        return
    engine = next((path for path in map(shutil.which, ENGINES) if path), None)
    if engine is None:
        raise CommandFailure(
            "neither podman nor docker is installed",
            "install podman or docker, or use --print to build the image elsewhere",
        )
    snapshot = (
        _freeze(task, Path(file).resolve().parent)
        if recipe.uses != () or task.image_build
        else None
    )
    name = f"localhost/cavvy-image/{task.name or 'task'}:{_key(recipe, snapshot, task)}"
    if (
        subprocess.run(
            [engine, "image", "inspect", name], capture_output=True, check=False
        ).returncode
        == 0
    ):
        click.echo(f"{name} exists already", err=True)
    else:
        _build(engine, name, task, recipe, snapshot)
    for note in recipe.notes:
        note_out(note)
    _show_layers(engine, name)
    if push:
        for argv in ([engine, "tag", name, push], [engine, "push", push]):
            if subprocess.run(argv, check=False).returncode:
                raise CommandFailure(
                    f"{push} could not be pushed",
                    "log in to the image's registry with the engine's own `login`",
                )
    click.echo(f"image: {push or name}")


def _recipe(task: "TaskSpec", base: str) -> "DockerfileRecipe":
    from cavvy.spec.dockerfile import DockerfileRecipe, make_recipe

    if task.image_build is None:
        return make_recipe(task, base=base)
    if base:
        raise CommandFailure(
            "the base image is set in the task's own Dockerfile",
            "omit --base",
            exit_code=2,
        )
    return DockerfileRecipe(
        text=f"# {task.image_build.path}/{task.image_build.dockerfile} of the working folder\n",
        uses=None,
    )


def _freeze(task: "TaskSpec", beside: Path) -> "FolderSnapshot":
    from cavvy.client.state import default_home
    from cavvy.sdk.files import find_wheel
    from cavvy.spec.uses import NAME
    from cavvy.spec.workdir import FreezeError, combine, freeze

    if task.workdir is None or task.workdir.path is None:
        raise CommandFailure(
            "the working folder is a git URL",
            "clone the repository and build in the clone with `workdir: .`",
        )
    try:
        folder, home = beside / task.workdir.path, Path(default_home())
        own = freeze(folder, state=home)
        if wheel := find_wheel(task, folder).get(NAME):
            return combine({"": own, NAME: freeze(wheel.parent, only=NAME)})
        return own
    except FreezeError as error:
        raise CommandFailure(str(error), exit_code=2) from error


def _key(recipe: "DockerfileRecipe", snapshot: "FolderSnapshot | None", task: "TaskSpec") -> str:
    """Return a hash of everything that determines the contents of the image."""
    build = task.image_build
    parts: list[object] = [recipe.text, sorted(recipe.files.items())]
    parts += (
        [[build.path, build.dockerfile, build.target, sorted(build.args.items())]] if build else []
    )
    parts += [
        (entry.path, entry.mode, entry.sha256, entry.link) for entry in _chosen(recipe, snapshot)
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _chosen(recipe: "DockerfileRecipe", snapshot: "FolderSnapshot | None") -> list["FolderEntry"]:
    from cavvy.spec.uses import is_used

    entries = snapshot.entries if snapshot else ()
    return [each for each in entries if recipe.uses is None or is_used(each.path, recipe.uses)]


def _build(
    engine: str,
    name: str,
    task: "TaskSpec",
    recipe: "DockerfileRecipe",
    snapshot: "FolderSnapshot | None",
) -> None:
    with tempfile.TemporaryDirectory(prefix="cavvy-image-") as text:
        context = Path(text) / "context"
        _write_context(context, recipe, snapshot)
        if task.image_build is None:
            folder, dockerfile, options = context, Path(text) / "Dockerfile", list[str]()
            dockerfile.write_text(recipe.text, encoding="utf-8")
        else:
            own = task.image_build
            folder = _find_inside(context, own.path)
            dockerfile = _find_inside(context, f"{own.path}/{own.dockerfile}")
            options = _build_options(own)
            if not dockerfile.is_file():
                raise CommandFailure(
                    f"there is no {own.dockerfile} in {own.path} of the working folder", exit_code=2
                )
        argv = [engine, "build", "--tag", name, "--file", str(dockerfile), *options, str(folder)]
        if subprocess.run(argv, check=False).returncode:
            raise CommandFailure(
                "the image could not be built",
                "the engine printed the reason above; --print shows the Dockerfile",
            )


def _write_context(
    context: Path, recipe: "DockerfileRecipe", snapshot: "FolderSnapshot | None"
) -> None:
    from cavvy.client.landing import Landing

    context.mkdir()
    chosen = [each for each in _chosen(recipe, snapshot) if each.path not in recipe.files]
    for file in recipe.files:
        if any(each.path.startswith(f"{file}/") for each in chosen):
            raise CommandFailure(f"the working folder has a folder {file}", "rename it", 2)
    with Landing(context) as landing:
        for entry in chosen:
            assert snapshot is not None
            for parent in reversed(PurePosixPath(entry.path).parents[:-1]):
                landing.make_folder(str(parent))
            if entry.link is not None:
                landing.make_link(entry.path, entry.link)
            else:
                _copy_plain(snapshot.folder / entry.path, entry, landing)
        for file, content in recipe.files.items():
            with landing.create(file) as made:
                made.write(content.encode())


def _copy_plain(source: Path, entry: "FolderEntry", landing: "Landing") -> None:
    """Copy a file, and not what a link leads to that has taken its place. Raises CommandFailure."""
    with landing.create(entry.path) as made:
        try:
            with open(source, "rb", opener=_open_plain) as file:
                shutil.copyfileobj(file, made)
        except OSError as error:
            raise CommandFailure(f"{source} cannot be read: {error.strerror}") from error
        os.fchmod(made.fileno(), entry.mode)


def _open_plain(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _find_inside(context: Path, path: str) -> Path:
    """Return a path of the copied working folder, without links. What a link or `..` leads to
    outside of it would be sent to the engine. Raises CommandFailure.
    """
    try:
        found = (context / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or a NUL character
        raise CommandFailure(f"{path} cannot be read: {error}", exit_code=2) from error
    if not found.is_relative_to(context.resolve()):
        raise CommandFailure(
            f"{path} leads out of the working folder", "copy what the image needs into it", 2
        )
    return found


def _build_options(build: "ImageBuild") -> list[str]:
    options = ["--target", build.target] if build.target else []
    for name, value in build.args.items():
        options += ["--build-arg", f"{name}={value}"]
    return options


def _show_layers(engine: str, name: str) -> None:
    """Print the size of each layer as the engine reports it, the last layer first."""
    shape = "{{.Size}}\t{{.CreatedBy}}"
    argv = [engine, "history", "--no-trunc", "--format", shape, name]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    rows: list[tuple[str, str]] = []
    for line in done.stdout.splitlines():
        size, _, made_by = line.partition("\t")
        if size.replace(" ", "") not in ("0B", ""):
            rows.append((size, " ".join(made_by.split())[:200]))
    if rows:
        rows_out(
            [TableColumn("size", right=True), TableColumn("made_by", "MADE BY", cut=True)], rows
        )
