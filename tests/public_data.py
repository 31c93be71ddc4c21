"""Where the public data lies that tests compare figures with."""

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("CAVVY_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def data(path: str) -> Path:
    """A file or folder of the public data; skips the test where it is absent."""
    if not (DATA / path).exists():
        pytest.skip(f"needs {path} under {DATA} (set CAVVY_DATA to where the data lies)")
    return DATA / path
