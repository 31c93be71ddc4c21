"""The two places of a model on a device: one version is served while another one is fetched and
tried. At every moment, also after a power cut, the served version is whole on the disk.

    FOLDER/state.json       the served slot and its version, and the trial of another version
    FOLDER/a/, FOLDER/b/    a version: `files/`, and `whole.json`, which is written last
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TRIES = 3  # starts of a version on trial; a device that dies in each of them refuses the version
_PIECE = 1 << 20


class ModelSlots:
    """The slots of one model. Each method leaves the disk in a state from which a new process can
    go on."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._state = read_json(f"{folder}/state.json") or {}

    @property
    def serving(self) -> int:
        """The number of the served version, or 0."""
        return int(self._state.get("number", 0))

    @property
    def refused(self) -> int:
        """The number of the version that was refused last, or 0."""
        return int(self._state.get("refused", 0))

    @property
    def problem(self) -> str:
        return str(self._state.get("problem", ""))

    @property
    def trial(self) -> int:
        """The number of the version on trial, or 0."""
        return int(self._state.get("trial", 0))

    def find(self, number: int) -> str | None:
        """Return the path of the file to serve of a version that is whole here, or None."""
        for slot in ("a", "b"):
            whole = self.manifest(slot)
            if whole is not None and whole["number"] == number:
                return f"{self.folder}/{slot}/files/{whole['main']}"
        return None

    def manifest(self, slot: str) -> dict[str, Any] | None:
        """Return the manifest of the whole version in a slot, or None."""
        return read_json(f"{self.folder}/{slot}/whole.json")

    def spare(self) -> str:
        """Return the slot that is not served."""
        return "b" if self._state.get("slot") == "a" else "a"

    def prepare(self, number: int) -> str:
        """Return the folder of the spare slot for this version. What it holds of another version is
        removed; what an interrupted fetch of the same version left is kept."""
        slot = f"{self.folder}/{self.spare()}"
        started = read_json(f"{slot}/started.json")
        if started is None or started.get("number") != number:
            remove(f"{slot}/whole.json")  # first, so that a half removed version is not whole
            shutil.rmtree(slot, ignore_errors=True)
            os.makedirs(slot, mode=0o700, exist_ok=True)
            write_json(f"{slot}/started.json", {"number": number})
        return slot

    def finish(self, manifest: dict[str, Any]) -> None:
        """Check the files in the spare slot, and mark the version as whole. Raises ValueError."""
        slot = f"{self.folder}/{self.spare()}"
        for each in manifest["files"]:
            if hash_file(f"{slot}/files/{each['path']}") != each["sha256"]:
                raise ValueError(f"the file {each['path']} is damaged")
        write_json(f"{slot}/whole.json", manifest)

    def begin_trial(self, number: int) -> bool:
        """Note that a version is started on trial. Return False if it was started too often, in
        which case it is refused."""
        tries = int(self._state.get("tries", 0)) if self.trial == number else 0
        if tries >= TRIES:
            self.refuse(number, "the device ended in each of its trials")
            return False
        self._write(trial=number, tries=tries + 1)
        return True

    def accept(self, number: int) -> None:
        """Serve the version in the spare slot from now on."""
        self._write(slot=self.spare(), number=number, trial=0, tries=0, refused=0, problem="")

    def refuse(self, number: int, problem: str) -> None:
        """End the trial of a version, which is not tried again."""
        self._write(trial=0, tries=0, refused=number, problem=problem[:500])

    def _write(self, **changes: object) -> None:
        self._state = {**self._state, **changes}
        write_json(f"{self.folder}/state.json", self._state)


def hash_file(path: str) -> str:
    """Return the SHA-256 of a file, or "" if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
    except OSError:
        return ""
    return digest.hexdigest()


def read_json(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError, TypeError):
        return None


def write_json(path: str, value: object) -> None:
    """Replace a file by one rename, after its content is on the disk."""
    fresh = f"{path}.new"
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(fresh, path)
    sync_folder(os.path.dirname(path))


def sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: str) -> None:
    if os.path.exists(path):
        os.unlink(path)
        sync_folder(os.path.dirname(path))
