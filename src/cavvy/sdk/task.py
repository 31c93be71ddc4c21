"""A task that is described in Python or read from a task file."""

import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from cavvy.domain.values import replace
from cavvy.sdk.errors import InvalidArgument, InvalidTask
from cavvy.sdk.values import check_params, check_type, to_plain, to_scalar, write_text

if TYPE_CHECKING:
    from cavvy.domain.tasks import Scalar
    from cavvy.spec.fields.task import TaskKeys
    from cavvy.task_files import LoadedTask

_SHOWN = "Task"  # the name of a task in error messages, if the task was not read from a file


class Task:
    """A task: its commands and their requirements. The arguments are the keys of a [task
    file](task-file.md). The attribute `text` contains the task in the format of a task file.

    A length of time may be a `timedelta`, a point in time may be a `datetime` with a time zone, and
    a path may be a `Path`. Relative paths are relative to the current folder. Each parameter in
    `params` needs a default. Raises TypeError. Raises InvalidTask, which lists all mistakes.
    """

    def __init__(self, run: str, **keys: Unpack["TaskKeys"]) -> None:
        check_type(run, str, "run")
        table = {name: to_plain(value, name) for name, value in keys.items() if value is not None}
        if run or not {"batch", "edge"} & table.keys():  # which may do without
            table["run"] = str(run)
        self._set(Path.cwd() / _SHOWN, write_text(table), {}, "cavvy", {})

    @classmethod
    def from_file(
        cls,
        path: str | PathLike[str],
        *,
        params: Mapping[str, object] | None = None,
        send: Iterable[str | PathLike[str]] = (),
    ) -> Self:
        """Read a task file of Cavvy, SkyPilot or dstack. `params` replace the defaults of the
        file's parameters. `send` are files and folders outside of the file's repository that may be
        sent if the file names them. Raises InvalidTask.
        """
        from cavvy.spec import SpecError, read_file
        from cavvy.spec.sent_folders import name_places

        file = Path(path).expanduser().absolute()
        try:
            text = read_file(file)
        except SpecError as error:
            raise _make_invalid(error, str(path)) from error
        task = cls.__new__(cls)
        task._set(file, text, _scalars(params), "", {})
        task._sent = name_places(fspath(each) for each in send)
        return task

    def replace(self, **keys: Unpack["TaskKeys"]) -> "Task":
        """Return a copy of the task with new values for these keys. In a section such as
        `resources`, only the given keys change. This method cannot change `params`; pass new values
        of parameters to `Client.submit`. Raises InvalidTask.
        """
        if "params" in keys:
            raise TypeError("`params` cannot be replaced; pass them to `Client.submit`")
        changes = {name: to_plain(value, name) for name, value in keys.items()}
        task = type(self).__new__(type(self))
        merged = _merge(self._overrides, changes)
        task._set(self._file, self.text, self._params, self._dialect, merged)
        task._sent = self._sent
        return task

    def _set(
        self,
        file: Path,
        text: str,
        params: Mapping[str, "Scalar"],
        dialect: str,
        overrides: Mapping[str, Any],
    ) -> None:
        self._file = file
        self._sent = set[Path]()
        self._params = dict(params)
        self._dialect = dialect
        self._overrides = dict(overrides)
        self.text = text
        self.name = self._load().task.name

    @property
    def path(self) -> str:
        """The name of the task in error messages: the path of its file, or "Task"."""
        return _SHOWN if self._file.name == _SHOWN else str(self._file)

    @property
    def sent(self) -> set[Path] | None:
        """What the program sends although the file's author chose it, or None if the task was not
        read from a file: its author is the program's.
        """
        return None if self._dialect else self._sent

    def _load(
        self,
        params: Mapping[str, object] | None = None,
        *,
        now: datetime | None = None,
        serves: bool = False,
    ) -> "LoadedTask":
        """Parse the task with these parameters. If `now` is given, times before `now` are refused.
        With `serves`, it must be a service. Raises InvalidTask.
        """
        from cavvy.spec import SpecError
        from cavvy.task_files import ReadOptions, load_task

        overrides = write_text(self._overrides) if self._overrides else ""
        options = ReadOptions(
            dialect=self._dialect, overrides=overrides, text=self.text, serves=serves
        )
        try:
            return load_task(self._file, self._join_params(params), now=now, options=options)
        except SpecError as error:
            raise _make_invalid(error, self.path) from error

    def _join_params(self, params: Mapping[str, object] | None) -> dict[str, "Scalar"]:
        """Return the parameters that were given to `from_file`, updated with `params`."""
        return {**self._params, **_scalars(params)}

    def __repr__(self) -> str:
        return f"<Task {self.name}>"


def make_batch(
    run: str | Callable[..., object],
    source: str,
    output: str | PathLike[str] | None,
    rows: int | None,
    keys: "TaskKeys",
) -> Task:
    """Return the task that processes the rows of a file, folder or URL. Raises InvalidTask,
    InvalidArgument, TypeError."""
    if output is None:
        raise TypeError("output is missing: the folder for the results of the rows")
    target = fspath(output)
    if "://" not in target:
        target = str(Path(target).absolute())
    batch: dict[str, object] = {"input": source, "output": target}
    if rows is not None:
        batch["rows"] = rows
    own = {name: value for name, value in keys.items() if name != "parallel"}
    if (workers := keys.get("parallel")) is not None:
        batch["workers"] = workers
    if callable(run):
        batch["function"], run = _name_function(run), ""
    return Task(run, **own, batch=batch)  # type: ignore[arg-type]  # checked; own batch: TypeError


def _name_function(function: Callable[..., object]) -> str:
    """Return MODULE:FUNCTION, by which a node can import the function from the working folder."""
    module = getattr(function, "__module__", None) or ""
    name = getattr(function, "__qualname__", "")
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    if not name.replace(".", "").isidentifier() or module in ("", "__main__") or not file:
        raise InvalidArgument(
            f"run: nodes cannot import {name or function!r}",
            "write the function into a module of the current folder, and import it from there",
        )
    if not Path(file).resolve().is_relative_to(Path.cwd().resolve()):
        hint = "copy the module into the current folder, which is submitted"
        raise InvalidArgument(f"run: the module {module} is not in the current folder", hint)
    return f"{module}:{name}"


def _scalars(params: Mapping[str, object] | None) -> dict[str, "Scalar"]:
    check_params(params)
    return {name: to_scalar(value, f"params.{name}") for name, value in (params or {}).items()}


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return `old`, updated with the values in `new`. A table that is in `old` and in `new` is
    merged."""
    merged = {**old, **new}
    for name in old.keys() & new.keys():
        if isinstance(old[name], dict) and isinstance(new[name], dict):
            merged[name] = {**old[name], **new[name]}
    return merged


def _make_invalid(error: Exception, path: str) -> InvalidTask:
    """Create the public error for a SpecError. The error's text names the task by `path`."""
    from cavvy.spec import SpecError

    assert isinstance(error, SpecError)
    problems = [replace(each, file=_name_place(each.file, path)) for each in error.problems]
    invalid = InvalidTask(str(SpecError(problems)), code="invalid-task")
    invalid.problems = tuple(problems)
    return invalid


def _name_place(place: str, path: str) -> str:
    """Describe the position of a mistake in terms of the Python interface, because the parser
    describes positions by files and command-line options.
    """
    if place.startswith("--param "):
        return place.replace("--param ", "params.", 1)
    if place == "the options":
        return "Task.replace"
    return path if Path(place).is_absolute() else place
