"""The Python packages of a version on a device: those of its signed files that are wheels in the
folder `packages`. They are unpacked into FOLDER/packages/NAME, which the version's engine, or a
version of this program, finds before the device's own packages. NAME is a hash of the wheels, so
versions with the same ones share a folder, and no folder changes once it is there. Nothing comes
from an index, and no code of a wheel runs until the version is tried.

Sources: the wheel format, https://packaging.python.org/specifications/binary-distribution-format;
its tags, https://packaging.python.org/specifications/platform-compatibility-tags.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import shutil
import struct
import sys

from .slots import LIST, hash_file, is_installed, read_json, sync, sync_tree, write_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

INSIDE = "packages/"  # of a version's files
_MOST_ENTRIES = 100_000  # files of all wheels of a version
_SPARE_BYTES = 64 << 20  # that an installation leaves free on the disk
_OLD_NAMES = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}
_32_BIT = {"aarch64": "armv7l", "armv8l": "armv7l", "x86_64": "i686"}


class PackagesWrong(ValueError):
    """Raised if the packages of a version cannot be used on this device: a second try would not
    help."""


def is_wheel(path: str) -> bool:
    """Return whether a file of a version is a package of it."""
    return path.startswith(INSIDE) and path.endswith(".whl") and path.count("/") == 1


def this_target() -> str:
    """Return the Python, processor and glibc of this device, such as 3.11-aarch64-2.36; without a
    glibc, the last one is 0.1, older than any wheel for Linux in general asks for."""
    machine = os.uname().machine
    if struct.calcsize("P") == 4:  # of a processor that can do more
        machine = _32_BIT.get(machine, machine)
    try:
        libc = (os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(" ")[2]
    except (OSError, ValueError):
        libc = ""
    return f"{sys.version_info[0]}.{sys.version_info[1]}-{machine}-{libc or '0.1'}"


def choose_files(files: Sequence[dict[str, Any]], target: str) -> list[dict[str, Any]]:
    """Return what a device with this target needs of a version's files: all but the wheels of other
    targets, and one wheel of each package. Raises PackagesWrong."""
    kept = [each for each in files if not is_wheel(each["path"])]
    best: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {}
    seen: dict[str, str] = {}
    for each in files:
        if not is_wheel(each["path"]):
            continue
        words = each["path"].removeprefix(INSIDE).removesuffix(".whl").split("-")
        if len(words) not in (5, 6):
            raise PackagesWrong(f"{each['path']} is not the name of a wheel")
        name = re.sub(r"[-_.]+", "-", words[0]).lower()
        seen[name] = f"{words[0]} {words[1]}"
        rank = _rank(words[-3:], target)
        if rank and rank > best.get(name, ((), {}))[0]:
            best[name] = rank, each
    if missing := sorted(seen[name] for name in seen.keys() - best.keys()):
        raise PackagesWrong(f"the version has no wheel of {missing[0]} for this device ({target})")
    return [*kept, *(each for _, each in best.values())]


def _rank(tags: Sequence[str], target: str) -> tuple[int, ...]:
    """Return how well a wheel with these three tags fits a target, or ()."""
    version, machine, libc = target.split("-")
    minor, newest = int(version.split(".")[1]), tuple(map(int, libc.split(".")))
    mine = f"cp3{minor}{getattr(sys, 'abiflags', '').replace('m', '')}"
    best: tuple[int, ...] = ()
    for python in tags[0].split("."):
        found = re.fullmatch(r"(cp|py)3(\d*)", python)
        if found is None or int(found[2] or 0) > minor:
            continue
        same = int(found[2] or 0) == minor
        for abi in tags[1].split("."):
            fit = {mine: 3 * same, "abi3": 2 * (found[1] == "cp"), "none": 1}.get(abi, 0)
            if not fit or (found[1] == "cp" and abi == "none" and not same):
                continue
            for platform in tags[2].split("."):
                needed = _find_libc(platform, machine)
                if needed is not None and needed <= newest:
                    best = max(best, (fit, *needed))
    return best


def _find_libc(platform: str, machine: str) -> tuple[int, ...] | None:
    """Return the least glibc of a wheel's platform, or None if it is for another processor."""
    if platform == "any":
        return (0, 0)
    if platform == f"linux_{machine}":
        return (0, 1)
    name = platform.removesuffix(f"_{machine}")
    if found := re.fullmatch(r"manylinux_(\d+)_(\d+)", name):
        return int(found[1]), int(found[2])
    return _OLD_NAMES.get(name)


def name_packages(files: Sequence[dict[str, Any]]) -> str:
    """Return the name of the folder for the wheels among a version's files, or "" without any."""
    wheels = sorted(each["sha256"] for each in files if is_wheel(each["path"]))
    told = "\n".join([str(sys.implementation.cache_tag), *wheels])
    return hashlib.sha256(told.encode()).hexdigest()[:32] if wheels else ""


def install(folder: str, files: str, wheels: Sequence[str]) -> None:
    """Unpack the packages of a version, whose fetched files are in `files`, unless they are there.
    After a loss of power it begins anew. Raises PackagesWrong, and OSError if the disk is full.
    """
    # these take memory that the program itself does not need
    import compileall
    import zipfile
    import zlib

    found = [{"path": each, "sha256": hash_file(f"{files}/{each}")} for each in wheels]
    target = f"{folder}/{INSIDE}{name_packages(found)}"
    if not wheels or is_installed(target):
        return
    fresh = f"{target}.new"
    for each in (target, fresh):
        shutil.rmtree(each, ignore_errors=True)
    os.makedirs(fresh, mode=0o700)
    count = 0
    for path in wheels:
        try:
            with zipfile.ZipFile(f"{files}/{path}") as wheel:
                count += len(wheel.infolist())
                _check_room(fresh, wheel, count)
                for entry in wheel.infolist():
                    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                        raise NotImplementedError("it is compressed in an unusual way")
                    if (inner := _place(entry.filename)) and not entry.is_dir():
                        os.makedirs(os.path.dirname(f"{fresh}/{inner}"), mode=0o700, exist_ok=True)
                        with wheel.open(entry) as packed, open(f"{fresh}/{inner}", "wb") as file:
                            shutil.copyfileobj(packed, file)
                        if entry.external_attr >> 16 & 0o111:
                            os.chmod(f"{fresh}/{inner}", 0o700)
        except (
            zipfile.BadZipFile,
            zlib.error,
            EOFError,
            NotImplementedError,
            RuntimeError,
            NotADirectoryError,
            IsADirectoryError,
            FileExistsError,
        ) as error:
            raise PackagesWrong(f"{path} cannot be unpacked: {error}") from error
    compileall.compile_dir(fresh, quiet=2)  # an engine may write nothing there
    hashes = {}
    for inner, _, names in os.walk(fresh):
        for name in names:
            path = f"{inner}/{name}"
            hashes[os.path.relpath(path, fresh)] = hash_file(path)
    write_json(f"{fresh}/{LIST}", hashes)
    sync_tree(fresh)
    os.rename(fresh, target)
    sync(os.path.dirname(target))
    sync(folder)


def _check_room(folder: str, wheel: Any, count: int) -> None:
    """Raises OSError if the disk is too full, and PackagesWrong if the packages have too many
    files."""
    if count > _MOST_ENTRIES:
        raise PackagesWrong(f"the packages have more than {_MOST_ENTRIES:,} files")
    # a compiled module is about as long as its source
    size = sum(each.file_size * (1 + each.filename.endswith(".py")) for each in wheel.infolist())
    if (free := shutil.disk_usage(folder).free) < size + _SPARE_BYTES:
        raise OSError(f"the disk has {free >> 20} MiB free; packages need {size >> 20} MiB")


def _place(name: str) -> str:
    """Return where a file of a wheel goes, or "" for scripts and data, which no engine finds.
    Raises PackagesWrong."""
    parts = name.split("/")
    if parts[0].endswith(".data"):
        parts = parts[2:] if parts[1:2] in (["purelib"], ["platlib"]) else []
    if any(each in ("", ".", "..") for each in parts[:-1]) or parts[-1:] == [".."]:
        raise PackagesWrong(f"a wheel has the path {name[:200]!r}, which a device does not write")
    return "" if parts == [LIST] else "/".join(parts)


def remove_unused(folder: str, kept: str) -> None:
    """Remove the packages that no version on this device has, but those that are `kept` and what
    was begun of them."""
    used = {kept}
    for pattern in ("models/*/[ab]", "program/slots/[ab]"):
        for slot in glob.glob(f"{glob.escape(folder)}/{pattern}/whole.json"):
            used.add(str((read_json(slot) or {}).get("packages", "")))
    for path in glob.glob(f"{glob.escape(folder)}/{INSIDE}*"):
        if os.path.basename(path) not in used:
            shutil.rmtree(path, ignore_errors=True)
