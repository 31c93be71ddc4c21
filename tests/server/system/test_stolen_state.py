"""What a server with a key of files leaves on its disk tells nothing of a job's files."""

import base64
import gzip
from pathlib import Path

import pytest
from scripts.drills.stolen_state import StolenServer, disguise, search, steal


@pytest.mark.parametrize("wrap", ["{}", "x{}", "xy{}", "xyz{}"])
def test_the_search_sees_through_disguises(wrap: str) -> None:
    text = wrap.format("log0123456789abcdef")
    forms = {
        "raw": text.encode(),
        "base64": base64.b64encode(text.encode()),
        "hex": text.encode().hex().encode(),
        "utf-16": text.encode("utf-16"),
        "gzip": b"before" + gzip.compress(text.encode()),
    }
    marks = {"log": "log0123456789abcdef"}
    for name, form in forms.items():
        assert search(iter([(name, b"..." + form + b"...")]), marks) == {"log": 1}, name
    assert not search(iter([("other", b"log0123456789abcde")]), marks)
    assert len(set(disguise("log0123456789abcdef"))) >= 8


def test_a_stolen_state_shows_nothing(tmp_path: Path) -> None:
    assert not steal(StolenServer(tmp_path / "home", encrypted=True), [])
