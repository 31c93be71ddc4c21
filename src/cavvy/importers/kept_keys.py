"""Keys that a task cannot represent: noted, or refused when the task is run."""

import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cavvy.domain.tasks import Task, Volume, VolumeKind, Workdir
from cavvy.importers.readers import mark_of
from cavvy.spec.problems import SourceMark
from cavvy.spec.tree import Node, ScalarNode


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptKey:
    """One key of another tool's file that a task cannot represent.

    `refused`: without it, the work would differ from the author's intention, so the file does not
    run as it is. `until_submitted`: `cavvy run` says what is missing when it submits the file.
    """

    line: int
    column: int
    key: str  # dotted
    reason: str
    refused: bool = False
    until_submitted: bool = False

    def __str__(self) -> str:
        return f"line {self.line}: `{self.key}`: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPath:
    """A file or folder of this machine that is submitted with the working folder.

    `source` is as its author wrote it, `inside` its path in the frozen working folder.
    """

    source: str
    inside: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """The translation of another tool's file.

    `tasks` is empty if the file describes no work (a fleet, a volume), and has several entries for
    a pipeline or a job group. Their `run` and `setup` are the author's text;
    `add_translation_header` makes them ready to run.
    """

    kind: str  # the tool's usual spelling
    what: str  # task, service, fleet, …
    tasks: tuple[Task, ...] = ()
    kept: tuple[KeptKey, ...] = ()
    before: str = ""  # commands to insert before `run`
    local: tuple[LocalPath, ...] = ()

    @property
    def task(self) -> Task | None:
        """The task, if the file describes one."""
        return self.tasks[0] if len(self.tasks) == 1 else None

    @property
    def refused(self) -> tuple[KeptKey, ...]:
        """Why the file cannot run as it is; () if it can."""
        return tuple(each for each in self.kept if each.refused)


class TranslationNotes:
    """Collects the unsupported keys while a file is translated."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str, str], KeptKey] = {}
        self._local: list[LocalPath] = []

    def note(self, mark: SourceMark, key: str, reason: str) -> None:
        """Keep a key that does not change the work."""
        self._add(mark, key, reason, refused=False)

    def refuse(
        self, mark: SourceMark, key: str, reason: str, *, until_submitted: bool = False
    ) -> None:
        """Keep a key without which the work would differ."""
        self._add(mark, key, reason, refused=True, until_submitted=until_submitted)

    def note_at(self, table: Node | None, path: str, reason: str) -> None:
        """Keep a key of `table` by its dotted path; see `note`."""
        self.note(mark_of(table, path.rpartition(".")[2]), path, reason)

    def refuse_at(self, table: Node | None, path: str, reason: str) -> None:
        """Keep a key of `table` by its dotted path; see `refuse`."""
        self.refuse(mark_of(table, path.rpartition(".")[2]), path, reason)

    def keep_listed(
        self,
        keys: Iterable[ScalarNode],
        refused: Mapping[str, str],
        noted: Mapping[str, str],
        under: str = "",
    ) -> None:
        """Keep the keys that have no equivalent in a task, each with its reason."""
        for key in keys:
            if key.text in refused:
                self.refuse(key.mark, f"{under}{key.text}", refused[key.text])
            elif key.text in noted:
                self.note(key.mark, f"{under}{key.text}", noted[key.text])

    def submit_local(self, source: str, workdir: Workdir | None, target: str) -> Volume | None:
        """Submit a file or folder of this machine that the task expects at `target`, a path of the
        node or within the working folder. Returns the volume that makes it visible there; None if
        it already is.
        """
        inner = _path_within(source, workdir.path if workdir is not None else None)
        if not target.startswith(("/", "~")):
            if inner != target:
                self._local.append(LocalPath(source=source, inside=target))
            return None
        if inner is None:
            name = re.sub(r"[^A-Za-z0-9._-]", "_", source.rstrip("/").rpartition("/")[2])
            inner = f".mounts/{len(self._local)}-{name.strip('.')}"
            self._local.append(LocalPath(source=source, inside=inner))
        return Volume(kind=VolumeKind.FOLDER, source=inner, path=target)

    def list_local(self) -> tuple[LocalPath, ...]:
        """The files submitted with the working folder."""
        return tuple(self._local)

    def list_kept(self) -> tuple[KeptKey, ...]:
        """Everything, in the order of the file."""
        return tuple(
            sorted(self._kept.values(), key=lambda each: (each.line, each.column, each.key))
        )

    def _add(self, mark: SourceMark, key: str, reason: str, **flags: bool) -> None:
        kept = KeptKey(line=mark.line, column=mark.column, key=key, reason=reason, **flags)
        self._kept.setdefault((mark.line, key, reason), kept)


def _path_within(path: str, folder: str | None) -> str | None:
    """A local path relative to a parent folder; None if it is not inside it. Neither path depends
    on the current folder.
    """
    if folder is None:
        return None
    inner, outer = posixpath.normpath(path), posixpath.normpath(folder)
    if inner == outer:
        return "."
    if outer == ".":
        return None if inner.startswith(("/", "~", "..")) else inner
    return inner.removeprefix(f"{outer}/") if inner.startswith(f"{outer}/") else None
