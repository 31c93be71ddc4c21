"""Finds the file beside or above a script that states its dependencies, and how these are
installed: with pip, or with the tool that made the file (conda, mamba or pixi).
"""

import os
import posixpath
import re
import tomllib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import Any

from cavvy.capabilities.importers.plain_yaml import read_table
from cavvy.domain.values import Struct

CONDA_FILES = ("environment.yml", "environment.yaml")
# A file that states dependencies, and how they are installed; the most exact one first.
_FILES = {
    "uv.lock": (
        "python3 -m pip install uv && uv export --quiet --frozen --no-emit-project --directory "
        "{folder} >/tmp/requirements-$$.txt && python3 -m pip install -r /tmp/requirements-$$.txt"
    ),
    "requirements.txt": "python3 -m pip install -r {file}",
    "pyproject.toml": "python3 -m pip install {folder}",
}
# The same where pip would look for packages at other places than uv.
_BY_UV = {
    "uv.lock": (
        "python3 -m pip install uv && uv sync --quiet --frozen --active --inexact "
        '--no-install-workspace --python "$(command -v python3)" --directory {folder}'
    ),
    "pyproject.toml": "python3 -m pip install uv && uv pip install --quiet {folder}",
}
# The environment lies in the folder of the setup, which later jobs find, or in that of an image.
_PLACE = '"${CAVVY_SETUP_DIR:-$HOME/.cavvy-setup}"'
_BEGIN = f". {_PLACE}/activate"
# Both tools activate an environment by commands that they print. conda makes environments of files
# by `env create`; mamba and micromamba do so by `create`.
_CONDA = """\
for conda in micromamba conda mamba ""; do
  command -v "$conda" >/dev/null 2>&1 && break
done
[ -n "$conda" ] || {{
  echo {name}' needs conda, mamba or micromamba on the node: add --image condaforge/miniforge3' >&2
  exit 1; }}
folder={place}
mkdir -p "$folder"
if [ "$conda" = conda ]; then
  conda env create --quiet --prefix "$folder/conda" --file {file}
  command='conda shell.posix activate'
else
  "$conda" create --yes --quiet --prefix "$folder/conda" --file {file}
  command="$conda shell activate --shell posix --prefix"
fi
cat > "$folder/activate" <<END
unset VIRTUAL_ENV
activation="\\$($command '$folder/conda')" || exit
eval "\\$activation"
END
{begin}"""
_PIXI = """\
command -v pixi >/dev/null 2>&1 || {{
  echo {name}' needs pixi on the node: add --image ghcr.io/prefix-dev/pixi' >&2
  exit 1; }}
folder={place}
mkdir -p "$folder/pixi"
cp {files} "$folder/pixi"
pixi install --frozen --manifest-path "$folder/pixi/{manifest}"
cat > "$folder/activate" <<END
unset VIRTUAL_ENV
activation="\\$(pixi shell-hook --frozen --manifest-path '$folder/pixi/{manifest}')" || exit
eval "\\$activation"
END
{begin}"""
# Keys of a table for uv that name places of packages.
_PLACES = ("sources", "index", "index-url", "extra-index-url", "find-links")
_NAME = re.compile(r"(?:[^:]*::)?([A-Za-z0-9_.-]+)")


class FileSetup(Struct, frozen=True, kw_only=True):
    """How what a file states is installed: the keys of a `setup`, and the line with which a command
    begins, so that it finds what was installed.
    """

    keys: dict[str, Any]
    begin: str = ""


def find_file_setup(path: Path, folder: Path, notes: list[str]) -> FileSetup | None:
    """Return the setup that installs what a file beside or above a script states, or None. Raises
    ValueError for a file that cannot be read.
    """
    for place in _list_folders(path, folder):
        for name, command in _FILES.items():
            if (place / name).is_file():
                found = str((place / name).relative_to(folder))
                if name == "pyproject.toml" and not _is_project(place / name):
                    continue
                notes.append(f"the setup installs what {found} states")
                above = os.path.relpath(place, folder)
                if name in _BY_UV and _needs_uv(place):
                    command = _BY_UV[name]
                setup = command.format(file=quote(found), folder=quote(above))
                beside = str((place / "pyproject.toml").relative_to(folder))
                uses = {"uv.lock": [found, beside], "requirements.txt": [found]}.get(name)
                return FileSetup(keys=_make_keys(setup, uses))
        for name in CONDA_FILES:
            if (place / name).is_file():
                return read_conda(folder, str((place / name).relative_to(folder)), notes)
        if (place / "pixi.lock").is_file():
            return _read_pixi(place, folder, notes)
    return None


def read_conda(folder: Path, name: str, notes: list[str]) -> FileSetup | None:
    """Return the setup for a file of conda with this path in the folder, or None if it states
    nothing. What only pip installs needs no conda. Raises ValueError.
    """
    file = folder / name
    table = read_table(file, file.read_text("utf-8"), "environment of conda")
    stated = table.get("dependencies")
    if not isinstance(stated, list | None):
        raise ValueError(f"{file}: `dependencies` is no list")
    of_pip = [
        str(each)
        for part in stated or ()
        if isinstance(part, dict)
        for each in part.get("pip") or ()
    ]
    of_conda = [part for part in stated or () if isinstance(part, str)]
    uses = None if _names_place(of_pip) else [name, *_list_named(folder, name, of_pip)]
    needed = {found[1] for each in of_conda if (found := _NAME.match(each))} - {"pip", "python"}
    if needed:
        notes.append(f"the setup makes the environment of {name} with conda, which the node needs")
        run = _CONDA.format(name=quote(name), file=quote(name), place=_PLACE, begin=_BEGIN)
        return FileSetup(keys=_make_keys(run, uses), begin=_BEGIN)
    if table.get("variables"):
        notes.append(f"{name} has `variables`, which only conda sets: state them with --env")
    if not of_pip:
        return None
    notes.append(f"the setup installs with pip what {name} states")
    if version := next((each for each in of_conda if re.match(r"python\b.*\d", each)), ""):
        notes.append(f"{name} names {version}; the node's own python3 runs it")
    beside = posixpath.dirname(name) or "."
    words = " ".join(quote(word) for word in split_options(of_pip))
    command = f"python3 -m pip install {words}"
    command = command if beside == "." else f"cd {quote(beside)} && {command}"
    return FileSetup(keys=_make_keys(command, uses))


def _make_keys(run: str, uses: Sequence[str] | None) -> dict[str, Any]:
    return {"run": run} if uses is None else {"run": run, "uses": list(uses)}


def _names_place(lines: Sequence[str]) -> bool:
    """Return whether lines of pip install a folder, which may need all of its files."""
    return any(re.match(r"(-e|--editable)\b|[./]", each) for each in lines)


def split_options(lines: Sequence[str]) -> list[str]:
    """Return lines of a file of requirements as words of pip: an option and its value are two."""
    words: list[str] = []
    for each in lines:
        option, space, rest = each.partition(" ")
        apart = space and option.startswith("-")
        words += [option, rest.strip()] if apart else [each]
    return words


def list_required(lines: Sequence[str]) -> list[str]:
    """Return the files that lines of a file of requirements name."""
    words = split_options(lines)
    return [
        after
        for word, after in pairwise(words)
        if word in ("-r", "-c", "--requirement", "--constraint") and "://" not in after
    ]


def _list_named(folder: Path, name: str, lines: Sequence[str]) -> list[str]:
    """Return the paths of the files that lines of pip name beside the file `name`."""
    beside = posixpath.dirname(name)
    found = [posixpath.normpath(posixpath.join(beside, each)) for each in list_required(lines)]
    return [each for each in found if not each.startswith(("/", "..")) and (folder / each).exists()]


def _read_pixi(place: Path, folder: Path, notes: list[str]) -> FileSetup | None:
    """Return the setup for a `pixi.lock`, or None, with a note, if it cannot be installed alone."""
    name = str((place / "pixi.lock").relative_to(folder))
    manifest = next((n for n in ("pixi.toml", "pyproject.toml") if (place / n).is_file()), "")
    if not manifest:
        notes.append(f"{name} is not installed: there is no pixi.toml or pyproject.toml beside it")
        return None
    if _names_folder(place / manifest):
        reason = f"{manifest} names a package by its path; write a `setup` with `pixi install`"
        notes.append(f"{name} is not installed: {reason}")
        return None
    notes.append(f"the setup makes the environment of {name} with pixi, which the node needs")
    files = [str((place / each).relative_to(folder)) for each in ("pixi.lock", manifest)]
    run = _PIXI.format(
        **{"name": quote(name), "manifest": manifest, "place": _PLACE, "begin": _BEGIN},
        files=" ".join(map(quote, files)),
    )
    return FileSetup(keys=_make_keys(run, files), begin=_BEGIN)


def _names_folder(path: Path) -> bool:
    """Return whether a table of dependencies in a file of TOML has a `path`. Raises ValueError."""
    try:
        tables: list[Any] = [tomllib.loads(path.read_text("utf-8"))]
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: this is no TOML: {error}") from None
    while tables:
        for key, value in tables.pop().items():
            if not isinstance(value, dict):
                continue
            if key.endswith("dependencies") and any(
                isinstance(each, dict) and "path" in each for each in value.values()
            ):
                return True
            tables.append(value)
    return False


def _is_project(path: Path) -> bool:
    """Return whether a `pyproject.toml` states dependencies, and not only settings of tools."""
    project = _read_toml(path).get("project")
    return isinstance(project, dict) and bool(project.get("dependencies"))


def _needs_uv(place: Path) -> bool:
    """Return whether a project in this folder has packages that pip would not find: of indexes,
    repositories or folders that only a table for uv names, or of several indexes, in whose lines
    `uv export` does not name the index. A single index that no file names is also that of pip, or
    the digests in the lines of `uv export` show that it is another one.
    """
    if any(_read_toml(place / "uv.toml").get(each) for each in _PLACES):
        return True
    match _read_toml(place / "pyproject.toml"):
        case {"tool": {"uv": dict(table)}} if any(map(table.get, _PLACES)):
            return True
    match _read_toml(place / "uv.lock"):
        case {"package": [*packages]}:
            found = [each.get("source") for each in packages if isinstance(each, dict)]
            indexes = {str(each.get("registry", "")) for each in found if isinstance(each, dict)}
            return len(indexes - {""}) > 1
    return False


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}  # it is not there, or uv or pip says what is wrong


def _list_folders(path: Path, folder: Path) -> Iterator[Path]:
    """Yield the folder of a script, and those above it that are submitted."""
    for place in path.parents:
        yield place
        if place == folder:
            return
