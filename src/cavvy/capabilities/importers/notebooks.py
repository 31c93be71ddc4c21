"""Makes a task of a Jupyter notebook, which papermill runs without a screen.

`cavvy run nb.ipynb --gpu A100 -- s3://bucket/done.ipynb -p lr 0.1` runs the notebook with the
parameter `lr`, and sends the executed notebook to the bucket while it runs. Parameters are those of
papermill: https://papermill.readthedocs.io/en/latest/usage-parameterize.html
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from shlex import join
from typing import Any

from cavvy.capabilities.importers.dependency_files import FileSetup
from cavvy.domain.tasks import URL_SCHEMES

SUFFIX = ".ipynb"
_INSTALL = "python3 -m pip install papermill ipykernel"
# In an environment of another tool, which may have both, and no pip.
_INSTALL_INSIDE = f"""\
python3 -c 'import ipykernel, papermill' 2>/dev/null || {_INSTALL} || {{
  echo 'the environment needs papermill and ipykernel, or pip, which installs them' >&2
  exit 1; }}"""
_EVERY = "30s"
_MOST_MIB = 16
_OLD_PYTHON = "Python 2"
# Kernels by the beginnings of their names; notebooks may lack the language.
_KERNELS = {"ir": "R", "julia": "Julia", "bash": "Bash", "sas": "SAS", "octave": "Octave"}
_ASKS = re.compile(r"(?<![\w.])(?:raw_)?input\(")
_OF_COLAB = re.compile(r"^(?:import|from) google\.colab\b", re.MULTILINE)
# papermill's options for parameters, and how many words follow each
_PARAMETERS = {
    **{"-p": 2, "--parameters": 2, "-r": 2, "--parameters_raw": 2},
    **{"-f": 1, "--parameters_file": 1, "-y": 1, "--parameters_yaml": 1},
    **{"-b": 1, "--parameters_base64": 1, "--execution-timeout": 1, "--start-timeout": 1},
}


def read_notebook_text(path: Path) -> str:
    """Return the text of a notebook. Raises ValueError if it is too large, OSError and
    UnicodeDecodeError."""
    size = path.stat().st_size
    if size > _MOST_MIB << 20:
        message = f"{path}: the notebook has {size >> 20} MiB, and at most {_MOST_MIB} are read"
        hint = "`jupyter nbconvert --clear-output --inplace` drops the outputs of its cells"
        raise ValueError(f"{message}; {hint}")
    return path.read_text("utf-8")


def read_notebook(
    path: Path, text: str, arguments: Sequence[str], name: str, setup: FileSetup | None
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of the task of a notebook, and notes. `name` is its path in the working
    folder, and `setup` installs what a file beside it states. Raises ValueError for a file that
    cannot be run.
    """
    content = _read_content(path, text)
    cells: list[dict[str, Any]] = content["cells"]
    words = list(arguments)
    place = words.pop(0) if words and not words[0].startswith("-") else ""
    has_parameters = _check_words(words)
    notes = _list_remarks(content)
    tagged = any("parameters" in _list_tags(cell) for cell in cells)
    if has_parameters and not tagged:
        notes.append(
            f"no cell of {path.name} has the tag `parameters`, so a new first cell sets them, and "
            "a later cell may replace them"
        )
    executed = f"{name.removesuffix(SUFFIX)}.out{SUFFIX}"
    command = ["python3", "-m", "papermill", name, executed, "-k", "python3", "--log-output"]
    command += ["--no-progress-bar", "--cwd", str(Path(name).parent), *words]
    keys: dict[str, Any] = {"run": f"exec {join(command)}"}
    keys["setup"] = _add_setup(setup)
    if place:
        keys["outputs"] = [_make_output(executed, place)]
    else:
        notes.append(
            f"the executed notebook is {executed} in the job's folder, where `cavvy cp` finds it "
            "until the job has ended; name where it goes, such as `-- s3://bucket/done.ipynb`, or "
            "`-- done.ipynb` on this machine"
        )
    return keys, notes


def _read_content(path: Path, text: str) -> dict[str, Any]:
    content: dict[str, Any]
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: the file is no notebook: it is not JSON") from None
    cells = content.get("cells") if isinstance(content, dict) else None
    if not isinstance(cells, list) or not all(isinstance(each, dict) for each in cells):
        hint = "`jupyter nbconvert --to notebook` writes it in the format 4"
        raise ValueError(f"{path}: the file is no notebook of the format 4; {hint}")
    language = _find_language(content.get("metadata"))
    if language.lower() != "python":
        hint = "write a Cavvy file with an image that has its kernel"
        if language == _OLD_PYTHON:
            hint = "`2to3` rewrites its cells"
        raise ValueError(f"{path}: the notebook is for {language}, not for Python 3; {hint}")
    return content


def _find_language(metadata: Any) -> str:
    """Return the language of a notebook, as its kernel or its editor states it."""
    table = metadata if isinstance(metadata, dict) else {}
    kernel, info = (
        each if isinstance(each, dict) else {}
        for each in (table.get("kernelspec"), table.get("language_info"))
    )
    name, version = str(kernel.get("name") or ""), str(info.get("version") or "")
    known = next((each for prefix, each in _KERNELS.items() if name.startswith(prefix)), "python")
    language = str(kernel.get("language") or info.get("name") or known)
    is_old = language.lower() == "python" and (name == "python2" or version.startswith("2."))
    return _OLD_PYTHON if is_old else language


def _list_remarks(content: dict[str, Any]) -> list[str]:
    """Say what a notebook expects of the place where it was written."""
    code = [_read_source(each) for each in content["cells"] if each.get("cell_type") == "code"]
    notes = []
    if number := next((at for at, text in enumerate(code, 1) if _asks(text)), 0):
        notes.append(
            f"the code cell {number} asks for input, which fails without a person: set a variable "
            "with -p instead"
        )
    if any(_OF_COLAB.search(text) for text in code):
        notes.append("google.colab exists only in Colab; the cells that import it fail elsewhere")
    if any("/kaggle/input" in text for text in code):
        notes.append(
            "the data of Kaggle are not here: `inputs` of a Cavvy file bring data to nodes"
        )
    return notes


def _asks(text: str) -> bool:
    """Return whether a line that is no comment asks for input."""
    lines = text.split("\n") if "input(" in text else []
    return any(_ASKS.search(each) for each in lines if not each.lstrip().startswith("#"))


def _read_source(cell: dict[str, Any]) -> str:
    source = cell.get("source")
    return "".join(map(str, source)) if isinstance(source, list) else str(source or "")


def _list_tags(cell: dict[str, Any]) -> list[Any]:
    metadata = cell.get("metadata")
    tags = metadata.get("tags") if isinstance(metadata, dict) else None
    return tags if isinstance(tags, list) else []


def _check_words(words: Sequence[str]) -> bool:
    """Return whether the words set parameters. Raises ValueError for an option without its
    words."""
    left, found = list(words), False
    while left:
        word = left.pop(0)
        count = _PARAMETERS.get(word, 0)
        if len(left) < count:
            expected = f"{word} NAME VALUE" if count == 2 else f"{word} VALUE"
            raise ValueError(f"{word} lacks a word: expected {expected}")
        if not word.startswith("-"):
            hint = "write a parameter as -p NAME VALUE"
            raise ValueError(f"{word!r} is no option of papermill; {hint}")
        del left[:count]
        found = found or bool(count)
    return found


def _add_setup(setup: FileSetup | None) -> dict[str, Any]:
    if setup is None:
        return {"run": _INSTALL, "uses": []}
    run = setup.keys["run"]
    # a setup with a `begin` ends in the environment in which the notebook runs
    return {
        **setup.keys,
        "run": f"{run}\n{_INSTALL_INSIDE}" if setup.begin else f"{_INSTALL} && {run}",
    }


def _make_output(executed: str, place: str) -> dict[str, Any]:
    """Return the output that brings the executed notebook to a bucket, or a path here."""
    if place.startswith(tuple(f"{scheme}://" for scheme in URL_SCHEMES)):
        return {"source": executed, "target": place, "every": _EVERY}
    return {"source": executed, "target": str(Path(place).expanduser().absolute())}
