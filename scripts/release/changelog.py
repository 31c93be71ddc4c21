"""Assembles the fragments in `changes/` into the changelog.

    python scripts/release/changelog.py                    print what the next release adds
    python scripts/release/changelog.py --release 0.2.0    move it into CHANGELOG.md

A fragment is a Markdown file `NNNN-name.md` or `name.md` with an optional title and a list.
Fragments become one section per release, in the order of their numbers and then of their names,
with their titles as headings. A heading such as `## Added` becomes the first word of its text or of
its only item, and so does a first word such as `fix:`.
"""

import argparse
import re
from datetime import UTC, datetime
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_HEAD = """\
# Changelog

What users notice, newest first; see also [compatibility](docs/reference/compatibility.md).
"""
# A first word of a line, as of a commit, and the kind of its change.
_KINDS = {
    **{"feat": "Added", "new": "Added", "fix": "Fixed"},
    **dict.fromkeys(("perf", "refactor", "docs"), "Changed"),
}
_FIRST_WORD = re.compile(rf"^({'|'.join(_KINDS)}): (.)", re.MULTILINE)
_HEADED = re.compile(r"^## (\w+)\n+(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def list_fragments(root: Path) -> list[Path]:
    found = [path for path in (root / "changes").glob("*.md") if path.name != "README.md"]
    return sorted(found, key=lambda path: (not path.name[0].isdigit(), path.name))


def make_section(heading: str, fragments: list[Path]) -> str:
    parts = [f"## {heading}\n"]
    for path in fragments:
        text = _FIRST_WORD.sub(_write_kind, path.read_text("utf-8").strip())
        # a heading of level 2 is that of a release
        text = _HEADED.sub(lambda found: _join_kind(found[1], found[2]), text)
        title = re.match(r"# (.+)\n+", text)
        if title:
            parts.append(f"### {title[1]}\n\n{text[title.end() :]}\n")
        else:
            parts.append(f"{text}\n")
    return "\n".join(parts)


def _write_kind(found: re.Match[str]) -> str:
    return f"**{_KINDS[found[1]]}.** {found[2].upper()}"


def _join_kind(kind: str, text: str) -> str:
    """Return a text below the heading of a kind; a list stays one, unless it has one item."""
    items = len(re.findall(r"(?m)^\* ", text))
    if text.startswith("* ") and items > 1:
        return f"**{kind}.**\n\n{text}"
    return f"**{kind}.** {text.removeprefix('* ')}"


def release(root: Path, version: str, today: str) -> None:
    """Writes the fragments as the section of `version` into CHANGELOG.md, and removes them.

    Raises ValueError if the version is malformed or in the changelog already, or nothing changed.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise ValueError(f"{version!r} is not a version; write it like 0.2.0 or 0.2.0rc1")
    page = root / "CHANGELOG.md"
    old = page.read_text("utf-8").removeprefix(_HEAD) if page.exists() else ""
    if f"\n## {version} " in old:
        raise ValueError(f"CHANGELOG.md has a section of {version} already")
    fragments = list_fragments(root)
    if not fragments:
        raise ValueError("there is no fragment in changes/, so there is nothing to release")
    section = make_section(f"{version} ({today})", fragments)
    page.write_text(f"{_HEAD}\n{section}{old}", "utf-8")
    for path in fragments:
        path.unlink()


def read_section(root: Path, version: str) -> str:
    """The section of a released version. If the version is not released, the section that the
    fragments give.
    """
    page = root / "CHANGELOG.md"
    text = page.read_text("utf-8") if page.exists() else ""
    found = re.search(rf"^## {re.escape(version)} .*?(?=^## |\Z)", text, re.M | re.S)
    return found[0] if found else make_section("Unreleased", list_fragments(root))


def main() -> None:
    parser = argparse.ArgumentParser(description="Show or write the changelog.")
    parser.add_argument("--release", metavar="VERSION", help="move the fragments to CHANGELOG.md")
    parser.add_argument("--notes", metavar="VERSION", help="print the section of a version")
    given = parser.parse_args()
    try:
        if given.release:
            release(_ROOT, given.release, datetime.now(UTC).date().isoformat())
        else:
            print(read_section(_ROOT, given.notes or "-"), end="")
    except ValueError as error:
        parser.exit(2, f"changelog: {error}\n")


if __name__ == "__main__":
    main()
