"""Makes a task of an MLflow project: `cavvy run MLproject -- -e ENTRY_POINT -P NAME=VALUE`, with
the words of `mlflow run`.

The format is that of https://mlflow.org/docs/latest/ml/projects.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from cavvy.capabilities.importers.dependency_files import (
    list_required,
    read_conda,
    split_options,
)
from cavvy.capabilities.importers.plain_yaml import read_table
from cavvy.spec.problems import nearest, slug

NAME = "MLproject"
_KEYS = ("name", "conda_env", "python_env", "docker_env", "entry_points")
_TYPES = ("string", "float", "path", "uri", "int", "integer", "bool", "boolean")
_REFERENCE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")


def read_project(
    path: Path, text: str, arguments: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of the task of a project, and notes. `arguments` are those of `mlflow run`.
    Raises ValueError for a project that cannot be run.
    """
    project = read_table(path, text, "MLflow project")
    notes: list[str] = []
    for key in project:
        if key not in _KEYS:
            if near := nearest(str(key), _KEYS):
                message = f"an MLflow project has no key {key!r}; did you mean {near}?"
                raise ValueError(f"{path}: {message}")
            notes.append(f"MLflow does not read the key {key!r}, and neither does Cavvy")
    entry, given = _read_arguments(arguments)
    command = _find_command(path, project, entry, given, notes)
    keys: dict[str, Any] = {"run": command}
    if name := slug(str(project.get("name") or "")):
        keys["name"] = name
    named = ("conda_env", "python_env", "docker_env")
    stated = [key for key in named if project.get(key) is not None]
    if len(stated) > 1:
        raise ValueError(f"{path}: {' and '.join(stated)} exclude each other; keep one of them")
    if "docker_env" in stated:
        _add_image(path, project["docker_env"], keys, notes)
    elif "python_env" in stated:
        keys["setup"] = _read_python(path, str(project["python_env"]), notes)
    elif "conda_env" in stated:
        file = _find_file(path, str(project["conda_env"]))
        if setup := read_conda(path.parent, file, notes):
            keys["setup"] = setup.keys
            keys["run"] = f"{setup.begin}\n{command}" if setup.begin else command
    notes.append(
        "no run of MLflow is made before the command; it makes its own, in ./mlruns or where "
        "MLFLOW_TRACKING_URI says"
    )
    return keys, notes


def _read_arguments(words: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return the entry point and the parameters of a command line. Raises ValueError."""
    entry, given, left = "main", dict[str, str](), list(words)
    while left:
        word = left.pop(0)
        option, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if word.startswith(("-P", "-e")) and len(word) > 2 and not word.startswith("--"):
            option, equals, value = word[:2], "=", word[2:]
        if option not in ("-e", "--entry-point", "-P", "--param-list"):
            expected = "-e ENTRY_POINT or -P NAME=VALUE"
            raise ValueError(f"{word!r} is no option here; expected {expected}")
        if not equals:
            if not left:
                raise ValueError(f"{word} lacks a word")
            value = left.pop(0)
        if option in ("-e", "--entry-point"):
            entry = value
            continue
        name, equals, text = value.partition("=")
        if not equals or not name:
            raise ValueError(f"-P {value}: expected NAME=VALUE")
        if name in given:
            raise ValueError(f"-P {name} is given twice")
        given[name] = text
    return entry, given


def _find_command(
    path: Path, project: Mapping[str, Any], entry: str, given: Mapping[str, str], notes: list[str]
) -> str:
    """Return the command of an entry point with its parameters. Raises ValueError."""
    points = project.get("entry_points") or {}
    if not isinstance(points, dict):
        raise ValueError(f"{path}: `entry_points` is no table")
    point = points.get(entry)
    if point is None:
        suffix = Path(entry).suffix
        if suffix in (".py", ".sh") and (path.parent / entry).is_file():
            program = "python3" if suffix == ".py" else "${SHELL:-bash}"
            return " ".join((program, quote(entry), *_list_extra(given)))
        known = ", ".join(map(str, points)) or "none"
        first = next(iter(points), "NAME")
        hint = f"`cavvy run {path.name} -- -e {first}` runs one"
        raise ValueError(f"{path}: there is no entry point {entry}; it has {known}: {hint}")
    if not isinstance(point, dict) or not isinstance(point.get("command"), str):
        raise ValueError(f"{path}: the entry point {entry} has no `command`")
    values = _fill_parameters(path, entry, point.get("parameters") or {}, given, notes)
    command = _fill(path, entry, str(point["command"]), values)
    extra = {name: text for name, text in given.items() if name not in values}
    return " ".join((command, *_list_extra(extra)))


def _fill(path: Path, entry: str, command: str, values: Mapping[str, str]) -> str:
    """Return a command with its parameters. `{{` and `}}` are braces. Raises ValueError."""

    def find(found: re.Match[str]) -> str:
        if found[0] in ("{{", "}}"):
            return found[0][0]
        if found[1] in values:
            return quote(values[found[1]])
        known = ", ".join(values) or "none"
        where = f"{path}: the command of {entry} has {found[0]}, which is no parameter"
        raise ValueError(f"{where}; it has {known}, and `{{{{` is a brace")

    return _REFERENCE.sub(find, command)


def _list_extra(given: Mapping[str, str]) -> list[str]:
    """Return parameters that are not declared, which follow the command as with MLflow."""
    return [f"--{name} {quote(text)}" for name, text in given.items()]


def _fill_parameters(
    path: Path, entry: str, declared: object, given: Mapping[str, str], notes: list[str]
) -> dict[str, str]:
    if not isinstance(declared, dict):
        raise ValueError(f"{path}: the `parameters` of {entry} are no table")
    values: dict[str, str] = {}
    for name, stated in declared.items():
        kind = stated.get("type", "string") if isinstance(stated, dict) else stated
        default = stated.get("default") if isinstance(stated, dict) else None
        if not isinstance(kind, str):
            raise ValueError(f"{path}: the parameter {name} has the unknown type {kind!r}")
        if kind not in _TYPES:
            notes.append(f"{name} is passed as text, as MLflow does with a type such as {kind}")
        if name not in given and default is None:
            chosen = "" if entry == "main" else f"-e {entry} "
            hint = f"`cavvy run {path.name} -- {chosen}-P {name}=VALUE` sets it"
            raise ValueError(f"{path}: {entry} needs the parameter {name}: {hint}")
        value = given.get(str(name), str(default))
        if kind == "float":
            try:
                float(value)
            except ValueError:
                raise ValueError(f"{path}: -P {name}={value}: expected a number") from None
        if kind == "path" and "://" in value:
            raise ValueError(
                f"{path}: -P {name}={value}: MLflow would copy it first; write `inputs` in a Cavvy "
                "file, which do so"
            )
        if kind == "path" and value.startswith(("/", "~")):
            notes.append(f"{name} is {value} on the node: only the folder of the project is sent")
        values[str(name)] = value
    return values


def _add_image(path: Path, docker: object, keys: dict[str, Any], notes: list[str]) -> None:
    if not isinstance(docker, dict) or not isinstance(docker.get("image"), str):
        raise ValueError(f"{path}: `docker_env` has no `image`")
    for key in docker:
        if key not in ("image", "volumes", "environment", "build_context"):
            raise ValueError(f"{path}: `docker_env.{key}` is unknown")
    if docker.get("volumes"):
        hint = "write a Cavvy file with `volumes`"
        raise ValueError(f"{path}: `docker_env.volumes` name folders of this machine; {hint}")
    keys["image"] = docker["image"]
    env: dict[str, str] = {}
    for each in docker.get("environment") or ():
        if isinstance(each, list) and len(each) == 2:
            env[str(each[0])] = str(each[1])
        else:
            notes.append(f"the variable {each} of this machine is not sent; --env {each} sends it")
    if env:
        keys["env"] = env
    if docker.get("build_context"):
        notes.append(f"the image {docker['image']} is pulled, and not built")


def _find_file(path: Path, name: str) -> str:
    """Return the path of a file of the project. Raises ValueError."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{path}: {name} is outside of the project")
    if not (path.parent / name).is_file():
        raise ValueError(f"{path}: there is no file {name}")
    return name


def _read_python(path: Path, name: str, notes: list[str]) -> dict[str, Any]:
    """Return the setup for a `python_env`, which is as pip reads it."""
    file = path.parent / _find_file(path, name)
    table = read_table(file, file.read_text("utf-8"), "environment of Python")
    lines = [
        str(each) for key in ("build_dependencies", "dependencies") for each in table.get(key) or ()
    ]
    if table.get("python"):
        notes.append(f"{name} names Python {table['python']}; the node's own python3 is used")
    uses = [each for each in list_required(lines) if (path.parent / each).exists()]
    words = " ".join(map(quote, split_options(lines)))
    return {"run": f"python3 -m pip install {words}", "uses": uses}
