"""`remuda check` over the providers that are installed."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from remuda.cli.check import command

PRAIRIE = """
from remuda.providers.base import Feature, Manifest, Refused
MANIFEST = Manifest(name="prairie", title="a prairie", docs="https://example.org", lacks={Feature.IMAGE: "only grass"})
class Prairie:
    manifest = MANIFEST
    async def offers(self):
        raise Refused("the key is wrong; ask the sheriff")
def make(context):
    return Prairie()
"""


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file, and a third party's provider that is installed."""
    file = tmp_path / "settings.toml"
    file.write_text("")
    (tmp_path / "prairie_checked.py").write_text(PRAIRIE)
    info = tmp_path / "prairie-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prairie\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[remuda.providers]\nprairie = prairie_checked\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("REMUDA_CONFIG", str(file))
    monkeypatch.setenv("REMUDA_HOME", str(tmp_path / "home"))
    return file


def check(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def test_what_is_not_configured_is_shown_and_is_no_failure(settings: Path) -> None:
    result = check("-o", "json")
    states = {each["provider"]: each["state"] for each in json.loads(result.output)}
    assert states["local"] == "ready"
    assert states["prairie"] == "not configured"
    assert result.exit_code == 0
    assert "add [providers.prairie]" in check().output


def test_a_configured_provider_that_fails_says_why(settings: Path) -> None:
    settings.write_text("[providers.prairie]\n")
    result = check()
    assert "ask the sheriff" in result.output
    assert result.exit_code == 1
    assert check("local").exit_code == 0


def test_one_provider_with_its_gaps_and_settings(settings: Path) -> None:
    settings.write_text("[providers.local]\nprice_usd_hr = 3.5\n")
    result = check("local")
    assert "price_usd_hr" in result.output
    assert "3.5" in result.output
    assert "this machine is never taken away" in result.output
    shown = json.loads(check("prairie", "-o", "json").output)
    assert shown["lacks"] == {"image": "only grass"}


def test_wrong_settings_and_names_are_told(settings: Path) -> None:
    settings.write_text("[providers.local]\nprice = 3.5\n")
    result = check("local")
    assert "no such setting" in result.output
    assert result.exit_code == 1
    settings.write_text("[providers.prarie]\n")
    result = check()
    assert "[providers.prarie] names no provider" in result.output
    assert result.exit_code == 2
    assert "no provider 'moon'" in check("moon").output
