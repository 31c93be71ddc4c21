"""The server uses a refreshed catalog without a restart."""

import shutil
import sqlite3
from pathlib import Path

import pytest

from cavvy.server.open_state import find_instance
from cavvy.store.snapshot.choose import SHIPPED


def test_instances_are_read_again_after_a_refresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path))
    before = find_instance("aws", "p5.48xlarge")
    assert before is not None
    assert before.vcpus == 192
    refreshed = tmp_path / "catalog.db"
    shutil.copyfile(SHIPPED, refreshed)
    with sqlite3.connect(refreshed) as connection:
        connection.execute("UPDATE shape SET vcpus = 7 WHERE instance_type = 'p5.48xlarge'")
    after = find_instance("aws", "p5.48xlarge")
    assert after is not None
    assert after.vcpus == 7
