"""`cavvy check` over the providers that are installed."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cavvy.cli.check import command
from cavvy.cli.main import cli
from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate

PRAIRIE = """
from cavvy.providers.base import Feature, Manifest, Refused
MANIFEST = Manifest(name="prairie", title="a prairie", docs="https://example.org", unsupported={Feature.IMAGE: "only grass"})
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
    (info / "entry_points.txt").write_text("[cavvy.providers]\nprairie = prairie_checked\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CAVVY_CONFIG", str(file))
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))
    return file


def check(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def test_what_is_not_configured_is_shown_and_is_no_failure(settings: Path) -> None:
    result = check("-o", "json")
    states = {each["provider"]: each["state"] for each in json.loads(result.output)}
    assert states["local"] == "ready"
    assert states["prairie"] == "not configured"
    assert result.exit_code == 0
    told = check("--all").output
    assert "a prairie: run `cavvy setup prairie`" in told
    assert f"The settings are in {settings}." in told
    assert f"run `cavvy setup prairie`, which writes {settings}" in check("prairie").output


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
    assert "this machine has no cheaper preemptible capacity" in result.output
    shown = json.loads(check("prairie", "-o", "json").output)
    assert shown["unsupported"] == {"image": "only grass"}


def test_one_that_is_not_configured_shows_the_settings_that_it_has(settings: Path) -> None:
    told = check("slurm").output
    assert "partitions" in told
    assert "The partitions to use, separated by commas" in told


def test_one_that_is_turned_off_is_not_told_to_be_added(settings: Path) -> None:
    settings.write_text("[providers.prairie]\nenabled = false\n")
    result = check()
    row = next(line for line in result.output.splitlines() if line.startswith("prairie"))
    assert " off " in row
    assert "remove `enabled = false` from [providers.prairie]" in row
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("listen", "advertise", "told"),
    [
        ("10.1.2.3:7443", "", "https://10.1.2.3:7443"),
        ("0.0.0.0:7443", "https://gpu.example:443", "https://gpu.example:443"),
        ("7443", "", "HOST:PORT"),
        ("0.0.0.0:7443", "gpu.example", "write https://name-or-address:port"),
    ],
)
def test_whom_nodes_call_is_what_the_server_would_tell_them(
    settings: Path, listen: str, advertise: str, told: str
) -> None:
    settings.write_text(
        f'[server]\ntls_listen = "{listen}"\nadvertise = "{advertise}"\n[providers.join]\n'
    )
    assert told in check("join").output


@pytest.mark.parametrize("name", ["join", "ray"])
def test_a_place_that_could_run_nothing_is_not_ready(
    settings: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    async def whoami(self: object) -> list[tuple[str, str]]:
        return [("version", "9")]

    monkeypatch.setattr("cavvy.providers.ray.provider.RayProvider.whoami", whoami)
    settings.write_text(f"[providers.{name}]\n")
    shown = json.loads(check(name, "-o", "json").output)
    assert shown["state"] == "fails"
    assert "tls_listen" in shown["problem"]
    settings.write_text(f'[server]\ntls_listen = "10.1.2.3:7443"\n[providers.{name}]\n')
    assert json.loads(check(name, "-o", "json").output)["state"] == "ready"


def test_a_plan_takes_places_whose_nodes_call_the_server(
    settings: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def offers(self: object) -> list[Offer]:
        return [
            Offer(provider="ray", region="main", instance_type="cpu", vcpus=4, rate=HourlyRate(0))
        ]

    monkeypatch.setattr("cavvy.providers.ray.provider.RayProvider.offers", offers)
    task = tmp_path / "task.yaml"
    task.write_text("resources: {providers: ray}\nrun: 'true'\n")
    for server, told in (
        ("", "tls_listen"),
        ('[server]\ntls_listen = "10.1.2.3:7443"\n', "can use ray"),
    ):
        settings.write_text(f"{server}[providers.ray]\n")
        assert told in CliRunner().invoke(cli, ["plan", "--here", str(task)]).output


def test_nobody_is_told_to_call_all_addresses(settings: Path) -> None:
    settings.write_text('[server]\ntls_listen = "0.0.0.0:7443"\n[providers.join]\n')
    told = check("join").output
    assert "https://" in told
    assert "0.0.0.0" not in told


def test_wrong_settings_and_names_are_told(settings: Path) -> None:
    settings.write_text("[providers.local]\nprice = 3.5\n")
    result = check("local")
    assert "no such setting" in result.output
    assert result.exit_code == 1
    settings.write_text("[providers.prarie]\n")
    result = check()
    assert "[providers.prarie]: there is no such provider" in result.output
    assert "did you mean 'prairie'?" in result.output
    assert result.exit_code == 2
    assert "[providers.prarie]: there is no such provider" in check("prairie").output
    assert "no provider 'moon'" in check("moon").output
