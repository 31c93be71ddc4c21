"""The two places of a model on a device: one version is served while another one is fetched and
tried. At every moment, also after a power cut, the served version is whole on the disk.

    FOLDER/state.json       the served slot and its version, and the trial of another version
    FOLDER/a/, FOLDER/b/    a version: `files/`, and `whole.json`, which is written last
    packages/NAME/          of the device: the Python packages of versions; see `packages.py`
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TRIES = 3  # starts of a version on trial; a device that dies in each of them refuses the version
LIST = "cavvy-files.json"  # the SHA-256 of each file of installed packages, by path
PACKAGES = "CAVVY_EDGE_PACKAGES"  # the variable with the packages of the program that runs
_PIECE = 1 << 20


class ModelSlots:
    """The slots of one model. Each method leaves the disk in a state from which a new process can
    go on."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.makedirs(folder, mode=0o700, exist_ok=True)
        state = read_json(f"{folder}/state.json")
        if state is None and os.path.exists(f"{folder}/state.json"):
            state = self._guess_state()
        self._state: dict[str, Any] = state or {}

    @property
    def serving(self) -> int:
        """The number of the served version, or 0."""
        return int(self._state.get("number", 0))

    @property
    def refused(self) -> int:
        """The number of the version that was refused last, or 0."""
        return int(self._state.get("refused", 0))

    @property
    def refused_in(self) -> int:
        """The rollout in which that version was refused, or 0."""
        return int(self._state.get("refused_in", 0))

    @property
    def problem(self) -> str:
        return str(self._state.get("problem", ""))

    @property
    def trial(self) -> int:
        """The number of the version on trial, or 0."""
        return int(self._state.get("trial", 0))

    def find(self, number: int) -> str | None:
        """Return the path of the file to serve of a version that is whole here, or None."""
        slot = self._find_slot(number)
        whole = None if slot is None else self.manifest(slot)
        return None if whole is None else f"{self.folder}/{slot}/files/{whole['main']}"

    def manifest(self, slot: str) -> dict[str, Any] | None:
        """Return the manifest of the whole version in a slot, or None. A version whose packages are
        missing, or were installed for another Python, is not whole."""
        path = f"{self.folder}/{slot}"
        whole, packages = read_json(f"{path}/whole.json"), packages_of(f"{path}/files/")
        if packages and whole is not None:
            same = whole.get("python") == sys.implementation.cache_tag
            return whole if same and os.path.exists(f"{packages}/{LIST}") else None
        return whole

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
        damaged = _find_damaged(slot, manifest)
        if damaged is not None:
            self._remove_packages(manifest, damaged)
            raise ValueError(f"the file {damaged} is damaged")
        sync_tree(slot)
        above = os.path.dirname(self.folder)
        for folder in (self.folder, above, os.path.dirname(above)):
            sync(folder)
        write_json(f"{slot}/whole.json", manifest)

    def check(self, number: int) -> bool:
        """Return whether the files of a version are intact. If they are not, the version is no
        longer whole; if it is the served one, the version in the other slot is served instead,
        unless it was refused."""
        slot = self._find_slot(number)
        whole = None if slot is None else self.manifest(slot)
        if whole is not None:
            damaged = _find_damaged(f"{self.folder}/{slot}", whole)
            if damaged is None:
                return True
            self._remove_packages(whole, damaged)
            remove(f"{self.folder}/{slot}/whole.json")
        other = self.spare()
        instead = self.manifest(other)
        served = number and number == self.serving
        if served and instead and instead["number"] not in (0, self.refused):
            self._write(slot=other, number=instead["number"], trial=0, tries=0)
        return False

    def _remove_packages(self, manifest: dict[str, Any], damaged: str) -> None:
        packages = manifest.get("packages")
        if damaged == packages:
            shutil.rmtree(f"{_device_folder(self.folder)}/packages/{packages}", ignore_errors=True)

    def is_refused(self, number: int, rollout: int) -> bool:
        """Return whether a version was refused, and no newer rollout asks for it: a user who
        rolls it out again knows that the reason has passed."""
        return bool(number) and number == self.refused and rollout <= self.refused_in

    def note_rollout(self, rollout: int) -> None:
        """Note the rollout for which a version is fetched and tried."""
        if rollout != self._state.get("rollout", 0):
            self._write(rollout=rollout)

    def begin_trial(self, number: int) -> bool:
        """Note that a version is started on trial. Return False if it was started too often, in
        which case it is refused."""
        tries = int(self._state.get("tries", 0)) if self.trial == number else 0
        if tries >= TRIES:
            self.refuse(number, "the device ended in each of its trials")
            return False
        self._write(trial=number, tries=tries + 1)
        return True

    def propose(self, number: int) -> None:
        """Note that a version that is whole is to be started on trial."""
        self._write(trial=number, tries=0)

    def accept(self, number: int) -> None:
        """Serve a version that is whole here from now on."""
        slot = self._find_slot(number) or self.spare()
        self._write(slot=slot, number=number, trial=0, tries=0, refused=0, problem="")

    def pause_trial(self) -> None:
        """Take the start of the trial back, because the program ended in good order."""
        self._write(tries=max(0, int(self._state.get("tries", 0)) - 1))

    def end_trial(self) -> None:
        """End the trial of a version, which may be tried again."""
        self._write(trial=0, tries=0)

    def refuse(self, number: int, problem: str) -> None:
        """End the trial of a version, which is not tried again in this rollout."""
        rollout = int(self._state.get("rollout", 0))
        told = {"refused": number, "refused_in": rollout, "problem": problem[:500]}
        self._write(trial=0, tries=0, **told)

    def _find_slot(self, number: int) -> str | None:
        for slot in ("a", "b"):
            whole = self.manifest(slot)
            if whole is not None and whole["number"] == number:
                return slot
        return None

    def _guess_state(self) -> dict[str, Any]:
        """Return the state if its file is damaged: the lower one of two versions is served, because
        the higher one may have been on trial."""
        whole = [(found["number"], each) for each in ("a", "b") if (found := self.manifest(each))]
        return {} if not whole else {"number": min(whole)[0], "slot": min(whole)[1]}

    def _write(self, **changes: object) -> None:
        state = {**self._state, **changes}
        write_json(f"{self.folder}/state.json", state)
        self._state = state


def packages_of(path: str) -> str:
    """Return the folder with the Python packages of a whole version, of which `path` is a file to
    serve, or "" if it has none."""
    slot = path.rpartition("/files/")[0]
    name = (read_json(f"{slot}/whole.json") or {}).get("packages")
    return f"{_device_folder(os.path.dirname(slot))}/packages/{name}" if name else ""


def _device_folder(slots: str) -> str:
    return os.path.dirname(os.path.dirname(os.path.abspath(slots)))


def is_installed(packages: str) -> bool:
    """Return whether all files of installed packages are intact."""
    told = read_json(f"{packages}/{LIST}")
    if told is None:
        return False
    return all(hash_file(f"{packages}/{path}") == digest for path, digest in told.items())


def plan_of(path: str) -> str:
    """Return where the TensorRT engine of a model's file is, outside the files that are signed."""
    return f"{path.rpartition('/files/')[0]}/model.plan"


def _find_damaged(slot: str, manifest: dict[str, Any]) -> str | None:
    for each in manifest["files"]:
        if hash_file(f"{slot}/files/{each['path']}") != each["sha256"]:
            return str(each["path"])
    name = manifest.get("packages")
    whole = not name or is_installed(f"{_device_folder(os.path.dirname(slot))}/packages/{name}")
    return None if whole else str(name)


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
    sync(os.path.dirname(path))


def sync_tree(folder: str) -> None:
    """Bring all files and folders in a folder to the disk."""
    for inner, _, names in os.walk(folder):
        for name in names:
            sync(f"{inner}/{name}")
        sync(inner)


def sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: str) -> None:
    if os.path.exists(path):
        os.unlink(path)
        sync(os.path.dirname(path))
