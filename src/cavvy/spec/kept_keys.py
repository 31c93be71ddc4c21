"""The keys of another tool's file that a task cannot represent. A key that does not affect the work
is only noted. If the work needs a key, `cavvy run` refuses the file.
"""

import posixpath
import re
from collections.abc import Iterable, Mapping

from cavvy.domain.tasks import Volume, VolumeKind, Workdir
from cavvy.spec.problems import SourceMark
from cavvy.spec.translation import KeptKey, LocalPath
from cavvy.spec.tree import MapNode, Node, ScalarNode


class TranslationNotes:
    """Collects the unsupported keys while a file is translated."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, str, str], KeptKey] = {}
        self._local: list[LocalPath] = []
        self._placed: dict[str, str] = {}

    def note(self, mark: SourceMark, key: str, reason: str) -> None:
        """Note a key that does not affect the work."""
        self._add(mark, key, reason, refused=False)

    def refuse(
        self, mark: SourceMark, key: str, reason: str, *, until_submitted: bool = False
    ) -> None:
        """Refuse a key that cannot be translated, because the work would not run correctly without
        it.
        """
        self._add(mark, key, reason, refused=True, until_submitted=until_submitted)

    def forget(self, key: str) -> None:
        """Remove the notes on a key that turns out to have a meaning."""
        self._kept = {
            each: kept for each, kept in self._kept.items() if kept.key != key or kept.refused
        }

    def note_at(self, table: Node | None, path: str, reason: str) -> None:
        """Note the key of `table` at the dotted path `path`; see `note`."""
        self.note(mark_of(table, path.rpartition(".")[2]), path, reason)

    def refuse_at(self, table: Node | None, path: str, reason: str) -> None:
        """Refuse the key of `table` at the dotted path `path`; see `refuse`."""
        self.refuse(mark_of(table, path.rpartition(".")[2]), path, reason)

    def keep_listed(
        self,
        keys: Iterable[ScalarNode],
        refused: Mapping[str, str],
        noted: Mapping[str, str],
        under: str = "",
    ) -> None:
        """Refuse the keys in the table `refused`, and note the keys in the table `noted`. Each of
        the two tables maps a key to the reason for refusing or noting the key.
        """
        for key in keys:
            if key.text in refused:
                self.refuse(key.mark, f"{under}{key.text}", refused[key.text])
            elif key.text in noted:
                self.note(key.mark, f"{under}{key.text}", noted[key.text])

    def submit_local(self, source: str, workdir: Workdir | None, target: str) -> Volume | None:
        """Submit a local file or folder with the task. The task expects the file or folder at
        `target`, which is an absolute path on the node or a path within the working folder. Returns
        the volume that mounts the file at `target`, or None if the file needs no volume.
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

    def place_secret(self, name: str, path: str) -> None:
        """Write a secret of the job into a file before the commands. `path` is the file's path on
        the node.
        """
        self._placed[path] = name

    def list_placed(self) -> dict[str, str]:
        """Return the names of the secrets that are written into files, by the path of the file."""
        return self._placed

    def list_local(self) -> tuple[LocalPath, ...]:
        """Return the files and folders that are submitted with the working folder."""
        return tuple(self._local)

    def list_kept(self) -> tuple[KeptKey, ...]:
        """Return all noted and refused keys, in the order of the file."""
        return tuple(
            sorted(self._kept.values(), key=lambda each: (each.line, each.column, each.key))
        )

    def _add(self, mark: SourceMark, key: str, reason: str, **flags: bool) -> None:
        kept = KeptKey(line=mark.line, column=mark.column, key=key, reason=reason, **flags)
        self._kept.setdefault((mark.line, key, reason), kept)


def mark_of(table: Node | None, key: str) -> SourceMark:
    """Return the position of a key, or of the table if the key is absent."""
    if isinstance(table, MapNode):
        return next((name.mark for name, _ in table.entries if name.text == key), table.mark)
    return SourceMark(line=1, column=1)


def _path_within(path: str, folder: str | None) -> str | None:
    """Return a local path relative to `folder`, or None if the path is not inside the folder. Only
    the texts of the paths are compared; links are not followed.
    """
    if folder is None:
        return None
    inner, outer = posixpath.normpath(path), posixpath.normpath(folder)
    if inner == outer:
        return "."
    if outer == ".":
        return None if inner.startswith(("/", "~", "..")) else inner
    return inner.removeprefix(f"{outer}/") if inner.startswith(f"{outer}/") else None
