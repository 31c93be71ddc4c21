"""A lying node attacks a running server; `scripts/drills/lying_node.py` does the same in full."""

from pathlib import Path

import pytest
from tests.hostile.hostile_node import play

pytestmark = pytest.mark.system


def test_nothing_that_a_lying_node_tries_goes_through(tmp_path: Path) -> None:
    found, probe, seen = play(tmp_path, seed=1, scale=1)
    assert {attack.tried: escapes for attack, escapes in found.items() if escapes} == {}
    assert not [status for status in seen if status >= 500]
    assert probe.attacked, "the server answered nobody else"
