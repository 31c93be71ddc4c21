"""Which providers `cavvy check` lists."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cavvy.cli.main import cli


def list_names(*arguments: str) -> list[str]:
    found = CliRunner().invoke(cli, ["check", *arguments, "-o", "json"], prog_name="cavvy")
    told = json.loads(found.stdout)
    return [each["provider"] for each in (told if isinstance(told, list) else [told])]


@pytest.mark.parametrize("configured", [False, True])
def test_a_test_double_is_listed_only_if_it_is_configured_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configured: bool
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("[providers.fake]\n" if configured else "")
    monkeypatch.setenv("CAVVY_CONFIG", str(settings))
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path))
    listed = list_names()
    assert ("fake" in listed, "aws" in listed) == (configured, True)
    assert list_names("fake") == ["fake"]


def test_a_task_file_is_sent_to_validate() -> None:
    found = CliRunner().invoke(cli, ["check", "train.yaml"], prog_name="cavvy")
    assert (found.exit_code, "cavvy validate train.yaml" in found.output) == (2, True)


def test_the_table_shows_what_is_configured_and_only_names_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("[providers.slurm]\nenabled = false\n")
    monkeypatch.setenv("CAVVY_CONFIG", str(settings))
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path))
    shown = CliRunner().invoke(cli, ["check"], prog_name="cavvy").output
    states = [line.split()[:2] for line in shown.split("\n\n")[0].splitlines()[1:]]
    assert states == [["local", "ready"], ["slurm", "off"]]
    assert "Not configured (" in shown
    assert "aws, " in shown
    everything = CliRunner().invoke(cli, ["check", "--all"], prog_name="cavvy").output
    assert "Amazon EC2: run `cavvy setup aws`" in everything
    assert "Not configured (" not in everything
