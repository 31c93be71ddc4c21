"""The console's list of jobs: its filter, its columns and its links."""

import html
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.console_rig import NOW, Browser, CannedClient, listing, replica, served, sign_in

from cavvy.client import ApiError, wire
from cavvy.client.account_wire import WhoAmIView
from cavvy.console.access import EachUser
from cavvy.console.render import read_placement


def pages(jobs: list[wire.JobListing]) -> Callable[[str], wire.JobPage]:
    """The server's answer about these jobs, in pages of the requested size."""

    def answer(target: str) -> wire.JobPage:
        asked = parse_qs(urlsplit(target).query)
        begin, size = int(asked.get("cursor", ["0"])[0]), int(asked["limit"][0])
        end = begin + size
        return wire.JobPage(jobs=jobs[begin:end], cursor=str(end) if end < len(jobs) else None)

    return answer


def answers(*jobs: wire.JobListing, **more: Any) -> dict[str, Any]:
    return {
        "/v1/jobs": pages(list(jobs)),
        "/v1/services": [],
        "/v1/projects": [],
    } | more


def names(page: str) -> list[str]:
    return re.findall(r'<a href="/jobs/default/[^"]+">([^<]+)</a>', page)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("user=ada", ["train", "eval"]),
        ("user=ad", []),
        ("text=TRA", ["train"]),
        ("text=team%3Dvis&user=ada", ["eval"]),
        ("text=vision&user=bob", ["tune"]),
        ("text=id-tune", ["tune"]),
        ("user=%20ada%20&text=", ["train", "eval"]),
    ],
)
def test_jobs_are_searched_by_user_name_and_tags(query: str, expected: list[str]) -> None:
    jobs = [
        listing("train"),
        listing("eval", tags={"team": "vision"}),
        listing("tune", user="bob", tags={"team": "Vision"}),
    ]
    text = sign_in(CannedClient(answers(*jobs))).get(f"/jobs?{query}").text
    assert names(text) == expected
    assert "The search read" not in text, "all jobs were read"


def test_a_search_stops_at_a_limit_and_says_so() -> None:
    jobs = [listing(f"j{number}") for number in range(4200)]
    jobs[2300] = listing("wanted")
    client = CannedClient(answers(*jobs))
    browser = sign_in(client)
    text = browser.get("/jobs?text=wanted").text
    assert names(text) == []
    assert "The search read 2000 jobs, the newest. Older jobs may match, too." in text
    assert len([each for each in client.asked if each.startswith("GET /v1/jobs")]) == 4
    older = re.findall(r'<a href="([^"]+)">Search older jobs</a>', text)
    text = browser.get(html.unescape(older[0])).text
    assert names(text) == ["wanted"]
    assert "The search read 2000 jobs. Older" in text


def test_a_search_ends_when_it_has_found_enough_jobs() -> None:
    client = CannedClient(answers(*(listing(f"j{number}") for number in range(1200))))
    text = sign_in(client).get("/jobs?user=ada").text
    assert len(names(text)) == 500
    assert len([each for each in client.asked if each.startswith("GET /v1/jobs")]) == 1


def test_a_row_shows_hardware_duration_phase_and_links() -> None:
    jobs = [
        listing(
            "gpu",
            placement="aws/us-east-1/us-east-1a/p5.48xlarge:8/spot",
            machine="box",
            tags={"team": "vision"},
        ),
        listing("over", phase="done", ended_at=NOW - timedelta(minutes=5)),
        listing("later", phase="queued", held=True, placement=None),
    ]
    text = sign_in(CannedClient(answers(*jobs))).get("/jobs").text
    rows = [
        " ".join(re.sub(r"<[^>]+>", " ", f"<{each}").split()) for each in text.split("<tr ")[1:]
    ]
    assert (
        "gpu machine box team=vision running 9m00s the work runs default ada p5.48xlarge, 8 GPUs"
        in rows[0]
    )
    assert "aws us-east-1a, spot" in rows[0]
    assert "10m00s" in rows[0]
    assert "5m00s $0.30" in rows[1], "from the submission to the end"
    assert "queued 9m00s held" in rows[2]


def test_a_replica_is_linked_to_its_service_which_is_asked_for_once_a_minute() -> None:
    found = [served("chat", replica(job="id-chat-1"))]
    client = CannedClient(answers(listing("chat-1"), listing("train"), **{"/v1/services": found}))
    browser = sign_in(client)
    for _ in range(3):
        text = browser.get("/jobs").text
        assert text.count('<a href="/services/default/chat">chat</a>') == 1
    assert client.asked.count("GET /v1/services") == 1
    assert client.asked.count("GET /v1/projects") == 1


def test_users_do_not_share_what_the_console_keeps() -> None:
    who = {"/v1/whoami": WhoAmIView(account="ada", roles=[])}
    found = [served("a", replica(job="id-a-1"))]
    clients = {
        "first": CannedClient(answers(listing("a-1"), **who | {"/v1/services": found})),
        "second": CannedClient(answers(listing("a-1"), **who | {"/v1/services": []})),
    }
    access = EachUser(clients.__getitem__)
    pages = []
    for token in clients:
        browser = Browser(access)
        browser.post("/sign-in", data={"token": token}, follow_redirects=False)
        pages.append(browser.get("/jobs").text)
    assert ["/services/default/a" in page for page in pages] == [True, False]


def test_a_refused_part_leaves_the_list() -> None:
    refusal = ApiError("role-needed", "no role", "", 403)
    canned = answers(listing("train-2"), **{"/v1/services": refusal, "/v1/projects": refusal})
    assert names(sign_in(CannedClient(canned)).get("/jobs").text) == ["train-2"]


@pytest.mark.parametrize(
    ("key", "machine", "gpus", "where", "purchase"),
    [
        ("local/here/cpu:0/on-demand", "cpu", "", "local here", "on-demand"),
        ("gcp@ml/eu/z-b/a3:1/spot", "a3", "1 GPU", "gcp@ml eu z-b", "spot"),
        ("aws/us/us-a/p5:8/reserved-12m", "p5", "8 GPUs", "aws us-a", "reserved-12m"),
        ("anything else", "anything else", "", "", ""),
        ("a/b/c/d", "a/b/c/d", "", "", ""),
        ("a/b/x:\u0661/spot", "a/b/x:\u0661/spot", "", "", ""),
    ],
)
def test_the_parts_of_a_placement(
    key: str, machine: str, gpus: str, where: str, purchase: str
) -> None:
    parts = read_placement(key)
    assert (parts.machine, parts.gpus, parts.where, parts.purchase) == (
        machine,
        gpus,
        where,
        purchase,
    )
