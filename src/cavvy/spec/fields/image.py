"""The container image that a task runs in: `image`, a name or the user's own Dockerfile."""

import re
from dataclasses import dataclass
from typing import TypedDict

from cavvy.domain.tasks import ImageBuild
from cavvy.spec.fields.kinds import (
    EXPRESSION,
    EitherKind,
    FieldSpec,
    MapKind,
    ScalarKind,
    SectionReader,
    SectionSpec,
    WrongValue,
    read_text,
    text_kind,
)
from cavvy.spec.fields.limits import inner_path
from cavvy.spec.problems import shown
from cavvy.spec.tree import ScalarNode


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskImage:
    """What the key says: a name, or what is built."""

    name: str | None = None
    build: ImageBuild | None = None
    login: str | None = None


class ImageFields(TypedDict):
    """The task's fields of it."""

    image: str | None
    image_build: ImageBuild | None
    image_login: str | None


def check_name(text: str) -> str:
    """An image's name as engines take it. Raises WrongValue."""
    name = text.strip().removeprefix("docker:").removeprefix("docker://")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,400}", name):
        raise WrongValue(f"{shown(text)} is no image's name")
    if name != text.strip():
        raise WrongValue(f"{shown(text)} has a prefix of another tool", suggestion=f"write {name}")
    return name


def _check_folder(text: str) -> str:
    return "." if text.strip().rstrip("/") in (".", "") and text.strip() else inner_path(text)


def _check_arg(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise WrongValue(
            f"{shown(name)} is no build argument's name", expected="letters, digits and _"
        )


def _check_secret(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise WrongValue(
            f"{shown(name)} is no secret's name",
            expected="a name that `cavvy secret set` was given",
        )
    return name


def _read_arg(node: ScalarNode) -> str:
    if node.value is None and node.plain:
        raise WrongValue("the argument has no value", suggestion="write '' for an empty one")
    return read_text(node)


NAME = FieldSpec(
    name="name",
    kind=text_kind("an image's name such as python:3.12", check_name),
    help="An image of a registry.",
    example="name: ghcr.io/team/image:1",
)
BUILD = FieldSpec(
    name="build",
    kind=text_kind("a folder within the working folder such as . or docker", _check_folder),
    help="The folder that the image is built from, by the node that runs the work: within the "
    "working folder, which "
    "is frozen and sent along. Built once on each node for the same content.",
    example="build: .",
)
DOCKERFILE = FieldSpec(
    name="dockerfile",
    kind=text_kind("a path within that folder", inner_path),
    help="With `build`: the Dockerfile.",
    example="dockerfile: docker/Dockerfile.train",
    default="Dockerfile",
)
TARGET = FieldSpec(
    name="target",
    kind=text_kind("a stage's name", numbers=True),
    help="With `build`: the stage to build.",
    example="target: train",
    default="the last one",
)
ARGS = FieldSpec(
    name="args",
    kind=MapKind(
        check_key=_check_arg,
        value=ScalarKind(
            words="a text", parse=_read_arg, schema={"type": ["string", "number", "boolean"]}
        ),
        words="build arguments, each with a text",
        key_schema={"type": "string"},
    ),
    help="With `build`: build arguments. They stay in the image's history: no passwords.",
    example="args: {PYTHON: 3.12}",
)
LOGIN = FieldSpec(
    name="login",
    kind=text_kind("a secret's name", _check_secret),
    help="With `name`: the secret that logs in to the registry, USER:PASSWORD. It is used to pull "
    "and then removed.",
    example="login: GHCR_LOGIN",
)


def _build(table: SectionReader) -> TaskImage | None:
    owner = table.find_one((NAME, BUILD), "the image")
    if owner is None:
        return None
    table.reject_beside(owner, (DOCKERFILE, TARGET, ARGS) if owner is NAME else (LOGIN,))
    if owner is NAME:
        return TaskImage(name=table.get(NAME), login=table.get(LOGIN))
    path = table.get(BUILD)
    if path is None:
        return None
    return TaskImage(
        build=ImageBuild(
            path=path,
            dockerfile=table.get(DOCKERFILE, "Dockerfile"),
            target=table.get(TARGET, ""),
            args=table.get(ARGS, {}),
        )
    )


IMAGE_TABLE = SectionSpec(
    path="image",
    help="The image as a table: one of `name` and `build`.",
    fields=(NAME, BUILD, DOCKERFILE, TARGET, ARGS, LOGIN),
    build=_build,
    hints={
        "context": "write `build`",
        "file": "write `dockerfile`",
        "build_args": "write `args`",
        "registry_auth": "write `login`, with a secret's name",
        "tag": "put it into `name`",
    },
)
_WORDS = "a container image such as python:3.12 or ghcr.io/team/image@sha256:…"
_TEXT: ScalarKind[TaskImage | None] = ScalarKind(
    words=_WORDS,
    parse=lambda node: TaskImage(name=check_name(read_text(node))),
    schema={"anyOf": [{"type": "string"}, EXPRESSION]},
)
IMAGE_KIND: EitherKind[TaskImage | None] = EitherKind(kinds=(_TEXT, IMAGE_TABLE))


def check_image(
    table: SectionReader, field: FieldSpec[TaskImage | None], workdir: FieldSpec[object]
) -> ImageFields:
    """The file's image; notes where it is built of a folder that is not there."""
    image = table.get(field) or TaskImage()
    if image.build is not None and not table.has(workdir):
        table.wrong(
            field,
            "the image is built from the working folder, and there is none",
            suggestion="add `workdir: .`",
        )
    return ImageFields(image=image.name, image_build=image.build, image_login=image.login)
