"""Hints install what is missing for the Python in use, and never ask an index for Cavvy."""

import importlib.metadata
import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from cavvy.packages import extra_command, install_command, update_command

ROOT = Path(__file__).resolve().parents[3]
PLACES = ("src", "docs", "examples", "changes", "README.md", "ARCHITECTURE.md")


def set_metadata(
    monkeypatch: pytest.MonkeyPatch, folder: Path, origin: dict[str, object] | None = None
) -> None:
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: cavvy\nVersion: 0.1.0\nRequires-Dist: click>=8.1\n"
        "Requires-Dist: boto3>=1.35; extra == 'aws'\nRequires-Dist: b[c]>=1; extra == \"sim\"\n"
        "Requires-Dist: a>=2; extra == 'sim'\n"
    )
    if origin is not None:
        (folder / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(
        importlib.metadata.Distribution,
        "from_name",
        lambda name: importlib.metadata.PathDistribution(folder),
    )


def test_nothing_tells_people_to_install_cavvy_from_an_index() -> None:
    said = re.compile(r"pip3? install [^\n`]*?(?<![\w./:-])['\"]?cavvy(?![\w./-])")
    files = [each for place in PLACES for each in [ROOT / place, *(ROOT / place).rglob("*")]]
    texts = {
        each: each.read_text() for each in files if each.suffix in {".py", ".md", ".txt", ".yaml"}
    }
    assert len(texts) > 500
    assert [str(each) for each, text in texts.items() if said.search(text)] == []
    # `cavvy init` writes the wheel instead, where no index has brought this Cavvy
    listed = [
        each.parent
        for each, text in texts.items()
        if each.suffix == ".txt" and re.search(r"(?m)^cavvy\b", text)
    ]
    templates = ROOT / "src/cavvy/capabilities/templates"
    assert [str(each) for each in listed if not each.is_relative_to(templates)] == []
    for wrong in ("pip install cavvy", "pip install 'cavvy[aws]'", "pip install --upgrade cavvy"):
        assert said.search(wrong), wrong


def test_an_extra_is_installed_by_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_metadata(monkeypatch, tmp_path)
    start = [sys.executable, "-m", "pip", "install"]
    assert shlex.split(extra_command("aws")) == [*start, "boto3>=1.35"]
    assert shlex.split(extra_command("sim")) == [*start, "b[c]>=1", "a>=2"]
    # sources that are newer than the installed metadata
    assert extra_command("edge") == "install the packages of `edge` in pyproject.toml"


def test_the_command_is_quoted_and_uses_uv_where_python_has_no_pip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "executable", "/a b/python")
    assert install_command("x>=1") == "'/a b/python' -m pip install 'x>=1'"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert install_command("x>=1") == "uv pip install --python '/a b/python' 'x>=1'"


def test_a_clone_is_updated_by_git_and_anything_else_as_it_was_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_metadata(
        monkeypatch, tmp_path, {"url": "file:///my%20clone", "dir_info": {"editable": True}}
    )
    command = f"git -C '/my clone' pull && {sys.executable} -m pip install -e '/my clone'"
    assert update_command("9.0.0") == command
    set_metadata(monkeypatch, tmp_path, {"url": "file:///a.whl", "archive_info": {}})
    assert update_command("9.0.0") == "install Cavvy 9.0.0 in the same way as the installed version"


def test_sources_without_metadata_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", unsupported)
    assert extra_command("aws") == "install the packages of `aws` in pyproject.toml"
    assert "9.0.0" in update_command("9.0.0")
