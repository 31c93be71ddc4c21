"""Fetches one version of a model into the spare slot: `python -m cavvy.edge.update FOLDER MODEL
NUMBER [MIB_PER_S]`. It runs in a process of its own, because it needs `tuf` and much memory.

The version's manifest is trusted only as far as the project's signed lists name it (The Update
Framework); the files are trusted because the manifest has their SHA-256. A file that the served
version has too is linked instead of fetched, and a fetch that was cut goes on where it ended.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from io import BytesIO
from typing import Any

from tuf.api.exceptions import DownloadError, DownloadHTTPError
from tuf.ngclient import FetcherInterface, Updater, UpdaterConfig

from cavvy.edge.server_calls import DeviceCalls, DeviceRefused, ServerFileMissing
from cavvy.edge.slots import ModelSlots, hash_file, read_json, sync_folder

_PIECE = 64 * 1024
_WRONG = 3  # the exit code if what was fetched cannot be trusted


class SignedListFetcher(FetcherInterface):  # type: ignore[misc]  # it has no types
    """Fetches the signed lists and manifests through the device's connection."""

    def __init__(self, calls: DeviceCalls) -> None:
        self._calls = calls

    def _fetch(self, url: str) -> Iterator[bytes]:
        try:
            reply = self._calls.open(url, 0)
        except ServerFileMissing as error:
            raise DownloadHTTPError(str(error), 404) from error
        except (OSError, DeviceRefused) as error:
            raise DownloadError(str(error)) from error
        while piece := reply.read(_PIECE):
            yield piece


def fetch(folder: str, model: str, number: int, mib_per_s: float | None = None) -> None:
    """Fetch and check a version. Raises OSError, DeviceRefused, ValueError, and the errors of
    `tuf`."""
    card = read_json(f"{folder}/card.json")
    if card is None:
        raise ValueError(f"{folder} has no card.json: enrol the device")
    calls = DeviceCalls(card, folder)
    manifest = read_manifest(folder, calls, model, number)
    slots = ModelSlots(f"{folder}/models/{model}")
    slot = slots.prepare(number)
    known = _list_known(slots)
    for each in manifest["files"]:
        path = f"{slot}/files/{_check_path(each['path'])}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if hash_file(path) == each["sha256"]:
            continue
        if each["sha256"] in known:
            os.link(known[each["sha256"]], f"{path}.linked")
            os.rename(f"{path}.linked", path)
        else:
            _fetch_file(calls, each, path, mib_per_s)
        sync_folder(os.path.dirname(path))
    slots.finish(manifest)


def read_manifest(folder: str, calls: DeviceCalls, model: str, number: int) -> dict[str, Any]:
    """Return the signed description of a version."""
    lists = f"{folder}/lists"
    os.makedirs(lists, mode=0o700, exist_ok=True)
    trusted = f"{lists}/root.json"
    # without a root, `tuf` uses what an earlier update has trusted
    known = os.path.exists(trusted)
    root = None if known else calls.call("GET", "/edge/v1/metadata/root.json")
    updater = Updater(
        lists,
        "/edge/v1/metadata/",
        target_dir=lists,
        target_base_url="/edge/v1/manifests/",
        fetcher=SignedListFetcher(calls),
        config=UpdaterConfig(prefix_targets_with_hash=False),
        bootstrap=root,
    )
    updater.refresh()
    path = f"{model}/{number}"
    target = updater.get_targetinfo(f"{path}.json")
    if target is None:
        raise ValueError(f"the signed lists name no version {number} of {model}")
    content = calls.call("GET", f"/edge/v1/manifests/{path}")
    target.verify_length_and_hashes(BytesIO(content))
    found: dict[str, Any] = json.loads(content)
    return found


def _fetch_file(
    calls: DeviceCalls, wanted: dict[str, Any], path: str, mib_per_s: float | None
) -> None:
    part = f"{path}.part"
    size, since = wanted["size"], time.monotonic()
    have = min(os.path.getsize(part), size) if os.path.exists(part) else 0
    received = 0
    while have < size:
        reply = calls.open(f"/edge/v1/files/{wanted['sha256']}", have)
        if reply.status == 200:
            have = 0  # the server sends the whole file
        with open(part, "r+b" if os.path.exists(part) else "wb") as file:
            file.truncate(have)
            file.seek(have)
            while piece := reply.read(_PIECE):
                if have + len(piece) > size:
                    raise ValueError(f"the server sent more than the {size} bytes of {path}")
                file.write(piece)
                have += len(piece)
                received += len(piece)
                if mib_per_s:
                    time.sleep(max(0.0, since + received / mib_per_s / 2**20 - time.monotonic()))
            file.flush()
            os.fsync(file.fileno())
        if have < size:
            raise OSError(f"the connection ended after {have} of {size} bytes")
    if not size:
        open(part, "wb").close()
    if hash_file(part) != wanted["sha256"]:
        os.unlink(part)
        raise ValueError(f"what the server sent as {wanted['path']} has another SHA-256")
    os.rename(part, path)


def _list_known(slots: ModelSlots) -> dict[str, str]:
    """Return the paths of the files of the served version, by their SHA-256."""
    served = "a" if slots.spare() == "b" else "b"
    whole = slots.manifest(served)
    files = [] if whole is None else whole["files"]
    return {each["sha256"]: f"{slots.folder}/{served}/files/{each['path']}" for each in files}


def _check_path(path: str) -> str:
    parts = path.split("/")
    if not path or any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"the manifest has the path {path!r}, which a device does not write")
    return path


def main(arguments: list[str]) -> int:
    from tuf.api.exceptions import RepositoryError

    folder, model, number, *limit = arguments
    try:
        fetch(folder, model, int(number), float(limit[0]) if limit else None)
    except (ValueError, RepositoryError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return _WRONG
    except (OSError, DownloadError, DeviceRefused) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
