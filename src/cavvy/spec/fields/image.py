"""The fields `image` and `setup`: the container image in which a task runs, from its name or a
Dockerfile, and the commands that run on each node before the task, with the files that they use.
"""

import re

from cavvy.domain.tasks import ImageBuild
from cavvy.spec.fields.kinds import (
    FieldSpec,
    ListKind,
    ScalarKind,
    SectionReader,
    WrongValue,
    either,
    filled,
    matching,
    named_texts,
    read_text,
    section,
    text_kind,
)
from cavvy.spec.fields.places import inner_path
from cavvy.spec.problems import shown
from cavvy.spec.tree import ScalarNode

_VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
# a tuple of the image's name, the build, and the name of the secret with the registry login; each
# may be None
TaskImage = tuple[str | None, ImageBuild | None, str | None]


def _check_name(text: str) -> str:
    """Check that a string is an image name in the syntax of container engines. Raises
    WrongValue."""
    name = text.strip().removeprefix("docker:").removeprefix("docker://")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,400}", name):
        raise WrongValue(f"{shown(text)} is not an image name")
    if name != text.strip():
        raise WrongValue(
            f"{shown(text)} begins with a prefix that only another tool uses",
            suggestion=f"write {name}",
        )
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


IMAGE_NAME = text_kind("an image's name such as python:3.12", _check_name)
_TABLE = section(
    "image",
    _build,
    name=IMAGE_NAME,
    build=text_kind("a folder within the working folder, such as . or docker", _check_folder),
    dockerfile=text_kind("a path within the folder `build`", inner_path),
    target=text_kind("a stage's name", numbers=True),
    args=named_texts(
        "build arguments, each with a string value",
        matching(_VARIABLE, "is not a build argument name", expected="letters, digits and _"),
        missing="the argument has no value",
    ),
    login=text_kind(
        "a secret's name",
        matching(
            _VARIABLE,
            "is not a secret name",
            expected="a name that was set with `cavvy secret set`",
        ),
    ),
)
IMAGE = either(
    text_kind("a container image such as python:3.12 or ghcr.io/team/image@sha256:…", _check_name),
    lambda name: (name, None, None),
    _TABLE,
)


def _read_commands(node: ScalarNode) -> str:
    if node.plain and type(node.value) in (int, float):
        raise WrongValue(f"{node.text} is a number")
    return filled(read_text(node))


COMMANDS = ScalarKind(
    "shell commands",
    _read_commands,
    instead="write `|` after the key, and below it one command a line, without `-`",
)


_FILE = text_kind(
    "a file or folder within the working folder, such as requirements.txt", inner_path
)
_SETUP_TABLE = section(
    "setup",
    lambda table: table.make(lambda run, uses=None: (run, uses)),
    run=FieldSpec(COMMANDS, required=True),
    uses=ListKind(_FILE),
)
# The value is a tuple of the commands and the files that the commands use.
SETUP = either(COMMANDS, lambda run: (run, None), _SETUP_TABLE)
