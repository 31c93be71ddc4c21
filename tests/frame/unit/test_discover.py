"""Capabilities are found, and those that cannot be used are left out with the reason."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cavvy.frame.capability import Capability
from cavvy.frame.discover import _choose, find_capabilities

ROOT = Path(__file__).resolve().parents[3]
OWN = sorted(path.parent.name for path in ROOT.glob("src/cavvy/capabilities/*/capability.py"))


def list_commands(source: Path, *more: Path) -> dict[str, object]:
    """The commands by section, and what is left out, of the Cavvy in a folder."""
    code = (
        "import json, cavvy\nfrom cavvy.cli.main import LEFT_OUT, PLACES, SECTIONS, cli\n"
        "print(json.dumps([cavvy.__file__, SECTIONS, LEFT_OUT, PLACES]))\n"
    )
    paths = os.pathsep.join(map(str, (source, *more)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    file, sections, left_out, places = json.loads(done.stdout)
    assert Path(file).is_relative_to(source)
    return {"sections": sections, "left out": left_out, "places": places}


def test_own_capabilities_are_found_by_their_folders() -> None:
    found = find_capabilities()
    assert [each.name for each in found.capabilities] == OWN
    assert found.faults == {}
    for each in found.capabilities:
        assert all((ROOT / "docs" / page).exists() for page in each.pages)


@pytest.mark.parametrize("name", OWN)
def test_the_rest_works_without_a_capability(name: str, tmp_path: Path) -> None:
    (taken,) = [each for each in find_capabilities().capabilities if each.name == name]
    source = tmp_path / "src"
    shutil.copytree(
        ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    whole = list_commands(source)
    shutil.rmtree(source / "cavvy" / "capabilities" / name)
    rest = list_commands(source)
    gone = {each.name for each in taken.commands}
    assert gone <= set(whole["places"])  # type: ignore[call-overload]
    assert rest["left out"] == {}
    for title, rows in whole["sections"].items():  # type: ignore[attr-defined]
        kept = [word for word in rows if word not in gone]
        assert list(rest["sections"].get(title, ())) == kept  # type: ignore[attr-defined]


def test_a_package_of_someone_else_adds_a_command(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "capability" / "cavvy_today", tmp_path / "cavvy_today")
    metadata = tmp_path / "cavvy_today-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cavvy-today\nVersion: 1.0\n")
    points = metadata / "entry_points.txt"
    points.write_text("[cavvy.capabilities]\ntoday = cavvy_today.capability\n")
    found = list_commands(ROOT / "src", tmp_path)
    names = list(found["sections"]["Run and watch"])  # type: ignore[index]
    assert names[names.index("ps") + 1] == "today"
    assert found["left out"] == {}

    points.write_text("[cavvy.capabilities]\nruns = cavvy_today.capability\ngone = no.such\n")
    found = list_commands(ROOT / "src", tmp_path)
    assert "today" not in found["sections"]["Run and watch"]  # type: ignore[index]
    assert found["left out"] == {
        "gone": "ModuleNotFoundError: No module named 'no'",
        "runs": "ValueError: cavvy_today.capability: its name is 'today', expected 'runs'",
    }


def test_what_needs_a_missing_capability_is_left_out() -> None:
    made = {
        "base": Capability("base", ""),
        "chat": Capability("chat", "", needs=("models",)),
        "edge": Capability("edge", "", needs=("base",)),
        "more": Capability("more", "", needs=("chat",)),
    }
    found = _choose(dict.fromkeys(made, ""), {}, lambda name, _: made[name])
    assert [each.name for each in found.capabilities] == ["base", "edge"]
    assert found.faults == {
        "chat": "it needs models, which is not installed",
        "more": "it needs chat, which is not installed",
    }


def test_code_of_others_that_ends_the_process_is_left_out() -> None:
    def read(name: str, module: str) -> Capability:
        raise SystemExit(3)

    assert _choose({"bad": "x"}, {}, read) == ((), {"bad": "SystemExit: 3"})
