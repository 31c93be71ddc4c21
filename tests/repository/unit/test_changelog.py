"""Fragments become the changelog, and nothing is lost or written twice."""

from pathlib import Path

import pytest
from scripts.release.changelog import list_fragments, make_section, read_section, release


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes/0002-b.md").write_text("# Spot\n\n* It waits.\n")
    (tmp_path / "changes/0001-a.md").write_text("A sentence.\n")
    (tmp_path / "changes/README.md").write_text("no fragment")
    return tmp_path


def test_fragments_follow_each_other_by_number_and_keep_their_titles(root: Path) -> None:
    section = make_section("Unreleased", list_fragments(root))
    assert section == "## Unreleased\n\nA sentence.\n\n### Spot\n\n* It waits.\n"
    assert read_section(root, "-") == section


def test_a_fragment_without_a_number_follows_those_that_have_one(root: Path) -> None:
    (root / "changes/a-name.md").write_text("fix: It ended.\n")
    names = [path.name for path in list_fragments(root)]
    assert names == ["0001-a.md", "0002-b.md", "a-name.md"]


def test_a_fragment_with_a_kind_as_its_heading_does_not_end_the_section(root: Path) -> None:
    (root / "changes/0003-c.md").write_text("## Added\nA host.\n\n## Fixed\nA fault.\n")
    release(root, "0.1.0", "2026-11-21")
    section = read_section(root, "0.1.0")
    assert section.endswith("* It waits.\n\n**Added.** A host.\n\n**Fixed.** A fault.\n")


def test_an_only_item_is_a_sentence_and_several_stay_a_list(root: Path) -> None:
    (root / "changes/0003-c.md").write_text("## Added\n* A host.\n\n## Fixed\n* One.\n* Two.\n")
    section = make_section("Unreleased", list_fragments(root))
    assert section.endswith("\n**Added.** A host.\n\n**Fixed.**\n\n* One.\n* Two.\n")


@pytest.mark.parametrize(
    ("word", "kind"),
    [("feat", "Added"), ("fix", "Fixed"), ("perf", "Changed"), ("refactor", "Changed")],
)
def test_a_first_word_of_commits_becomes_the_kind(root: Path, word: str, kind: str) -> None:
    (root / "changes/0003-c.md").write_text(f"{word}: a job ends. Not so `x`, a fix: later.\n")
    section = make_section("Unreleased", list_fragments(root))
    assert section.endswith(f"\n**{kind}.** A job ends. Not so `x`, a fix: later.\n")
    (root / "changes/0003-c.md").write_text(f"## {kind}\nSee {word}: it ends.\n")
    section = make_section("Unreleased", list_fragments(root))
    assert section.endswith(f"\n**{kind}.** See {word}: it ends.\n")


def test_a_release_moves_the_fragments_and_keeps_what_is_older(root: Path) -> None:
    release(root, "0.1.0", "2026-11-21")
    assert list_fragments(root) == []
    (root / "changes/0003-c.md").write_text("* New.\n")
    release(root, "0.2.0rc1", "2026-12-01")
    page = (root / "CHANGELOG.md").read_text()
    assert page.count("# Changelog\n") == 1
    assert page.index("## 0.2.0rc1 (2026-12-01)") < page.index("## 0.1.0 (2026-11-21)")
    assert read_section(root, "0.1.0").startswith("## 0.1.0 (2026-11-21)\n\nA sentence.\n")
    assert "A sentence" not in read_section(root, "0.2.0rc1")


@pytest.mark.parametrize("version", ["1", "v0.1.0", "0.1", "0.1.0-beta", ""])
def test_a_malformed_version_is_refused(root: Path, version: str) -> None:
    with pytest.raises(ValueError, match="is not a version"):
        release(root, version, "2026-11-21")
    assert len(list_fragments(root)) == 2


def test_a_version_is_released_once_and_never_empty(root: Path) -> None:
    release(root, "0.1.0", "2026-11-21")
    with pytest.raises(ValueError, match="nothing to release"):
        release(root, "0.2.0", "2026-11-21")
    (root / "changes/0004-d.md").write_text("* More.\n")
    with pytest.raises(ValueError, match="already"):
        release(root, "0.1.0", "2026-11-22")
