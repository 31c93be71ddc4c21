"""Fetches one version of a model into the spare slot: `python -m cavvy.edge.update FOLDER MODEL
NUMBER [MIB_PER_S]`. It runs in a process of its own, because it needs `tuf` and much memory.

The version's manifest is trusted only as far as the project's signed lists name it (The Update
Framework); the files are trusted because the manifest has their SHA-256. A file that the served
version has too is linked instead of fetched; one that has a delta from a file of the served version
is made from both; and a fetch that was cut goes on where it ended.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from io import BytesIO
from typing import Any

from tuf.api.exceptions import (
    DownloadError,
    DownloadHTTPError,
    ExpiredMetadataError,
    LengthOrHashMismatchError,
    RepositoryError,
)
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from .delta import apply_delta
from .packages import (
    PackagesWrong,
    choose_files,
    install,
    is_wheel,
    name_packages,
    remove_unused,
    this_target,
)
from .peers import PEERS, PeerFiles
from .program import PROGRAM, open_slots
from .server_calls import (
    DeviceCalls,
    DeviceRefused,
    ServerFileMissing,
    confine,
    environment,
    read_pieces,
)
from .slots import ModelSlots, hash_file, plan_of, read_json, sync_tree, write_json

_WRONG = 3  # the exit code if the version itself is not what was signed
_BUILD_S = 3600  # within which `trtexec` must build an engine
_LEAST_SHARED = 1024  # bytes; a smaller file comes from the server as quickly
_SPARE_BYTES = 16 << 20  # that a fetch leaves free on the disk, for the device's other files


class VersionWrong(ValueError):
    """Raised if a version is not what was signed: fetching it again would not help."""


class SignedListFetcher(FetcherInterface):  # type: ignore[misc]  # it has no types
    """Fetches the signed lists and manifests through the device's connection."""

    def __init__(self, calls: DeviceCalls) -> None:
        self._calls = calls

    def _fetch(self, url: str) -> Iterator[bytes]:
        try:
            yield from read_pieces(self._calls.open(url, 0))
        except ServerFileMissing as error:
            raise DownloadHTTPError(str(error), 404) from error
        except (OSError, DeviceRefused) as error:
            raise DownloadError(str(error)) from error


def fetch(folder: str, model: str, number: int, mib_per_s: float | None = None) -> None:
    """Fetch and check a version. Raises OSError, DeviceRefused, ValueError, and the errors of
    `tuf`."""
    card = read_json(f"{folder}/card.json")
    if card is None:
        raise ValueError(f"{folder} has no card.json: enrol the device")
    told = json.loads(os.environ.get(PEERS) or "{}")
    peers = PeerFiles(told.get("at", ()), told.get("key", ""))
    fetch_with(DeviceCalls(card, folder), folder, model, number, mib_per_s, peers)


def fetch_with(
    calls: DeviceCalls,
    folder: str,
    model: str,
    number: int,
    mib_per_s: float | None = None,
    peers: PeerFiles | None = None,
) -> None:
    """Fetch and check a version through a connection and from other devices, as `fetch` does."""
    manifest = read_manifest(folder, calls, model, number)
    manifest["files"] = choose_files(manifest["files"], this_target())
    manifest["packages"] = name_packages(manifest["files"])
    manifest["python"] = sys.implementation.cache_tag
    slots = open_slots(folder) if model == PROGRAM else ModelSlots(f"{folder}/models/{model}")
    slot = slots.prepare(number)
    shutil.rmtree(f"{slot}/work", ignore_errors=True)  # an engine's, which may be hostile
    known, given = _list_known(slots), 0
    for each in manifest["files"]:
        path = f"{slot}/files/{_check_path(each['path'])}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if hash_file(path) == each["sha256"]:
            continue
        if _link(known.get(each["sha256"]), each["sha256"], f"{slot}/linked", path):
            continue
        if peers is not None and _fetch_peers(peers, each, slot, path):
            given += 1
            continue
        if not _fetch_delta(calls, each, known, slot, path, mib_per_s):
            _fetch_file(calls, each, f"{slot}/{each['sha256']}.part", path, mib_per_s)
    if model != PROGRAM:
        build_plan(folder, f"{slot}/files/{_check_path(manifest['main'])}")
    remove_unused(folder, manifest["packages"])
    wheels = [each["path"] for each in manifest["files"] if is_wheel(each["path"])]
    install(folder, f"{slot}/files", wheels)
    slots.finish(manifest)
    if given:
        sys.stderr.write(f"{given} of {len(manifest['files'])} files came from other devices\n")


def build_plan(folder: str, model: str) -> None:
    """Build a TensorRT engine of an ONNX model for the GPU of this device, if its option `trtexec`
    names NVIDIA's program. Raises VersionWrong if it cannot be built, OSError.

    Source of the options: https://docs.nvidia.com/deeplearning/tensorrt, `trtexec` of 8 to 10.
    """
    options, plan = read_json(f"{folder}/edge.json") or {}, plan_of(model)
    program = options.get("trtexec")
    if not program or not model.endswith(".onnx") or os.path.exists(plan):
        return
    slot = os.path.abspath(model).rpartition("/files/")[0]
    work = f"{slot}/work"
    words = [program, f"--onnx={os.path.abspath(model)}", f"--saveEngine={work}/new", "--fp16"]
    if options.get("confined", True):
        words = confine(folder, f"{slot}/files", words, work)
    os.makedirs(work, mode=0o700, exist_ok=True)
    try:
        done = subprocess.run(
            words, capture_output=True, timeout=_BUILD_S, check=False, env=environment()
        )
        told = (done.stderr or done.stdout).decode(errors="replace").strip()[-200:]
        if done.returncode or not _take_built(f"{work}/new", plan):
            raise VersionWrong(f"{program} cannot build {os.path.basename(model)}: {told}")
    except subprocess.TimeoutExpired as error:
        raise VersionWrong(f"{program} took more than {_BUILD_S} s for {model}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _take_built(built: str, plan: str) -> bool:
    """Copy what a confined program has built. Return False if it is no plain file: a link could
    lead to a file that only this program can read."""
    try:
        descriptor = os.open(built, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    with open(descriptor, "rb") as file, open(f"{plan}.new", "wb") as made:
        told = os.fstat(descriptor)
        if not stat.S_ISREG(told.st_mode) or told.st_nlink != 1:
            return False
        _check_free(os.path.dirname(plan), told.st_size)
        shutil.copyfileobj(file, made)
    os.rename(f"{plan}.new", plan)
    return True


def read_manifest(folder: str, calls: DeviceCalls, model: str, number: int) -> dict[str, Any]:
    """Return the signed description of a version."""
    lists, first = f"{folder}/lists", f"{folder}/root.json"
    os.makedirs(lists, mode=0o700, exist_ok=True)
    root = read_json(first)
    if root is None:
        root = dict(json.loads(calls.call("GET", "/edge/v1/metadata/root.json")))
        write_json(first, root)  # from now on the root of all trust
    updater = Updater(
        lists,
        "/edge/v1/metadata/",
        target_dir=lists,
        target_base_url="/edge/v1/manifests/",
        fetcher=SignedListFetcher(calls),
        config=UpdaterConfig(prefix_targets_with_hash=False),
        bootstrap=json.dumps(root).encode(),
    )
    updater.refresh()
    sync_tree(lists)  # a device that forgets the newest list would take an older one
    path = f"{model}/{number}"
    target = updater.get_targetinfo(f"{path}.json")
    if target is None:
        raise ValueError(f"the signed lists name no version {number} of {model}")
    content = calls.call("GET", f"/edge/v1/manifests/{path}")
    target.verify_length_and_hashes(BytesIO(content))
    found: dict[str, Any] = json.loads(content)
    return found


def _link(known: str | None, sha256: str, fresh: str, path: str) -> bool:
    """Link a file of the served version to `path`. Return False if it is damaged, or if the disk
    has no links."""
    if known is None or hash_file(known) != sha256:
        return False
    if os.path.exists(fresh):
        os.unlink(fresh)
    try:
        os.link(known, fresh)
    except OSError:
        return False
    os.rename(fresh, path)
    return True


def _fetch_peers(peers: PeerFiles, wanted: dict[str, Any], slot: str, path: str) -> bool:
    if wanted["size"] < _LEAST_SHARED:
        return False
    _check_free(slot, wanted["size"])
    return peers.fetch(wanted, f"{slot}/{wanted['sha256']}.peer", path)


def _fetch_delta(
    calls: DeviceCalls,
    wanted: dict[str, Any],
    known: dict[str, str],
    slot: str,
    path: str,
    mib_per_s: float | None,
) -> bool:
    """Fetch a delta, and make the file from it and the served version's. Return False if there is
    none, or if anything about it is wrong: the file is then fetched whole. Raises OSError if the
    connection ends, and the delta is to be gone on with later."""
    for delta in wanted.get("deltas", ()):
        old, name, size = known.get(delta["old"]), delta["sha256"], delta["size"]
        if old is None or size >= wanted["size"] or hash_file(old) != delta["old"]:
            continue
        packed, part, made = f"{slot}/{name}.delta", f"{slot}/{name}.part", f"{slot}/{name}.made"
        had, problem = _size(part), ""
        try:
            if hash_file(packed) != name:
                told = {"path": f"{wanted['path']} (delta)", "sha256": name, "size": size}
                _fetch_file(calls, told, part, packed, mib_per_s)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and _size(part) > had:
                raise
            problem = str(error)
        problem = problem or _make_file(old, packed, made, wanted)
        if not problem:
            os.rename(made, path)
        for each in (made, packed):
            if os.path.exists(each):
                os.unlink(each)
        if not problem:
            return True
        sys.stderr.write(f"{wanted['path']} is fetched whole: its delta failed: {problem}\n")
    return False


def _make_file(old: str, packed: str, made: str, wanted: dict[str, Any]) -> str:
    """Write the file that a delta makes of an old one. Return what is wrong, or ""."""
    try:
        _check_free(os.path.dirname(made), wanted["size"])
        with open(old, "rb") as before, open(packed, "rb") as delta, open(made, "wb") as file:
            for piece in apply_delta(before, delta, wanted["size"]):
                file.write(piece)
    except (OSError, ValueError) as error:
        return str(error)
    return "" if hash_file(made) == wanted["sha256"] else "it makes another SHA-256"


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.exists(path) else 0


def _check_free(folder: str, missing: int) -> None:
    """Raises OSError if the disk has no space for so many bytes."""
    free = shutil.disk_usage(folder).free
    if free < missing + _SPARE_BYTES:
        raise OSError(f"the disk has {free >> 20} MiB free; {missing / 2**20:.1f} are missing")


def _fetch_file(
    calls: DeviceCalls, wanted: dict[str, Any], part: str, path: str, mib_per_s: float | None
) -> None:
    """Fetch a file, going on after what `part` has of it. After a loss of power, `part` may have
    content that never reached the disk, so it is fetched once more if its SHA-256 is wrong."""
    for resumed in (os.path.exists(part), False):
        _receive(calls, wanted, part, mib_per_s)
        if hash_file(part) == wanted["sha256"]:
            os.rename(part, path)
            return
        os.unlink(part)
        if not resumed:
            break
    raise VersionWrong(f"what the server sent as {wanted['path']} has another SHA-256")


def _receive(calls: DeviceCalls, wanted: dict[str, Any], part: str, limit: float | None) -> None:
    size, since, received = wanted["size"], time.monotonic(), 0
    have = min(_size(part), size)
    _check_free(os.path.dirname(part), size - have)
    if not size:
        open(part, "wb").close()
    while have < size:
        reply = calls.open(f"/edge/v1/files/{wanted['sha256']}", have)
        if reply.status == 200:
            have = 0  # the server sends the whole file
        with open(part, "r+b" if os.path.exists(part) else "wb") as file:
            file.truncate(have)
            file.seek(have)
            for piece in read_pieces(reply):
                if have + len(piece) > size:
                    raise VersionWrong(f"the server sent more than the {size} bytes of {part}")
                file.write(piece)
                have += len(piece)
                received += len(piece)
                if limit:
                    time.sleep(max(0.0, since + received / limit / 2**20 - time.monotonic()))
        if have < size:
            raise OSError(f"the connection ended after {have} of {size} bytes")


def _list_known(slots: ModelSlots) -> dict[str, str]:
    """Return the paths of the files of the served version, by their SHA-256."""
    served = "a" if slots.spare() == "b" else "b"
    whole = slots.manifest(served)
    files = [] if whole is None else whole["files"]
    return {each["sha256"]: f"{slots.folder}/{served}/files/{each['path']}" for each in files}


def _check_path(path: str) -> str:
    parts = path.split("/")
    if not path or any(part in ("", ".", "..") for part in parts):
        raise VersionWrong(f"the manifest has the path {path!r}, which a device does not write")
    return path


def main(arguments: list[str]) -> int:
    folder, model, number, *limit = arguments
    try:
        fetch(folder, model, int(number), float(limit[0]) if limit else None)
    except ExpiredMetadataError as error:
        clock = time.strftime("%Y-%m-%d %H:%M", time.gmtime())
        sys.stderr.write(f"{error}; the clock of this device says {clock} UTC\n")
        return 1
    except (VersionWrong, PackagesWrong, LengthOrHashMismatchError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return _WRONG
    except RepositoryError as error:
        sys.stderr.write(f"the signed lists are not trusted: {error}\n")
        return 1
    # a server that lost a list, or a proxy's page in the place of one, is no fault of the version
    except (OSError, ValueError, DownloadError, DeviceRefused) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def end_with_parent() -> None:
    """End this process and those that it has started when the program that started it has ended,
    whose next start fetches into the same folder."""

    def watch(parent: int) -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, args=(os.getppid(),), daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
