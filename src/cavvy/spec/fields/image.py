"""The container image that a task runs in: `image`, a name or the user's own Dockerfile."""

import re

from cavvy.domain.tasks import ImageBuild
from cavvy.spec.fields.kinds import (
    FieldSpec,
    SectionReader,
    SectionSpec,
    WrongValue,
    either,
    hints_for,
    matching,
    named_texts,
    text_kind,
)
from cavvy.spec.fields.paths import inner_path
from cavvy.spec.problems import shown

_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
TaskImage = tuple[str | None, ImageBuild | None, str | None]  # a name, or a build; and a login


def _check_name(text: str) -> str:
    """An image's name as engines take it."""
    name = text.strip().removeprefix("docker:").removeprefix("docker://")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,400}", name):
        raise WrongValue(f"{shown(text)} is no image's name")
    if name != text.strip():
        raise WrongValue(f"{shown(text)} has a prefix of another tool", suggestion=f"write {name}")
    return name


def _check_folder(text: str) -> str:
    return "." if text.strip().rstrip("/") in (".", "") and text.strip() else inner_path(text)


def _build(table: SectionReader) -> TaskImage | None:
    owner = table.find_one(("name", "build"), "the image")
    if not owner:
        return None
    others = ("dockerfile", "target", "args")
    table.reject_beside(owner, others if owner == "name" else ("login",))
    if owner == "name":
        return table.get("name"), None, table.get("login")
    path = table.get("build")
    if path is None:
        return None
    given = {name: value for name in others if (value := table.get(name)) is not None}
    return None, ImageBuild(path=path, **given), None


_TABLE = SectionSpec(
    "image",
    "The image as a table: one of `name` and `build`.",
    (
        FieldSpec(
            "name",
            text_kind("an image's name such as python:3.12", _check_name),
            "An image of a registry.",
            "ghcr.io/team/image:1",
        ),
        FieldSpec(
            "build",
            text_kind("a folder within the working folder such as . or docker", _check_folder),
            "The folder that the image is built from, by the node that runs the work: within the "
            "working folder, which is frozen and sent along. Built once on each node for the same "
            "content.",
            ".",
        ),
        FieldSpec(
            "dockerfile",
            text_kind("a path within that folder", inner_path),
            "With `build`: the Dockerfile.",
            "docker/Dockerfile.train",
            "Dockerfile",
        ),
        FieldSpec(
            "target",
            text_kind("a stage's name", numbers=True),
            "With `build`: the stage to build.",
            "train",
            "the last one",
        ),
        FieldSpec(
            "args",
            named_texts(
                "build arguments, each with a text",
                matching(
                    _VARIABLE, "is no build argument's name", expected="letters, digits and _"
                ),
                missing="the argument has no value",
            ),
            "With `build`: build arguments. They stay in the image's history: no passwords.",
            "{PYTHON: 3.12}",
        ),
        FieldSpec(
            "login",
            text_kind(
                "a secret's name",
                matching(
                    _VARIABLE,
                    "is no secret's name",
                    expected="a name that `cavvy secret set` was given",
                ),
            ),
            "With `name`: the secret that logs in to the registry, USER:PASSWORD. It is used to "
            "pull and then removed.",
            "GHCR_LOGIN",
        ),
    ),
    _build,
    hints_for(
        {
            "write `build`": "context",
            "write `dockerfile`": "file",
            "write `args`": "build_args",
            "write `login`, with a secret's name": "registry_auth",
            "put it into `name`": "tag",
        }
    ),
)
IMAGE = either(
    text_kind("a container image such as python:3.12 or ghcr.io/team/image@sha256:…", _check_name),
    lambda name: (name, None, None),
    _TABLE,
)
