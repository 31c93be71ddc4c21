"""Builds a wheel of the modules that training scripts import. Template folders contain this wheel,
so nodes can install it without a package index.
"""

import base64
import hashlib
import io
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import cavvy

MODULES = ("train", "readers")  # these modules import no other module of Cavvy
NAME = f"cavvy-{cavvy.__version__}-py3-none-any.whl"


def make_wheel(about: Distribution) -> bytes | None:
    """Return the bytes of the wheel, which contains neither the command line nor the server.
    Returns None if this Cavvy was installed from a package index.
    """
    if (
        about.read_text("direct_url.json") is None
    ):  # PEP 610: installed from a folder, an archive or a repository
        return None
    root = Path(cavvy.__file__).parent
    sources = [root / "__init__.py", root / "py.typed"]
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
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as wheel:
        for (
            name,
            data,
        ) in files.items():  # Timestamps are left out, so that equal sources give equal bytes.
            wheel.writestr(zipfile.ZipInfo(name), data, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
