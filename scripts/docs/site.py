"""A hook of MkDocs that makes files outside `docs/` part of the site if a page links to them, and
ranks tutorials and guides before decision records in the search.

In a checkout, a link such as `../ARCHITECTURE.md` leads to the file itself. On the site, the link
leads to a copy below `project/`. A Markdown file becomes a page; other files are copied unchanged.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parents[2]
_DOCS = _ROOT / "docs"
_COPIES = "project/"
_BOOSTS = {"tutorials/": 4, "guides/": 3, "concepts/": 1.5, "adr/": 0.1, _COPIES: 0.1}
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        source = _source(waiting.pop())
        for link in _LINK.findall(source.read_text("utf-8")):
            target = (source.parent / link).resolve()
            uri = _uri(target)
            if uri.startswith(_COPIES) and target.is_file() and not files.get_file_from_path(uri):
                level = InclusionLevel.NOT_IN_NAV
                files.append(
                    File.generated(config, uri, content=target.read_text(), inclusion=level)
                )
                if target.suffix == ".md":
                    waiting.append(uri)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    uri = page.file.src_uri
    boost = next((value for start, value in _BOOSTS.items() if uri.startswith(start)), 1)
    page.meta.setdefault("search", {})["boost"] = boost
    here = posixpath.dirname(uri) or "."
    source = _source(page.file.src_uri)

    def on_site(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve()
        if target.is_dir():
            target /= "README.md"
        return posixpath.relpath(_uri(target), here)

    return _LINK.sub(on_site, markdown)


def _source(uri: str) -> Path:
    """The source file of a page."""
    return _ROOT / uri.removeprefix(_COPIES) if uri.startswith(_COPIES) else _DOCS / uri


def _uri(path: Path) -> str:
    """The URI on the site for a file of the checkout."""
    if path.is_relative_to(_DOCS):
        return path.relative_to(_DOCS).as_posix()
    return _COPIES + path.relative_to(_ROOT).as_posix()
