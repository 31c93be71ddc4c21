"""Copies checkpoints to object storage. A checkpoint is first written locally and then uploaded. A
remote copy is used only if it is complete.
"""

import hashlib
import logging
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from cavvy.train.checkpoint.store import (
    FILES,
    KEPT,
    MARK,
    NAME,
    StoredCheckpoint,
    add_files,
    dump_facts,
    find_damage,
    make_name,
    parse_facts,
)
from cavvy.train.world import RankWorld

log = logging.getLogger("cavvy.train")


class CheckpointLocation:
    """A storage location for checkpoints: a path, or an fsspec URL with a local cache folder.

    Each rank uploads its own files. The first rank also uploads the metadata and, at the end, the
    completion mark.
    """

    def __init__(self, where: str, world: RankWorld) -> None:
        self._world = world
        self._run = world.run_on_all
        self._remote: Any = None
        self._root = ""
        if "://" not in where:
            self.local = Path(where).absolute()
            return
        try:
            import fsspec
        except ImportError as error:
            raise ValueError(
                f"{where} needs fsspec and the fsspec driver for this storage; install fsspec with "
                "pip install fsspec"
            ) from error
        self._remote, self._root = fsspec.core.url_to_fs(where)
        cache = Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")))
        self.local = cache / "cavvy" / "train" / hashlib.sha256(where.encode()).hexdigest()[:16]

    @property
    def readers(self) -> tuple[int, int]:
        """The index of this rank among the ranks that see the same files, and the number of these
        ranks.
        """
        if self._remote is None:
            return self._world.rank, self._world.size
        return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def latest(self, below: float) -> StoredCheckpoint | None:
        """Return the newest complete remote checkpoint before step `below`, or None if there is
        none. `repair` downloads its files.
        """
        if self._remote is None:
            return None
        for step in reversed(self._list()):
            facts = self._read_facts(step) if step < below else None
            if facts is not None:
                return StoredCheckpoint(self.local / make_name(step), step, facts)
        return None

    def repair(self, found: StoredCheckpoint) -> str:
        """Download the files of a checkpoint that are missing or damaged in the local folder. If
        remote storage has no intact copy of a file, a node that has an intact copy uploads it
        first. Returns the fault of a file that is still damaged, or "" if all files are intact. All
        ranks must call this method.

        Raises: RuntimeError: on all ranks, if one rank of the gang could not transfer its files.
        """
        every = self._run(partial(self._replace_damaged, found, self._share(found.facts[FILES])))
        wanted = set[str]().union(*every)
        if wanted and self._remote is not None:
            intact = self._run(partial(self._list_intact, found, self._share(wanted)))
            if not wanted.difference(*intact):
                rank = self._world.rank
                own = intact[rank].difference(*intact[:rank])  # One copy of each file is enough.
                self._run(partial(self._upload, found.path, sorted(own)))
                every = self._run(partial(self._replace_damaged, found, list(every[rank])))
        return next((text for damage in every for text in damage.values()), "")

    def set_aside(self, step: int) -> None:
        """Overwrite the completion mark of a damaged checkpoint, so that the checkpoint is
        ignored.
        """
        if self._remote is not None and self._world.is_first and self._read_mark(step):
            self._remote.pipe_file(f"{self._root}/{make_name(step)}/{MARK}", b"")

    def send(self, done: StoredCheckpoint, names: list[str]) -> None:
        """Upload a checkpoint that is durable locally, unless it is already uploaded. Each rank
        uploads the files in `names` that the rank has. The method runs in the thread that saves the
        checkpoint.

        Raises: RuntimeError: on all ranks, if one rank of the gang could not upload its files.
        """
        if self._remote is None:
            return
        mark = dump_facts(done.facts)
        if not self._run(partial(self._begin, done.step, mark))[0]:
            every = self._run(partial(self._upload, done.path, names))
            if missing := set(done.facts[FILES]).difference(*every):
                raise FileNotFoundError(f"no node has the files {', '.join(sorted(missing))}")
            self._run(partial(self._publish, done.step, mark))

    def _share(self, names: Iterable[str]) -> list[str]:
        """Return the files for which this rank is responsible. The files are divided among the
        ranks that see the same folder.
        """
        number, count = self.readers
        return sorted(names)[number::count]

    def _replace_damaged(self, found: StoredCheckpoint, names: list[str]) -> dict[str, str]:
        """Download the files that are missing or damaged in the local folder. Returns a dictionary
        that maps the name of each file that is still damaged to the fault of the file.
        """
        if self._remote is None and not (found.path / MARK).exists():
            raise RuntimeError(f"checkpoint {found.step} is not visible in {self.local}")
        damage = find_damage(found, names)
        if damage and self._remote is not None:
            remote = self._list_names(found.path.name)
            self._fetch(found, [name for name in damage if name in remote])
            damage = find_damage(found, list(damage))
        return damage

    def _list_intact(self, found: StoredCheckpoint, names: list[str]) -> set[str]:
        return set(names) - find_damage(found, names).keys()

    def _fetch(self, found: StoredCheckpoint, names: list[str]) -> None:
        halves = [found.path / f"{name}.{self._world.rank}.half" for name in names]
        found.path.mkdir(parents=True, exist_ok=True)
        self._remote.get(
            [f"{self._root}/{found.path.name}/{name}" for name in names], list(map(str, halves))
        )
        for half, name in zip(halves, names, strict=True):
            half.replace(found.path / name)

    def _begin(self, step: int, mark: str) -> bool:
        """Return whether the checkpoint with this completion mark is already uploaded. If remote
        storage contains a different checkpoint of this step, that checkpoint is marked as
        incomplete.
        """
        if not self._world.is_first:
            return False
        facts = self._read_facts(step)
        uploaded = facts is not None and dump_facts(facts) == mark
        if not uploaded:
            self.set_aside(step)
        return uploaded

    def _upload(self, path: Path, names: list[str]) -> list[str]:
        target, names = f"{self._root}/{path.name}", [n for n in names if (path / n).exists()]
        self._remote.makedirs(target, exist_ok=True)
        self._remote.put(
            [str(path / name) for name in names], [f"{target}/{name}" for name in names]
        )
        return names

    def _publish(self, step: int, mark: str) -> None:
        """Write the completion mark, and remove old checkpoints and incomplete uploads."""
        if not self._world.is_first:
            return
        self._remote.pipe_file(f"{self._root}/{make_name(step)}/{MARK}", mark.encode())
        steps = [each for each in self._list() if each <= step]
        oldest = [each for each in steps if self._read_facts(each) is not None][-KEPT:][0]
        try:
            for old in steps[: steps.index(oldest)]:
                # The mark is removed first, so that a partly removed checkpoint is not complete.
                self.set_aside(old)
                self._remote.rm(f"{self._root}/{make_name(old)}", recursive=True)
        except Exception as error:  # noqa: BLE001 - drivers have errors of their own
            log.warning("old checkpoints could not be removed from %s: %s", self._root, error)

    def _list(self) -> list[int]:
        """Return the steps of all remote checkpoints, complete or not, in ascending order."""
        return sorted(
            int(match[1]) for name in self._list_names("") if (match := NAME.fullmatch(name))
        )

    def _list_names(self, folder: str) -> list[str]:
        self._remote.invalidate_cache()  # Other nodes upload, too.
        try:
            paths = self._remote.ls(f"{self._root}/{folder}", detail=False)
        except FileNotFoundError:
            return []
        return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in paths]

    def _read_facts(self, step: int) -> dict[str, Any] | None:
        """Return the facts of a remote checkpoint, or None if the checkpoint is not complete."""
        facts = parse_facts(self._read_mark(step))
        if facts is not None and FILES not in facts:
            add_files(facts, self._list_names(make_name(step)))
        return facts

    def _read_mark(self, step: int) -> str:
        """Return the completion mark of a remote checkpoint, or "" if there is none."""
        try:
            mark: bytes = self._remote.cat_file(f"{self._root}/{make_name(step)}/{MARK}")
        except FileNotFoundError:
            return ""
        return mark.decode(errors="replace")
