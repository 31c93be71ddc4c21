"""A hook of MkDocs that makes files outside `docs/` part of the site if a page links to them, and
ranks tutorials and guides before decision records in the search.

In a checkout, a link such as `../ARCHITECTURE.md` leads to the file itself. On the site, the link
leads to a copy below `project/`. A Markdown file becomes a page; other files are copied unchanged.

The site also gets what no committed file contains, so that a new provider changes none: a list of
the providers with their features, the pages of the providers in the navigation, and in the section
"Clouds" the guides to which these pages lead.
"""

import logging
import posixpath
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_log = logging.getLogger("mkdocs.hooks")
_ROOT = Path(__file__).resolve().parents[2]
_DOCS = _ROOT / "docs"
_COPIES = "project/"
_BOOSTS = {
    **{"tutorials/": 4, "guides/": 3, "faq": 3, "troubleshooting": 3, "concepts/": 1.5},
    **{"adr/": 0.1, _COPIES: 0.1},
}
# Guides to one provider each, which say a little of everything; found when the site is built.
_CLOUD_GUIDES: set[str] = set()
_CLOUD_BOOST = 0.6
_PROVIDERS = _DOCS / "reference" / "providers"
_GUIDE = re.compile(r"\]\(\.\./\.\./(guides/[\w-]+\.md)\)")
_FEATURE = re.compile(r"^\| ([\w-]+) \| (lacking|agent|[*]+[\w -]+[*]+) \|", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    add_providers(config.nav or [])
    return config


def add_providers(nav: list[Any]) -> None:
    """Add the pages of the providers, and their guides, to the navigation."""
    named = set(re.findall(r"guides/[\w-]+\.md", str(nav)))
    pages = sorted(_PROVIDERS.glob("*.md"))
    linked = {guide for page in pages for guide in _GUIDE.findall(page.read_text("utf-8"))}
    _CLOUD_GUIDES.update(linked - named)
    _section(nav, "Clouds").extend(sorted(linked - named))
    listed = [f"reference/providers/{page.name}" for page in pages]
    _section(nav, "Reference").append({"Each provider": ["reference/providers/README.md", *listed]})


def _section(nav: list[Any], title: str) -> list[Any]:
    """The items of the section with this title, at any depth."""
    for section in nav:
        for name, items in section.items() if isinstance(section, dict) else ():
            if isinstance(items, list):
                if name == title:
                    return items
                with suppress(LookupError):
                    return _section(items, title)
    raise LookupError(f"mkdocs.yml has no section {title!r}")


def list_providers() -> str:
    """A page with all providers and their features."""
    pages = {page.name: page.read_text("utf-8") for page in sorted(_PROVIDERS.glob("*.md"))}
    features = {name: dict(_FEATURE.findall(text)) for name, text in pages.items()}
    columns = list(dict.fromkeys(feature for found in features.values() for feature in found))
    rows = [
        f"| [{text.partition(chr(10))[0].removeprefix('# ')}]({name}) | "
        + " | ".join(features[name].get(column, "") for column in columns)
        + " |"
        for name, text in pages.items()
    ]
    head = f"| provider | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|\n"
    words = "[What the words mean](../providers.md#features)."
    return f"# All providers and their features\n\n{words}\n\n{head}" + "\n".join(rows) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, "reference/providers/README.md", content=list_providers()))
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        source = _source(waiting.pop())
        if not source.exists():  # the list of providers
            continue
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
    if uri in _CLOUD_GUIDES:
        boost = _CLOUD_BOOST
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


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Warn of a list or a table that is shown as text, since no empty line is before it. GitHub
    shows it as it was meant."""
    for paragraph in re.findall(r"<p>(.*?)</p>", html, re.DOTALL):
        text = re.sub(r"<code>.*?</code>", "", paragraph, flags=re.DOTALL)
        if shown := re.search(r"^\s*(?:[*] .*|.*\|-{3}.*)$", text, re.MULTILINE):
            _log.warning(
                "%s: an empty line is missing before the list or table: %s",
                page.file.src_uri,
                shown[0].strip()[:60],
            )
    return html
