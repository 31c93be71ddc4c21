"""Packs the files that are sent to hosts: the supervisor, the agent, and a Python runtime for hosts
without Python. A file's name depends on the file's content.

The Python runtime is copied from this machine: the Python program, the standard library, the shared
libraries that they need, and the loader. The copied runtime runs on any Linux that has this
machine's architecture, with any C library.
"""

import gzip
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock

from cavvy.agent.bundle import make_archive
from cavvy.providers.base import Refused
from cavvy.providers.hosts.records import write_bytes
from cavvy.providers.hosts.supervisor.files import hash_lines

_SUPERVISOR = str(Path(__file__).with_name("supervisor"))
# matches a line in the output of the loader's option --list
_LISTED = re.compile(r"=> (/\S+)|^\s+(/\S+) \(", re.MULTILINE)
# The parts of the standard library that neither the agent nor the supervisor uses.
_LEFT_OUT = frozenset(
    {
        "__pycache__",
        "test",
        "tests",
        "idlelib",
        "idle_test",
        "tkinter",
        "turtledemo",
        "lib2to3",
        "ensurepip",
        "pydoc_data",
    }
    | {"site-packages", "dist-packages", "distutils", "lib-dynload"}
)
_MODULES_LEFT_OUT = (
    "_test",
    "_tkinter",
    "_ctypes_test",
    "_xx",
    "xx",
    "_curses",
    "_dbm",
    "_gdbm",
    "readline",
    "nis",
)

_packing = Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A file that Cavvy sends to a host. The file's name depends on the file's content."""

    name: str
    content: bytes = field(repr=False)


def make_bundle(content: bytes, suffix: str) -> Bundle:
    return Bundle(name=hashlib.sha256(content).hexdigest()[:20] + suffix, content=content)


def pack_supervisor() -> Bundle:
    """Return the supervisor as a single file that Python can run."""
    return make_bundle(make_archive(_SUPERVISOR), ".supervisor")


def platform() -> str:
    """Return the platform on which the result of `pack_python` runs, as printed by `uname -s` and
    `uname -m`.
    """
    return f"{os.uname().sysname} {os.uname().machine}"


def pack_python(cache: Path) -> Bundle:
    """Return this machine's Python as a .tar.gz, named after the hash of the files in it, so that
    hosts can compare the unpacked files with the name. The first call for a Python version takes
    seconds, because the call builds the file. Raises Refused.
    """
    program = Path(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
    stamp = f"{program}-{program.stat().st_mtime_ns}-{sys.version}"
    file = cache / f"python-{hashlib.sha256(stamp.encode()).hexdigest()[:20]}.tar.gz"
    with _packing:  # many nodes may need the file at the same time
        if not file.exists():
            write_bytes(file, _make_archive(program))
    content = file.read_bytes()
    return Bundle(name=_hash_files(content)[:20] + ".python", content=content)


def python_command(folder: str) -> Sequence[str]:
    """Return the command that starts a Python runtime unpacked in `folder`."""
    python = [f"{folder}/lib/loader", "--library-path", f"{folder}/lib", f"{folder}/bin/python3"]
    return [*python, "-B"]  # without further files in the folder, whose content is compared


def _hash_files(content: bytes) -> str:
    lines = []
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as archive:
        for member in archive:
            file = archive.extractfile(member)
            if file is not None:
                lines.append(f"{hashlib.sha256(file.read()).hexdigest()}  ./{member.name}\n")
    return hash_lines(lines)


def _make_archive(program: Path) -> bytes:
    loader = _find_loader()
    stdlib, dynamic = _folders()
    modules = [
        path for path in sorted(dynamic.glob("*.so")) if not path.name.startswith(_MODULES_LEFT_OUT)
    ]
    version = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
    members: dict[str, Path] = {"bin/python3": program, "lib/loader": loader}
    members |= {f"{version}/lib-dynload/{path.name}": path for path in modules}
    members |= {f"{version}/{path.relative_to(stdlib)}": path for path in _sources(stdlib)}
    members |= {f"lib/{path.name}": path for path in _libraries(loader, [program, *modules])}
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0, compresslevel=6) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name, path in sorted(members.items()):
            content = _stripped(path)
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755 if os.access(path, os.X_OK) else 0o644
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _stripped(path: Path) -> bytes:
    """Return the content of a file. If this machine has the program `strip`, debug information is
    removed.
    """
    content = path.read_bytes()
    if not content.startswith(b"\x7fELF") or shutil.which("strip") is None:
        return content
    with TemporaryDirectory() as folder:
        target = Path(folder, "stripped")
        done = subprocess.run(
            ["strip", "--strip-debug", "-o", target, path],
            capture_output=True,
            timeout=60,
            check=False,
        )
        return target.read_bytes() if done.returncode == 0 else content


def _folders() -> tuple[Path, Path]:
    stdlib = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix}))
    return stdlib, Path(sysconfig.get_config_var("DESTSHARED") or stdlib / "lib-dynload")


def _sources(stdlib: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(stdlib):
        inner[:] = sorted(
            name for name in inner if name not in _LEFT_OUT and not name.startswith("config-")
        )
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


def _find_loader() -> Path:
    """Return the path of this process's loader. Raises Refused if the loader cannot be found."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        lines = []
    paths = {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}
    found = sorted(
        path for path in paths if re.match(r"ld-(linux|musl|\d)", os.path.basename(path))
    )
    if not found:
        raise Refused(
            "this machine cannot provide a Python for hosts; install python3 (3.8 or newer) on the "
            "hosts"
        )
    return Path(found[0])


def _libraries(loader: Path, files: Sequence[Path]) -> Sequence[Path]:
    """Return the shared libraries that the given files need."""
    found: dict[str, Path] = {}
    for file in files:
        done = subprocess.run(
            [loader, "--list", file], capture_output=True, text=True, timeout=30, check=False
        )
        for match in _LISTED.finditer(done.stdout):
            path = Path(match.group(1) or match.group(2))
            if path.name != loader.name and path.is_file():
                found.setdefault(path.name, path)
    return list(found.values())
