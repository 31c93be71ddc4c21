"""The console's list of jobs: its filters, its columns, its links, and actions on several jobs."""

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


def pages(jobs: list[wire.JobListing]) -> Callable[[str], wire.JobMatches]:
    """The server's answer about these jobs, in pages of the requested size."""

    def answer(target: str) -> wire.JobMatches:
        asked = parse_qs(urlsplit(target).query)
        begin, size = int(asked["offset"][0]), int(asked["limit"][0])
        return wire.JobMatches(jobs=jobs[begin : begin + size], total=len(jobs))

    return answer


def answers(*jobs: wire.JobListing, **more: Any) -> dict[str, Any]:
    return {
        "/v1/job-search": pages(list(jobs)),
        "/v1/services": [],
        "/v1/projects": [],
    } | more


def names(page: str) -> list[str]:
    return re.findall(r'<a href="/jobs/default/[^"]+">([^<]+)</a>', page)


def searched(client: CannedClient) -> dict[str, list[str]]:
    """The parameters of the last search."""
    asked = [each for each in client.asked if "/job-search" in each]
    return parse_qs(urlsplit(asked[-1].partition(" ")[2]).query)


def test_the_server_gets_the_filters_and_the_order() -> None:
    client = CannedClient(answers(*(listing(f"j{number}") for number in range(60))))
    query = (
        "user=%20ada%20&text=TRA&gpu=H100&provider=aws&tag=team%3Dvis&project=p&phase=unfinished"
    )
    query += "&since=2026-02-01&until=2026-02-28&sort=cost&way=up&page=2"
    text = sign_in(client).get(f"/jobs?{query}").text
    found = searched(client)
    assert found.pop("phase") == ["queued", "starting", "running", "stopping"]
    assert {name: values[0] for name, values in found.items()} == {
        "user": "ada",
        "text": "TRA",
        "gpu": "H100",
        "provider": "aws",
        "tag": "team=vis",
        "project": "p",
        "since": "2026-02-01T00:00:00+00:00",
        "until": "2026-03-01T00:00:00+00:00",
        "sort": "cost",
        "ascending": "true",
        "offset": "50",
        "limit": "50",
    }
    assert 'value="H100"' in text
    assert 'aria-sort="ascending"' in text


def test_ten_thousand_jobs_are_listed_in_pages() -> None:
    client = CannedClient(answers(*(listing(f"j{number}") for number in range(10_000))))
    browser = sign_in(client)
    answer = browser.get("/jobs?text=j")
    assert len(names(answer.text)) == 50
    assert len(answer.content) < 250_000
    assert "1 to 50 of 10,000" in answer.text
    following = html.unescape(re.findall(r'<a href="([^"]+)" rel="next"', answer.text)[0])
    text = browser.get(following).text
    assert names(text)[0] == "j50"
    assert 'rel="prev"' in text
    assert 'rel="next"' not in browser.get("/jobs?page=200").text


@pytest.mark.parametrize("query", ["sort=no", "way=x", "page=0", "page=x", "page=1000000000000", "since=x", "until=2026-13-01", "until=9999-12-31"])  # fmt: skip
def test_a_wrong_query_is_explained(query: str) -> None:
    assert sign_in(CannedClient(answers())).get(f"/jobs?{query}").status_code == 400


def test_a_column_turns_when_it_is_chosen_again() -> None:
    text = sign_in(CannedClient(answers(listing()))).get("/jobs?text=a").text
    heads = dict(re.findall(r'<th scope="col"[^>]*><a href="([^"]+)">(\w+)</a>', text))
    ways = {name: parse_qs(urlsplit(html.unescape(at)).query) for at, name in heads.items()}
    assert ways["Submitted"]["way"] == ["up"]
    assert ways["Name"]["way"] == ["up"]
    assert ways["Cost"] == {"text": ["a"], "sort": ["cost"], "way": ["down"]}


def test_chosen_jobs_are_stopped_and_what_fails_is_told() -> None:
    at = "/v1/projects/default/jobs"
    client = CannedClient(answers(listing("a"), listing("b")))
    client.answers |= {
        f"POST {at}/id-a/stop": listing("a", phase="stopping"),
        f"POST {at}/id-b/stop": ApiError("role-needed", "no role in project default", "", 403),
    }
    browser = sign_in(client)
    chosen = {"do": "stop", "job": ["default/id-a"]}
    answer = browser.post("/jobs?text=a", data=chosen, follow_redirects=False)
    assert answer.headers["location"] == "/jobs?text=a"
    chosen["job"] = ["default/id-a", "default/id-b"]
    text = browser.post("/jobs", data=chosen).text
    assert "no role in project default" in text
    assert sum("/id-a/stop" in each for each in client.asked) == 2
    assert "no job was chosen" in browser.post("/jobs", data={"do": "stop"}).text
    assert browser.post("/jobs", data={"do": "explode", "job": "a/b"}).status_code == 400


def test_an_array_is_one_row_and_its_jobs_are_stopped_together() -> None:
    array = listing("sweep", id="id-s", members={"running": 2, "done": 1})
    at = "/v1/projects/default"
    stopped = {f"POST {at}/arrays/id-s/stop": array, f"POST {at}/jobs/id-a/stop": listing("a")}
    client = CannedClient(answers(array, listing("a"), **stopped))
    browser = sign_in(client)
    text = browser.get("/jobs").text
    assert searched(client)["arrays"] == ["true"]
    assert '<a href="/groups/default/id-s">sweep</a>' in text
    assert 'name="array" value="default/id-s"' in text
    for query in ("text=sweep", "sort=cost"):
        browser.get(f"/jobs?{query}")
        assert "arrays" not in searched(client), "each of its jobs is found"
    data = {"do": "stop", "array": ["default/id-s"], "job": ["default/id-a"]}
    answer = browser.post("/jobs", data=data, follow_redirects=False)
    assert answer.headers["location"] == "/jobs?"
    assert all(any(each.startswith(path) for each in client.asked) for path in stopped)
    data["do"] = "compare"
    assert "the page of an array compares its jobs" in browser.post("/jobs", data=data).text


def test_two_jobs_are_compared() -> None:
    browser = sign_in(CannedClient(answers(listing("a"))))
    data = {"do": "compare", "job": ["default/a", "default/b"]}
    answer = browser.post("/jobs", data=data, follow_redirects=False)
    assert answer.headers["location"] == "/compare?a=default%2Fa&b=default%2Fb"
    assert "at least two" in browser.post("/jobs", data={"do": "compare"}).text
    one = browser.post("/jobs", data={"do": "compare", "job": ["default/id-a"]}).text
    assert 'value="default/id-a" aria-label="Choose a" checked' in one, "marks stay"


def test_several_jobs_are_compared_by_the_page_of_runs() -> None:
    browser = sign_in(CannedClient(answers(listing("a"))))
    data = {"do": "compare", "job": ["default/a", "default/b", "default/c"]}
    answer = browser.post("/jobs", data=data, follow_redirects=False)
    assert answer.headers["location"] == "/runs?project=default&job=a&job=b&job=c"
    data["job"] = ["default/a", "other/b", "default/c"]
    assert "within one project" in browser.post("/jobs", data=data).text


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
    found = [served("chat", replica(job="id-chat.1"))]
    client = CannedClient(answers(listing("chat.1"), listing("train"), **{"/v1/services": found}))
    browser = sign_in(client)
    for _ in range(3):
        text = browser.get("/jobs").text
        assert text.count('<a href="/services/default/chat">chat</a>') == 1
    assert client.asked.count("GET /v1/services") == 1
    assert client.asked.count("GET /v1/projects") == 1


def test_a_service_is_one_row_and_is_stopped_as_one() -> None:
    counts = {"running": 2, "done": 1}
    rows = [
        listing("chat", id="j3", service="chat", members=counts, reason="2 running, 1 done"),
        listing("old", id="j9", service="old", members={"done": 4}, phase="done"),
    ]
    found = [served("chat", replica(job="j3"))]
    ends = {"DELETE /v1/projects/default/services/chat": found[0]}
    client = CannedClient(answers(*rows, **{"/v1/services": found}, **ends))
    browser = sign_in(client)
    page = browser.get("/jobs").text
    assert '<a href="/services/default/chat">chat</a>' in page
    assert "tag=service=old" in page, "a service that has ended has no page"
    assert "/services/default/old" not in page
    assert 'name="service" value="default/chat"' in page
    posted = browser.post("/jobs", data={"service": "default/chat", "do": "stop"})
    assert posted.status_code == 200
    assert "DELETE /v1/projects/default/services/chat" in client.asked
    for action, said in (("remove", "only be stopped here"), ("compare", "cannot be compared")):
        asked = len(client.asked)
        refused = browser.post("/jobs", data={"service": "default/chat", "do": action}).text
        assert said in refused
        assert not [each for each in client.asked[asked:] if not each.startswith("GET")]


def test_users_do_not_share_what_the_console_keeps() -> None:
    who = {"/v1/whoami": WhoAmIView(account="ada", roles=[])}
    found = [served("a", replica(job="id-a.1"))]
    clients = {
        "first": CannedClient(answers(listing("a.1"), **who | {"/v1/services": found})),
        "second": CannedClient(answers(listing("a.1"), **who | {"/v1/services": []})),
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
