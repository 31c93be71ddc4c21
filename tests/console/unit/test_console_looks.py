"""What makes the console's pages readable for everyone: contrast, tables, labels, and no layout that
depends on a script.
"""

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise, product
from pathlib import Path

import pytest
from tests import console_rig
from tests.console.unit.test_console_capacity import market, quota, report
from tests.console.unit.test_console_pages import everything, jobs_by_phase
from tests.console.unit.test_console_team import answers as team_answers

import cavvy
from cavvy.client import wire
from cavvy.console.charts import timeline
from cavvy.console.render import show_code, show_latency

CSS = (files("cavvy.console") / "static/console.css").read_text()
ROOM = Path(cavvy.__file__).parent
TEMPLATES = {  # with those of capabilities
    each.name: each.read_text()
    for folder in ("console/templates", "capabilities")
    for each in sorted(ROOM.joinpath(folder).rglob("*.html"))
}
TEXT_COLORS = ("text", "faint", "link", "good", "busy", "warn", "bad", "calm")
SURFACES = ("page", "surface")
SERIES = tuple(f"s{number}" for number in range(7))


def colors(scheme: str) -> dict[str, str]:
    blocks = re.findall(r":root \{(.*?)\}", CSS, re.DOTALL)
    return dict(re.findall(r"--([a-z0-9]+): #([0-9a-f]{6});", blocks[scheme == "dark"]))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colors (WCAG 2.2)."""

    def luminance(color: str) -> float:
        parts = [int(color[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]  # fmt: skip
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_and_bars_stand_out(scheme: str) -> None:
    named = colors(scheme)
    for text, surface in product(TEXT_COLORS, SURFACES):
        assert contrast(named[text], named[surface]) >= 4.5, (text, surface)
    for bar in SERIES:  # parts of charts need 3
        assert contrast(named[bar], named["surface"]) >= 3, bar
    used = set(re.findall(r"var\(--([a-z0-9]+)\)", CSS))
    assert used == named.keys()


def tags_of(template: str, name: str) -> list[str]:
    return re.findall(rf"<{name}\b[^>]*>", TEMPLATES[template])


@pytest.mark.parametrize("template", TEMPLATES)
def test_tables_name_their_rows_and_columns(template: str) -> None:
    heads = tags_of(template, "th")
    assert all("scope=" in each for each in heads)
    assert len(re.findall("<tbody>", TEMPLATES[template])) == len(tags_of(template, "thead"))


def test_cells_of_cards_say_the_names_that_their_columns_had() -> None:
    """In narrow windows, these tables have no head."""
    plain = {"Name", "Job", "Phase", "State", "Reason", "URL or problem", "Time", "Event", "Text"}
    plain |= {"Action", "Actions", "Note", "Problem", "Promote", "What"}
    count = 0
    for text in TEMPLATES.values():
        call = r"{% call table\((\[[^]]*\]), cards=true[^)]*\) %}(.*?){% endcall %}"
        tables = [(json.loads(names), body) for names, body in re.findall(call, text, re.DOTALL)]
        for table in re.findall(r'<table class="cards">.*?</table>', text, re.DOTALL):
            head, body = table.split("</thead>")
            head = re.sub(r'{{ job_head\("\w+", "(\w+)"[^}]*\) }}', r"<th>\1</th>", head)
            head = head.rpartition("{% endif %}")[2]
            tables.append((re.findall(r"<th[^>]*>(.*?)</th>", head), body))
        for names, body in tables:
            columns = {re.sub("<[^>]*>", "", name).removeprefix("#") for name in names}
            named = set(re.findall(r'data-name="([^"]+)"', body))
            assert columns - plain <= named <= columns
            count += 1
    assert count >= 6


@pytest.mark.parametrize("template", TEMPLATES)
def test_whatever_scrolls_can_be_reached_by_keyboard(template: str) -> None:
    for each in (*tags_of(template, "div"), *tags_of(template, "pre")):
        if 'class="scroll"' in each or 'class="log"' in each:
            for attribute in ('tabindex="0"', "role=", "aria-label="):
                assert attribute in each


class Outline(HTMLParser):
    """Collects the headings, ids, controls and references of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[int] = []
        self.ids: list[str] = []
        self.named: list[str] = []  # the ids that name something
        self.bare: list[str] = []  # controls without a name
        self._labels = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if values.get("id"):
            self.ids.append(str(values["id"]))
        if values.get("aria-labelledby"):
            self.named.append(str(values["aria-labelledby"]))
        if tag == "label":
            self._labels += 1
        has_name = self._labels or values.get("aria-label")
        is_hidden = values.get("type") == "hidden"
        if tag in ("select", "input", "meter") and not has_name and not is_hidden:
            self.bare.append(str(self.get_starttag_text()))

    def handle_endtag(self, tag: str) -> None:
        if tag == "label":
            self._labels -= 1


LISTS = (
    "/",
    "/jobs",
    "/services",
    "/machines",
    "/devices",
    "/costs",
    "/jobs/default/train",
    "/nope",
)


def pages() -> Iterator[tuple[str, str]]:
    """Each page but that of a service."""
    stretch = wire.StretchView(spell="running", since=console_rig.NOW, until=console_rig.NOW + timedelta(hours=1), attempt=1)  # fmt: skip
    ranks = [console_rig.node(rank, telemetry={"gpu_percent": 5.0}) for rank in range(3)]
    job = console_rig.job_answers(
        console_rig.detail(attempts=[console_rig.attempt(nodes=ranks)]),
        b"x\n",
        cost=console_rig.cost(timeline=[stretch]),
    )
    capacity = {"/v1/markets": [market()], "/v1/quotas": report(quota())}
    # the projects of the team are others than that of the jobs
    for answers, paths in (
        (everything() | job, LISTS),
        (capacity, ("/capacity", "/capacity?quotas=all")),
        (team_answers(), ("/team",)),
    ):
        browser = console_rig.sign_in(console_rig.CannedClient(answers))
        for path in paths:
            yield path, browser.get(path).text


def test_pages_have_one_title_ordered_headings_and_named_controls() -> None:
    for path, text in pages():
        outline = Outline(text)
        assert outline.headings[0] == 1, path
        assert outline.headings.count(1) == 1, path
        assert all(b <= a + 1 for a, b in pairwise(outline.headings)), path
        assert len(outline.ids) == len(set(outline.ids)), path
        assert set(outline.named) <= set(outline.ids), path
        assert outline.bare == [], path
        assert '<html lang="en">' in text


def test_parts_that_change_keep_their_names_and_their_rows_have_keys() -> None:
    for path, text in pages():
        for part in re.findall(r"<[^>]* data-live[^>]*>", text):
            assert "id=" in part, (path, part)
    for name in ("jobs_table", ">Nodes{% if attempt %}"):
        assert any(name in each and "<tr data-key=" in each for each in TEMPLATES.values())


def test_a_job_that_waits_has_the_parts_that_fill_later() -> None:
    """The script can only update parts that the page had when it was opened."""
    waiting = console_rig.job_answers(
        console_rig.detail(phase="queued", attempt=0, attempts=[]), b""
    )
    running = console_rig.job_answers(
        console_rig.detail(
            attempts=[console_rig.attempt(nodes=[console_rig.node(0), console_rig.node(1)])]
        ),
        b"x\n",
    )
    ids = []
    for answers in (waiting, running):
        text = (
            console_rig.sign_in(console_rig.CannedClient(answers)).get("/jobs/default/train").text
        )
        ids.append(re.findall(r'id="([\w-]+)" data-live', text))
    assert ids[0] == ids[1]
    assert {"head", "timeline", "rank-choice", "nodes", "cost"} <= set(ids[0])


def test_the_title_says_the_phase_and_a_failure_its_reason() -> None:
    answers = console_rig.job_answers(console_rig.detail(phase="failed", reason="it crashed"), b"")
    text = console_rig.sign_in(console_rig.CannedClient(answers)).get("/jobs/default/train").text
    assert "<title>train (failed) · Cavvy</title>" in text
    assert '<p class="notice bad">it crashed</p>' in text


def test_many_failures_do_not_push_the_rest_away() -> None:
    failed = [
        console_rig.listing(f"bad-{n}", id=f"id-{n}", phase="failed", since=console_rig.NOW)
        for n in range(8)
    ]
    answers = everything(**{"/v1/jobs": jobs_by_phase(*failed)})
    text = console_rig.sign_in(console_rig.CannedClient(answers)).get("/").text
    shown, folded = text.split('<details id="more-failed">')
    assert shown.count('class="notice bad"') == 3
    assert "5 more jobs failed in the last 24 hours" in folded
    assert shown.index('class="figures"') < shown.index('class="notice bad"')


def test_a_timeline_can_be_read_without_seeing_it() -> None:
    def stretch(begin_s: float, end_s: float, number: int, spell: str) -> wire.StretchView:
        since, until = (
            console_rig.NOW + timedelta(seconds=begin_s),
            console_rig.NOW + timedelta(seconds=end_s),
        )
        return wire.StretchView(spell=spell, since=since, until=until, attempt=number)

    chart = timeline([stretch(0, 20, 0, "queued"), stretch(20, 90, 1, "running")])
    assert chart is not None
    assert chart.columns == ("Attempt", "Period", "Begins after", "Lasts")
    assert chart.lines == [("–", "queued", "0s", "20s"), ("1", "running", "20s", "1m10s")]


def test_the_spending_can_be_read_without_seeing_it() -> None:
    text = console_rig.sign_in(console_rig.CannedClient(everything())).get("/").text
    table = text.split('id="spent"')[1].split("Show as a table")[1].split("</table>")[0]
    assert '<th scope="row">04 Mar</th><td class="number">$1.50</td>' in table
    assert table.count("<tr>") == 15


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, "–"), (0.0123, "12 ms"), (0.9996, "1 s"), (1.256, "1.26 s"), (75, "1m15s")],
)
def test_short_times_are_shown_exactly(seconds: float | None, shown: str) -> None:
    assert show_latency(seconds) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("run `cavvy <up>` now", "run <code>cavvy &lt;up&gt;</code> now"),
        ("`a` or `b`", "<code>a</code> or <code>b</code>"),
        ("one ` alone <b>", "one ` alone &lt;b&gt;"),
        ("", ""),
    ],
)
def test_what_stands_between_backticks_is_code(text: str, shown: str) -> None:
    assert show_code(text) == shown
