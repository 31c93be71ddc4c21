"""Providers are found without being named, and their settings are checked."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cavvy.providers.base import Manifest, ProviderContext, ProviderSetting, SettingKind
from cavvy.providers.prices import list_sources, list_unavailable
from cavvy.providers.registry import (
    BadSettings,
    check_settings,
    enabled,
    list_known,
    load,
    manifests,
)

MANIFEST = Manifest(
    name="meadow",
    title="a meadow",
    docs="docs/meadow.md",
    settings=(
        ProviderSetting(
            name="acres",
            kind=SettingKind.NUMBER,
            unit="acres",
            default=2,
            minimum=0,
            maximum=100,
            consequence="size",
        ),
        ProviderSetting(name="fence", kind=SettingKind.FLAG, consequence="keeps horses in"),
        ProviderSetting(name="gates", kind=SettingKind.INTEGER, consequence="ways out"),
        ProviderSetting(name="owner", kind=SettingKind.TEXT, consequence="whose it is"),
    ),
)
THIRD_PARTY = """
from cavvy.providers.base import Manifest
MANIFEST = Manifest(name="prairie", title="a prairie", docs="https://example.org")
def make(context):
    return (MANIFEST.name, context.installation, context.home, dict(context.settings))
"""


@pytest.fixture
def prairie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed distribution that has a provider."""
    (tmp_path / "prairie_provider.py").write_text(THIRD_PARTY)
    info = tmp_path / "prairie-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prairie\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cavvy.providers]\nprairie = prairie_provider\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("prairie_provider", None)


def test_local_is_on_by_default_and_only_enabled_ones_are_imported(prairie: None) -> None:
    assert [known.name for known in enabled({})] == ["local"]
    assert [known.name for known in enabled({"prairie": {}})] == ["local", "prairie"]
    assert [known.name for known in enabled({"local": {"enabled": False}, "prairie": {}})] == [
        "prairie"
    ]
    assert "prairie_provider" not in sys.modules
    assert not list_known()["prairie"].by_default


def test_a_provider_that_is_installed_while_the_server_runs_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folders of packages are read only once, as long as they stay the same."""
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "prairie" not in list_known()
    os.utime(tmp_path, (1, 1))
    assert "prairie" not in list_known()
    info = tmp_path / "prairie-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prairie\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cavvy.providers]\nprairie = prairie_provider\n")
    assert "prairie" in list_known()


def test_what_is_loaded_gets_its_folder_and_settings(prairie: None, tmp_path: Path) -> None:
    context = ProviderContext(installation="i", home=tmp_path / "new" / "providers")
    made = load({"prairie": {"enabled": True}}, context)
    assert made["prairie"] == (
        "prairie",
        "i",
        tmp_path / "new" / "providers" / "prairie",
        {"enabled": True},
    )
    assert made["local"].manifest.name == "local"
    for folder in ("new", "new/providers", "new/providers/local"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700


def test_a_table_that_names_no_provider_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(
        BadSettings, match=r"\[providers.locl\]: no such provider. Did you mean 'local'\?"
    ):
        enabled({"locl": {}})


def test_a_module_that_is_no_provider_is_an_error(tmp_path: Path, prairie: None) -> None:
    (tmp_path / "prairie_provider.py").write_text("MANIFEST = 1\n")
    with pytest.raises(BadSettings, match="expected MANIFEST"):
        load({"prairie": {}}, ProviderContext(installation="i", home=tmp_path))
    (tmp_path / "prairie_provider.py").write_text("import no_such_sdk\n")
    sys.modules.pop("prairie_provider", None)
    with pytest.raises(BadSettings, match="cannot be imported: No module named 'no_such_sdk'"):
        load({"prairie": {}}, ProviderContext(installation="i", home=tmp_path))


CLOUD = """
from cavvy.providers.base import Manifest
MANIFEST = Manifest(name="prairie", title="a prairie", docs="https://example.org", {fields})
"""
BROKEN = {
    "undefined": "NameError: name 'undefined' is not defined (FILE, line 1)",
    "def make(:": "invalid syntax (FILE, line 1)",
    "raise SystemExit(3)": "SystemExit: 3 (FILE, line 1)",
    "open('/no/such/file')": "FileNotFoundError",
    "GOOD\ndef make(context): raise RuntimeError('boom')": "RuntimeError: boom (FILE, line 5)",
    "GOOD\ndef make(context, more): return 1": "missing 1 required positional argument: 'more'",
    "GOOD\ndef make(context): pass": "make(context) returned None",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_fault_of_a_foreign_package_names_the_package(
    text: str, prairie: None, tmp_path: Path
) -> None:
    file = tmp_path / "prairie_provider.py"
    file.write_text(text.replace("GOOD", CLOUD.format(fields="prices='no_such_prices'")))
    told = BROKEN[text].replace("FILE", str(file))
    with pytest.raises(BadSettings, match=r"provider 'prairie' cannot be .*; repair") as raised:
        load({"prairie": {}}, ProviderContext(installation="i", home=tmp_path))
    assert told in str(raised.value)


def test_a_broken_package_does_not_disturb_others(prairie: None, tmp_path: Path) -> None:
    file = tmp_path / "prairie_provider.py"
    file.write_text("undefined")
    assert "local" in [each.name for each in manifests()]
    assert "aws" in list_sources()
    sys.modules.pop("prairie_provider", None)
    file.write_text(CLOUD.format(fields="prices='no_such_prices'"))
    assert "aws" in list_sources()
    assert "No module named 'no_such_prices'" in list_unavailable()["prairie"]


def test_settings_get_their_defaults() -> None:
    assert check_settings(MANIFEST, {"gates": 3}) == {"enabled": True, "acres": 2, "gates": 3}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"acers": 1}, r"\[providers.meadow\] acers: no such setting. Did you mean 'acres'\?"),
        ({"zzz": 1}, "Known: acres, enabled, fence, gates, owner"),
        ({"acres": "two"}, r"acres: expected number \(acres\), not 'two'"),
        ({"acres": True}, "expected number"),
        ({"acres": -1}, "at least 0"),
        ({"acres": 101}, "at most 100 acres, not 101"),
        ({"fence": 1}, "expected true or false"),
        ({"gates": 1.5}, "expected integer"),
        ({"acres": float("nan")}, "expected number"),
        ({"acres": 10**400}, "expected number"),
        ({"owner": True}, "expected text"),
        ({"enabled": "no"}, "expected true or false"),
    ],
)
def test_wrong_settings_say_what_fits(
    table: dict[str, str | int | float | bool], message: str
) -> None:
    with pytest.raises(BadSettings, match=message):
        check_settings(MANIFEST, table)


def test_a_text_may_be_written_as_a_number() -> None:
    assert check_settings(MANIFEST, {"owner": 1234})["owner"] == "1234"
    assert check_settings(MANIFEST, {"owner": 2.50})["owner"] == "2.5"


def test_every_own_provider_says_who_it_is() -> None:
    found = {manifest.name: manifest for manifest in manifests()}
    assert "local" in found
    for manifest in found.values():
        assert manifest.title
        assert manifest.docs
        assert (
            not manifest.docs.endswith(".md")
            or (Path(__file__).parents[4] / manifest.docs).exists()
        ), manifest.docs


# They rent nothing: these reasons are about the user's own machines and clusters, or about Cavvy.
NO_CLOUDS = {"fake", "join", "kubernetes", "local", "pbs", "ray", "slurm", "ssh"}


def test_every_reason_of_a_cloud_names_a_page_of_the_cloud() -> None:
    found = {manifest.name: manifest for manifest in manifests()}
    assert set(found) >= NO_CLOUDS
    without = [
        f"{name}: {reason}"
        for name, manifest in found.items()
        if name not in NO_CLOUDS
        for reason in (*manifest.unsupported.values(), manifest.no_quotas)
        if reason and not re.search(r"\(https://[\w.-]+\.[a-z]+/\S*\)", reason)
    ]
    assert not without


PARTS = """
def make_layer(manifest, context, cloud):
    return manifest.name, cloud()
def make_provider(manifest, context):
    return manifest.name
def make_cloud():
    return "cloud"
"""


@pytest.mark.parametrize(
    ("fields", "made"),
    [
        ("cloud='prairie_parts:make_provider'", "prairie"),
        (
            "cloud='prairie_parts:make_cloud', layer='prairie_parts:make_layer'",
            ("prairie", "cloud"),
        ),
        ("", "'' in its manifest names no class or function"),
        ("cloud='prairie_parts:Prairie'", "'prairie_parts:Prairie' in its manifest names no class"),
        ("cloud='prairie_parts'", "expected cloud='MODULE:NAME', or a function make"),
        ("cloud='no_such_parts:Prairie'", "cannot be imported: No module named 'no_such_parts'"),
    ],
)
def test_the_manifest_names_what_makes_the_provider(
    fields: str, made: object, prairie: None, tmp_path: Path
) -> None:
    (tmp_path / "prairie_provider.py").write_text(CLOUD.format(fields=fields))
    (tmp_path / "prairie_parts.py").write_text(PARTS)
    context = ProviderContext(installation="i", home=tmp_path)
    try:
        if isinstance(made, str) and " " in made:
            with pytest.raises(BadSettings, match=re.escape(made)):
                load({"prairie": {}}, context)
        else:
            assert load({"prairie": {}}, context)["prairie"] == made
    finally:
        sys.modules.pop("prairie_parts", None)
