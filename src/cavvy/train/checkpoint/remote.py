"""Copies checkpoints to object storage: a checkpoint is written locally first and then uploaded.
The remote copy, too, counts only when it is complete.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cavvy.train.checkpoint.store import KEPT, MARK, NAME, StoredCheckpoint, find_latest
from cavvy.train.world import RankWorld


class CheckpointLocation:
    """A path, or an fsspec URL with a local cache folder.

    Each rank uploads its own files. The first rank also uploads the metadata and, last, the
    completion mark.
    """

    def __init__(self, where: str, world: RankWorld) -> None:
        self._world = world
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
        """This rank's number among the ranks that see the same files, and the number of these
        ranks."""
        if self._remote is None:
            return self._world.rank, self._world.size
        return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def fetch(self, below: float) -> None:
        """Download the newest complete remote checkpoint of a step less than `below` if it is newer
        than the local one.
        """
        if self._remote is None:
            return
        steps = [step for step in self._world.tell(self._complete()) if step < below]
        here = find_latest(self.local, below)
        first_here = self._world.is_first or os.environ.get("LOCAL_RANK", "0") == "0"
        if first_here and steps and (here is None or here.step < steps[-1]):
            name = _name(steps[-1])
            half = self.local / (name + ".fetched")
            shutil.rmtree(half, ignore_errors=True)
            self._remote.get(f"{self._root}/{name}/", str(half) + "/", recursive=True)
            shutil.rmtree(self.local / name, ignore_errors=True)
            half.rename(self.local / name)
        self._world.agree([0])

    def send(self, done: StoredCheckpoint) -> None:
        """Upload a checkpoint that is durable locally. Runs in the thread that saves, with that
        thread's process group.
        """
        if self._remote is None:
            return
        target = f"{self._root}/{done.path.name}"
        self._remote.makedirs(target, exist_ok=True)
        mine = f"__{self._world.rank}_"
        for path in sorted(done.path.iterdir()):
            if path.name.startswith(mine) or (self._world.is_first and path.name == ".metadata"):
                self._remote.put_file(str(path), f"{target}/{path.name}")
        if self._world.file_group is not None:
            dist.barrier(group=self._world.file_group)
        if self._world.is_first:
            self._remote.pipe_file(f"{target}/{MARK}", json.dumps(done.facts).encode())
            for step in self._complete()[:-KEPT]:
                self._remote.rm_file(f"{self._root}/{_name(step)}/{MARK}")
                self._remote.rm(f"{self._root}/{_name(step)}", recursive=True)

    def _complete(self) -> list[int]:
        if not self._world.is_first or not self._remote.exists(self._root):
            return []
        self._remote.invalidate_cache()
        names = [
            str(name).rstrip("/").rsplit("/", 1)[-1]
            for name in self._remote.ls(self._root, detail=False)
        ]
        found = [(match, name) for name in names if (match := NAME.fullmatch(name))]
        return sorted(
            int(match[1])
            for match, name in found
            if self._remote.exists(f"{self._root}/{name}/{MARK}")
        )


def _name(step: int) -> str:
    return f"step-{step:012d}"
