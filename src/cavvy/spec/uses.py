"""What a task's `setup.uses` names: its entries, matched with the files of a snapshot to check a
task and to compute the key of a reusable setup; and the wheel of the modules that training scripts
import. A task whose `setup.uses` names this wheel gets it with its working folder, so nodes can
install it without a package index.
"""

import base64
import hashlib
import io
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import cavvy
from cavvy.spec.problems import nearest

if TYPE_CHECKING:
    from importlib.metadata import Distribution

MODULES = ("train", "readers")  # these modules import no other module of Cavvy
_LOG = ("__init__", "curves", "errors", "examples")  # of `sdk`: what `cavvy.log` needs
NAME = f"cavvy-{cavvy.__version__}-py3-none-any.whl"
_WHEEL = re.compile(r"cavvy-[\w.+]+-py3-none-any\.whl")  # of this or of another version


def is_added(uses: Sequence[str] | None, folder: Path) -> bool:
    """Return whether submissions of this folder get the wheel: `uses` names it, the folder has no
    such file, and this Cavvy was installed from a folder.
    """
    if NAME not in (uses or ()) or (folder / NAME).exists():
        return False
    from importlib.metadata import distribution

    return make_wheel(distribution("cavvy")) is not None


def write_wheel(cache: Path) -> Path:
    """Write the wheel into a folder, and return its path. Raises OSError."""
    from importlib.metadata import distribution

    wheel = make_wheel(distribution("cavvy"))
    assert wheel is not None  # `is_added` was asked first
    path = cache / NAME
    if not path.exists() or path.read_bytes() != wheel:
        cache.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{NAME}.{os.getpid()}")
        part.write_bytes(wheel)
        part.replace(path)
    return path


def make_wheel(about: "Distribution") -> bytes | None:
    """Return the bytes of the wheel, which contains neither the command line nor the server.
    Returns None if this Cavvy was installed from a package index.
    """
    if (
        about.read_text("direct_url.json") is None
    ):  # PEP 610: installed from a folder, an archive or a repository
        return None
    root = Path(cavvy.__file__).parent
    sources = [root / "__init__.py", root / "py.typed"]
    sources += [root / "sdk" / f"{name}.py" for name in _LOG]
    sources += root.glob("frame/*.py")
    sources += [each for module in MODULES for each in root.glob(f"{module}/**/*.py")]
    files = {
        f"cavvy/{each.relative_to(root).as_posix()}": each.read_bytes() for each in sorted(sources)
    }
    needs = [
        f"Requires-Dist: {each}"
        for each in about.requires or ()
        if "extra ==" in each and "train" in each
    ]
    lines = [
        "Metadata-Version: 2.1",
        "Name: cavvy",
        f"Version: {cavvy.__version__}",
        "Requires-Python: >=3.11",
        "Provides-Extra: train",
        *needs,
    ]
    folder = f"cavvy-{cavvy.__version__}.dist-info"
    files[f"{folder}/METADATA"] = "\n".join([*lines, ""]).encode()
    files[f"{folder}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: cavvy\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = [f"{name},{_digest(data)},{len(data)}\n" for name, data in files.items()]
    files[f"{folder}/RECORD"] = "".join([*record, f"{folder}/RECORD,,\n"]).encode()
    from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

    packed = io.BytesIO()
    with ZipFile(packed, "w", ZIP_DEFLATED) as wheel:
        # timestamps are left out, so that equal sources give equal bytes
        for name, data in files.items():
            wheel.writestr(ZipInfo(name), data, ZIP_DEFLATED)
    return packed.getvalue()


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def is_used(path: str, uses: Sequence[str]) -> bool:
    """Return whether the file `path` is an entry of `uses`, or is inside a folder that is an
    entry.
    """
    return any(path == use or path.startswith(use + "/") for use in uses)


def explain_unused(paths: Collection[str], uses: Sequence[str]) -> list[tuple[str, str]]:
    """Return a message and a suggested fix for each entry of `uses` that matches no file of the
    folder.
    """
    return [
        (
            f"`setup.uses` names {use}, which is not in the frozen working folder ({len(paths):,} "
            "files)",
            _suggest(use, paths),
        )
        for use in uses
        if not any(is_used(path, (use,)) for path in paths)
    ]


def _suggest(use: str, paths: Collection[str]) -> str:
    if any(letter in use for letter in "*?["):
        return "patterns are not supported: list the files, or their folder"
    if _WHEEL.fullmatch(use):
        return (
            f"this Cavvy adds its own package as `{NAME}`: write this name, here and where `setup` "
            "installs it"
        )
    close = nearest(os.path.basename(use), {os.path.basename(path) for path in paths})
    found = (
        next((path for path in sorted(paths) if os.path.basename(path) == close), None)
        if close
        else None
    )
    meant = f"did you mean `{found}`? If not, " if found else ""
    return (
        f"{meant}check that the file exists and that neither .gitignore nor .cavvyignore "
        "excludes it"
    )
