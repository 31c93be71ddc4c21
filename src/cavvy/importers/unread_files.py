"""Recognises files that Cavvy does not read: scripts, batch scripts of Slurm and PBS, and files of
Docker Compose. The message names the kind of file, and the command or the file to write instead.
"""

import re
from collections.abc import Sequence
from pathlib import Path, PurePath
from shlex import quote

from cavvy.spec.own_folder import explain_unfit
from cavvy.spec.problems import ProblemNotes, SourceMark
from cavvy.spec.tree import MapNode, Node, compose_all

_INTERPRETERS = {".py": "python", ".sh": "bash"}
_DIRECTIVES = {"SBATCH": "Slurm", "PBS": "PBS"}
_DIRECTIVE = re.compile(rf"^#({'|'.join(_DIRECTIVES)})\s", re.MULTILINE)
_FIRST = SourceMark(line=1, column=1)


def compose_readable(notes: ProblemNotes) -> Sequence[Node]:
    """Return the documents of a file, and add the problems of the YAML to `notes`. Raises SpecError
    if the file is a script or a file of Docker Compose.
    """
    documents = compose_all(notes.text, notes)
    told = ProblemNotes(notes.file, notes.text, notes.now)
    tables = [each for each in documents if isinstance(each, MapNode)]
    if len(notes) or not tables:
        _check_script(told)
    elif any(_is_compose(each) for each in tables):
        hint = "write a Cavvy file with the `image` and the command of one service"
        message = "the file is for Docker Compose, which Cavvy does not read"
        told.add(_FIRST, message, expected="a task file", suggestion=hint)
    told.check()
    return documents


def _check_script(notes: ProblemNotes) -> None:
    program = _find_interpreter(notes.text, notes.file)
    if not program:
        return
    found = _DIRECTIVE.search(notes.text)
    kind = f"a batch script of {_DIRECTIVES[found[1]]}" if found else "a script"
    path = PurePath("FILE" if notes.file == "-" else notes.file)
    unfit = notes.file != "-" and explain_unfit(Path(notes.file).parent)
    folder = "FOLDER" if unfit else quote(str(path.parent))
    command = f"--workdir {folder} -- {program} {quote(path.name)}"
    hint = f"`cavvy run {command}` runs the script"
    if unfit:
        hint += f" from a folder, but not from {path.parent}, because {unfit}"
    if found:
        hint += f"; options such as --nodes and --gpu replace the lines of #{found[1]}"
    message = f"the file is {kind}, not a task file"
    notes.add(_FIRST, message, expected="a task file", suggestion=hint)


def _find_interpreter(text: str, file: str) -> str:
    """Return the program that runs the script, from the first line or else from the file's name, or
    "" if neither names a program.
    """
    words = text.partition("\n")[0].removeprefix("#!").split() if text.startswith("#!") else []
    names = [PurePath(each).name for each in words if not each.startswith("-")]
    program = next((each for each in names if each != "env"), "")
    return program or _INTERPRETERS.get(PurePath(file).suffix, "")


def _is_compose(table: MapNode) -> bool:
    return isinstance(table.get("services"), MapNode) and table.get("run") is None
