"""What `cavvy tune` says before it begins."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cavvy.cli.main import cli


def test_where_a_package_is_missing_the_command_says_for_which_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torch" else name)
    said = CliRunner().invoke(cli, ["tune", str(tmp_path / "train.py")])
    assert said.exit_code == 1
    assert "torch is not installed" in said.stderr
    assert f"{sys.executable} -m pip install 'grain" in said.stderr
