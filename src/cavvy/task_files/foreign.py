"""What reads task files of other tools: capabilities contribute it, and `task_files` asks it.

`spec` reads Cavvy's own files, without any of this.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path, PurePath
from shlex import quote
from typing import TYPE_CHECKING, Any, Protocol

from cavvy.domain.tasks import Scalar, TaskSpec
from cavvy.domain.values import Struct
from cavvy.frame.discover import find_capabilities, list_file_tools, load, say_left_out
from cavvy.spec.own_folder import explain_unfit
from cavvy.spec.problems import ProblemNotes, SourceMark, SpecProblem, listed
from cavvy.spec.translation import CAVVY, KeptKey, Translation
from cavvy.spec.tree import MapNode, Node, compose_all, list_filled

if TYPE_CHECKING:
    from cavvy.domain.node_pools import NodePool

_INTERPRETERS = {".py": "python", ".sh": "bash"}


class ReadOptions(Struct, frozen=True, kw_only=True):
    """Options from the command line for reading a file.

    `dialect` names the file's tool. If `dialect` is "", the tool is detected from the file's keys,
    name or folder. `text`, if given, is read instead of the file. `overrides` is a YAML table with
    keys of the task file; its values replace the file's values. If `serves` is true, the file must
    describe a service, and otherwise a job. If `takes_folder` is true, `text` is a command, which
    gets the current folder as its working folder.
    """

    dialect: str = ""
    overrides: str = ""
    text: str | None = None
    serves: bool = False
    takes_folder: bool = False


class TaskSource:
    """A text that is read as a task file.

    `file` names it in messages. `path` is given if the task is going to be submitted: the name of
    the file, its folder and the current folder then count.
    """

    def __init__(
        self,
        text: str,
        file: str | Path,
        params: Mapping[str, Scalar],
        now: datetime | None,
        options: ReadOptions,
    ) -> None:
        self.path = file if isinstance(file, Path) else None
        self.params, self.options = params, options
        self.notes = ProblemNotes(str(file), text.removeprefix("\ufeff"), now)

    @property
    def text(self) -> str:
        return self.notes.text

    def make_notes(self) -> ProblemNotes:
        """Return notes on this text without the problems that were found so far."""
        return ProblemNotes(self.notes.file, self.text, self.notes.now)

    @cached_property
    def documents(self) -> "Sequence[Node]":
        """The documents of the text as YAML, without empty ones. Problems of the YAML are added to
        `notes`. Raises SpecError if the text is a script.
        """
        documents = compose_all(self.text, self.notes)
        if len(self.notes) or not any(isinstance(each, MapNode) for each in documents):
            _refuse_script(self.make_notes())
        return list_filled(documents)


class Substitute(Struct, frozen=True, kw_only=True):
    """The text that is read instead of a file whose meaning depends on this machine.

    `tool` is the tool whose format it has, or "" to detect it as for the file. `guess`, `kept` and
    `notes` are added to what is read.
    """

    text: str
    tool: str = ""
    guess: str = ""
    kept: tuple[KeptKey, ...] = ()
    notes: tuple[str, ...] = ()


class ScriptTask(Struct, frozen=True, kw_only=True):
    """The task of a script, as keys of a task file, and remarks for the user."""

    keys: dict[str, Any]
    notes: tuple[str, ...] = ()


class LineTask(Struct, frozen=True, kw_only=True):
    """The task of a command line of another tool: the words of the command that runs here, other
    keys of a task file, and remarks for the user."""

    command: tuple[str, ...]
    keys: dict[str, Any]
    notes: tuple[str, ...] = ()


class TaskReader(Protocol):
    """Reads files of other tools. None as an answer means: this file is not for me."""

    def translate(self, source: TaskSource) -> Translation | None:
        """Translate a text, if its content or the options say that it is for one of the tools.
        Raises SpecError with all problems.
        """

    def substitute(self, source: TaskSource) -> Substitute | None:
        """Return what is read instead of a file on this machine. Raises SpecError and OSError."""

    def explain(self, source: TaskSource) -> SpecProblem | None:
        """Return a remark on a text that is no valid Cavvy file, if it may be for another tool."""

    def make_ready(self, task: TaskSpec, found: Translation) -> TaskSpec:
        """Return the task with the variables and the shell that its commands expect."""

    def read_script(
        self, path: Path, arguments: Sequence[str], here: Path, *, processes: int
    ) -> ScriptTask | None:
        """Return the task of a script that is run from the folder `here`. `processes` is how many
        GPUs its job has. Raises ValueError for a file that cannot be run, and OSError.
        """

    def read_line(self, words: Sequence[str]) -> LineTask | None:
        """Return the task of a command that submits a job to another tool. Raises ValueError for
        what a job here lacks.
        """

    def read_pool(self, text: str, *, file: str, project: str) -> "NodePool | None":
        """Return the pool that a file describes. Raises SpecError with every problem."""


def list_readers() -> list[TaskReader]:
    """Return what reads files of other tools. What cannot be imported is left out, and the log
    says why."""
    return [reader for _, reader in _list_readers()]


def get_reader(tool: str) -> TaskReader:
    """Return the reader of a tool's files, which has read one."""
    return next(reader for tools, reader in _list_readers() if tool in tools)


def _list_readers() -> list[tuple[tuple[str, ...], TaskReader]]:
    readers = []
    for capability in find_capabilities().capabilities:
        for form in capability.task_files:
            try:
                readers.append((form.tools, load(form.place)))
            except Exception as error:  # noqa: BLE001 - code of others raises anything
                say_left_out(capability, form.place, error)
    return readers


def find_tool(name: str, notes: ProblemNotes) -> str:
    """Return the tool with this name, or "" if the name is empty. Raises SpecError for an unknown
    name.
    """
    tools = (*list_file_tools(), CAVVY)
    found = next((each for each in tools if each.lower() == name.lower()), "")
    if name and not found:
        expected = listed(each.lower() for each in tools)
        notes.outside(f"--as {name}", "unknown tool", expected=expected)
        notes.check()
    return found


def _refuse_script(notes: ProblemNotes) -> None:
    """Raises SpecError if the text is a script."""
    program = _find_interpreter(notes.text, notes.file)
    if not program:
        return
    path = PurePath("FILE" if notes.file == "-" else notes.file)
    unfit = notes.file != "-" and explain_unfit(Path(notes.file).parent)
    folder = "FOLDER" if unfit else quote(str(path.parent))
    command = f"--workdir {folder} -- {program} {quote(path.name)}"
    hint = f"`cavvy run {command}` runs the script"
    if unfit:
        hint += f" from a folder, but not from {path.parent}, because {unfit}"
    if list_file_tools() and not unfit and notes.file != "-" and path.suffix in _INTERPRETERS:
        hint = f"`cavvy run {quote(str(path))}` runs the script"
    message = "the file is a script, not a task file"
    notes.add(SourceMark(line=1, column=1), message, expected="a task file", suggestion=hint)
    notes.check()


def _find_interpreter(text: str, file: str) -> str:
    """Return the program that runs the script, from the first line or else from the file's name, or
    "" if neither names a program.
    """
    words = text.partition("\n")[0].removeprefix("#!").split() if text.startswith("#!") else []
    names = [PurePath(each).name for each in words if not each.startswith("-")]
    program = next((each for each in names if each != "env"), "")
    return program or _INTERPRETERS.get(PurePath(file).suffix, "")
