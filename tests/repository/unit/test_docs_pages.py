"""The pages hang together: links lead somewhere, the index knows every page, and what programs
write is fresh.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import yaml
from scripts.docs import cli as reference
from scripts.docs import decisions, providers, site
from scripts.docs import python as interface

from cavvy.cli.main import COMMANDS, MERGED, SECTIONS, cli
from cavvy.providers.abilities import ABILITIES
from cavvy.providers.registry import manifests
from cavvy.providers.vm.abilities import REST_LAYER
from cavvy.store.snapshot import CatalogSnapshot
from cavvy.store.snapshot.choose import SHIPPED

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """The anchors that a Markdown page gets for its headings."""
    heads = re.findall(
        r"^#+ (.+)$",
        re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL),
        re.MULTILINE,
    )
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", text)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no {target}"
        assert not anchor or anchor in anchors(target.read_text("utf-8")), (
            f"{link}: no such heading"
        )


@pytest.fixture(scope="module")
def files() -> list[str]:
    folders = ("src", "tests", "scripts", "examples", "benchmarks")
    return [
        f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_of_ours_that_a_page_names_are_there(page: Path, files: list[str]) -> None:
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text("utf-8")))
    assert [
        name for name in sorted(named) if not any(each.endswith(f"/{name}") for each in files)
    ] == []


def test_the_reference_lists_every_ability_of_the_seam() -> None:
    seam = (ROOT / "src/cavvy/providers/abilities.py").read_text("utf-8")
    protocols = re.findall(r"^class (\w+)\(Protocol\)", seam, re.MULTILINE)
    assert len(protocols) == len(ABILITIES)
    page = (ROOT / "docs/reference/providers.md").read_text("utf-8")
    assert [each.name for each in ABILITIES if f"| {each.name} |" not in page] == []


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text("utf-8")
    listed = {(ROOT / "docs" / link).resolve() for link in LINK.findall(index)}
    wanted = {
        page
        for folder in ("tutorials", "guides", "extend", "concepts", "reference")
        for page in (ROOT / "docs" / folder).glob("*.md")
    }
    nav: list[Any] = [{"Clouds": []}, {"Reference": []}]
    site.add_providers(nav)  # the page of its provider leads to such a guide
    assert {page.relative_to(ROOT / "docs").as_posix() for page in wanted - listed} <= set(
        nav[0]["Clouds"]
    )


def test_the_list_of_decisions_is_fresh() -> None:
    page = (ROOT / "docs/adr/README.md").read_text("utf-8")
    assert page == decisions.make_page(), "run: python scripts/docs/decisions.py"


def test_decisions_that_files_name_by_number_are_there(files: list[str]) -> None:
    numbers = {path.name[:4] for path in (ROOT / "docs/adr").glob("[0-9]*.md")}
    named = re.compile(r"(?:\bADR|\b[Dd]ecision)\s+(\d{4})\b|\badr/(\d{4})\b")
    pages = [*PAGES, *(ROOT / "benchmarks").glob("*.md"), *(ROOT / name[1:] for name in files)]
    assert {
        f"{page.relative_to(ROOT)}: {number}"
        for page in pages
        for match in named.findall(page.read_text("utf-8"))
        if (number := match[0] or match[1]) not in numbers
    } == set()


def test_the_reference_of_commands_is_fresh() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text("utf-8")
    assert page == reference.make_page(), "run: python scripts/docs/cli.py"


def test_the_reference_of_the_python_interface_is_fresh() -> None:
    page = (ROOT / "docs/reference/python.md").read_text("utf-8")
    assert page == interface.make_page(), "run: python scripts/docs/python.py"


def test_the_pages_of_the_providers_are_fresh() -> None:
    run = "run: python scripts/docs/providers.py"
    found = {page.stem: page.read_text("utf-8") for page in providers.FOLDER.glob("*.md")}
    assert found == dict(providers.make_pages()), run
    page = ROOT / "docs/reference/providers.md"
    assert page.read_text("utf-8") == providers.make_index(), run
    tested = [json.loads(file.read_text("utf-8")) for file in providers.TESTED.glob("*.json")]
    assert not [facts for facts in tested if facts["failed"]]


def test_no_shared_file_names_each_cloud() -> None:
    """Whoever adds a cloud need not touch them."""
    for file in (
        *(".importlinter", "README.md", "mkdocs.yml", "docs/README.md", "docs/why-cavvy.md"),
        *("docs/reference/providers.md", "src/cavvy/providers/installed.py"),
    ):
        text = (ROOT / file).read_text("utf-8")
        assert [
            each.name
            for each in manifests()
            if each.layer == REST_LAYER and re.search(rf"\b{each.name}\b", text, re.IGNORECASE)
        ] in ([], ["lambda"]), file


def test_the_site_lists_every_provider_and_its_guide() -> None:
    nav: list[Any] = [{"Run": [{"Clouds": []}]}, {"Reference": []}]
    site.add_providers(nav)
    text = str(nav)
    for name in providers.list_own():
        assert f"'reference/providers/{name}.md'" in text
    assert "'guides/verda.md'" in str(nav[0])
    assert re.search(
        r"^\| \[Verda\]\(verda\.md\) \| \*stand-in\* \|", site.list_providers(), re.MULTILINE
    )


def test_every_command_has_its_section() -> None:
    in_sections = [name for names in SECTIONS.values() for name in names]
    assert sorted(in_sections) == sorted(COMMANDS)


def walk(
    command: click.Command, path: tuple[str, ...]
) -> list[tuple[tuple[str, ...], click.Command]]:
    found = [(path, command)]
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            found += walk(inner, (*path, name))
    return found


def test_every_command_and_option_is_documented() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text("utf-8")
    for path, command in walk(cli, ("cavvy",)):
        assert command.help, f"{' '.join(path)} has no help"
        if path[1:2] and path[1] in MERGED and len(path) > 2:
            continue  # its section is that of the command to which it belongs now
        name = " ".join(path)
        if path[1:2] and path[1] in MERGED:
            assert f"\n| `{name}` | " in page  # in the table of former words
        else:
            assert len(path) == 1 or f"\n## {name}\n" in page
        for option in command.params:
            if isinstance(option, click.Option):
                assert option.help, f"{' '.join(path)} {option.opts[-1]} has no help"


def test_the_readme_does_not_boast() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    boast = re.search(r"more than ([\d,]+) real offers", text)
    assert boast is not None
    with CatalogSnapshot.open(SHIPPED) as snapshot:
        assert snapshot.info().rows > int(boast[1].replace(",", ""))


def test_code_blocks_have_one_command_on_each_line() -> None:
    """A formatter once joined the lines of blocks like those of paragraphs."""
    joined = re.compile(r"^\s*(?:cavvy|make) [^#|&;`$]*\s(?:cavvy|make) [a-z]")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for block in re.findall(r"^```.*?^```", page.read_text("utf-8"), re.M | re.S):
            for line in block.splitlines():
                assert not joined.match(line), f"{page}: {line}"
    first = re.search(r"```sh\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.S)
    assert first is not None
    assert [line.split()[:2] for line in first[1].splitlines()] == [
        ["make", "demo"],
        ["make", "test"],
        ["make", "setup"],
    ]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= 700


@pytest.mark.parametrize(
    ("better", "worse"),
    [("guides/serve.md", "adr/0001-one-package.md"), ("tutorials/own-hosts.md", "faq.md")],
)
def test_the_search_ranks_guides_before_decision_records(better: str, worse: str) -> None:
    boosts = []
    for uri in (better, worse):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=uri), meta={})
        site.on_page_markdown("", page, None, None)  # type: ignore[arg-type]  # only what it reads
        boosts.append(page.meta["search"]["boost"])
    assert boosts[0] > boosts[1]


def test_the_site_has_a_group_for_each_track_that_begins_with_its_tutorial() -> None:
    config = (ROOT / "mkdocs.yml").read_text("utf-8")
    groups = re.findall(r"^  - (\w[\w ]*):\n      - (\S+)$", config, re.MULTILINE)
    assert groups == [
        ("Run", "tutorials/first-job.md"),
        ("Serve", "tutorials/first-service.md"),
        ("Own hosts", "tutorials/own-hosts.md"),
        ("Team", "tutorials/a-team.md"),
        ("Money", "tutorials/money.md"),
        ("Reference", "reference/task-file.md"),
        ("About", "faq.md"),
    ]
    index = (ROOT / "docs/README.md").read_text("utf-8")
    assert re.findall(r"^## (.+)$", index, re.MULTILINE) == [name for name, _ in groups]


def test_pages_have_the_answers_that_readers_look_for() -> None:
    asked = yaml.safe_load((ROOT / "benchmarks/readers/questions.yaml").read_text("utf-8"))
    for each in (question for group in asked.values() for question in group):
        assert each["says"] in (ROOT / each["page"]).read_text("utf-8"), each["ask"]
