"""The console's page of sandboxes."""

import html
import re
from datetime import timedelta
from typing import Any

import pytest
from tests.console_rig import HOSTILE_TEXTS, NOW, CannedClient, listing, sign_in

from cavvy.capabilities.sandboxes import pages
from cavvy.capabilities.sandboxes.pages import share_costs
from cavvy.capabilities.sandboxes.wire import SandboxView
from cavvy.client import ApiClient, ApiError
from cavvy.client.wire import JobMatches


def view(name: str = "5a", **fields: Any) -> SandboxView:
    usual = {
        "id": f"sb-j1-{name}",
        "project": "default",
        "job": "j1",
        "title": "agent",
        "user": "ada",
        "state": "running",
        "why": "",
        "began_at": NOW - timedelta(minutes=1),
        "until_at": NOW + timedelta(minutes=5),
        "ended_at": None,
        "cpu": 1.0,
        "memory_mib": 2048,
        "network": False,
        "image": "",
    }
    return SandboxView(**usual | fields)


def canned(*found: SandboxView, spent: int = 0) -> CannedClient:
    job = listing("sandboxes", id="j1", spent_micros=spent)
    return CannedClient(
        {"/v1/sandboxes": list(found), "/v1/job-search": JobMatches(jobs=[job], total=1)}
    )


def text_of(page: str) -> str:
    return " ".join(html.unescape(re.sub("<[^>]+>", " ", page.partition("<main")[2])).split())


def test_what_a_host_costs_is_divided_by_cpus_and_time() -> None:
    half = view("01", ended_at=NOW - timedelta(seconds=30), state="ended")
    found = [half, view("02"), view("03", cpu=2.0), view("04", job="j2")]
    rows = share_costs(found, {"j1": 7_000_000}, NOW)
    assert [each.cost_micros for each in rows] == [1_000_000, 2_000_000, 4_000_000, None]


def test_a_row_has_who_for_how_long_and_at_which_cost() -> None:
    ended = view("0e", state="ended", why="memory", ended_at=NOW, title="", image="pip numpy")
    shown = text_of(
        sign_in(canned(view(network=["a.org"]), ended, spent=4_000_000)).get("/sandboxes").text
    )
    assert "1 runs; 1 ended within a day" in shown
    assert "agent sb-j1-5a running default ada 1m00s ago 5m00s 1 2,048 MiB a.org $2.00" in shown
    assert "sb-j1-0e ended memory" in shown
    assert "pip numpy" in shown


def test_sandboxes_are_found_and_chosen() -> None:
    client = canned(*(view(f"{number:02}", title=f"t{number}") for number in range(250)))
    assert "first 200" in text_of(sign_in(client).get("/sandboxes").text)
    page = sign_in(client).get("/sandboxes?text=t249").text
    assert re.findall(r'value="(default/[^"]+)"', page) == ["default/sb-j1-249"]
    assert "No sandbox matches" in sign_in(client).get("/sandboxes?state=ended").text
    assert "cavvy sandbox create" in sign_in(canned()).get("/sandboxes").text


def test_chosen_sandboxes_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[tuple[str, str]] = []

    def end(client: ApiClient, project: str, sandbox: str) -> None:
        if sandbox.endswith("0b"):
            raise ApiError("node-unreachable", f"{sandbox} is far", status=409)
        ended.append((project, sandbox))

    monkeypatch.setattr(pages, "end_sandbox", end)
    browser = sign_in(canned(view()))
    form = {"do": "end", "sandbox": ["default/sb-j1-5a", "default/sb-j1-0b"]}
    shown = browser.post("/sandboxes", data=form).text
    assert ended == [("default", "sb-j1-5a")]
    assert "sb-j1-0b is far" in shown
    assert "no sandbox was chosen" in browser.post("/sandboxes", data={"do": "end"}).text


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_no_text_of_a_host_becomes_a_part_of_the_page(text: str) -> None:
    hostile = view(title=text, user=text, why=text, image=text, network=[text])
    assert text not in sign_in(canned(hostile)).get("/sandboxes").text.partition("<main")[2]
