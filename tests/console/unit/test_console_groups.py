"""The console's page of an array or a group, the graph of what waits for what, and lists of which
several rows are chosen.
"""

import re
from typing import Any

import pytest
from msgspec import Raw
from msgspec.json import encode
from tests.console_rig import (
    HOSTILE_TEXTS,
    NOW,
    CannedClient,
    detail,
    job_answers,
    listing,
    sign_in,
)

from cavvy.client import ApiError
from cavvy.client.array_wire import ArrayDetail, ArrayMemberView
from cavvy.client.wire import JobPage
from cavvy.console.pages.group import GraphJob, place

AT = "/v1/projects/default/arrays/id-fits"


def member(index: int, **fields: Any) -> ArrayMemberView:
    usual = {
        "index": index,
        "id": f"id-{index}",
        "name": f"fits.{index}",
        "phase": "done",
        "reason": "the work succeeded",
        "attempt": 1,
        "exit_code": 0,
        "placement": None,
        "since": NOW,
        "ended_at": NOW,
        "spent_micros": index,
        "params": {"lr": 0.1 * index},
        "progress": {"loss": 1.0 / index if index else "nan"},
    }
    return ArrayMemberView(**usual | fields)


def array(*members: ArrayMemberView, **fields: Any) -> dict[str, Any]:
    counts: dict[str, int] = {}
    for each in members:
        counts[each.phase] = counts.get(each.phase, 0) + 1
    row = listing("fits", id="id-fits", phase="running", members=counts)
    usual = {"array": row, "parallel": 2, "jobs": list(members)}
    found = ArrayDetail(**usual | fields)
    own = {AT: found, **{f"{AT}/{each}": row for each in ("stop", "retry")}}
    own["/v1/projects/default/curves"] = {"curves": []}  # of a capability, which may be left out
    return own | {
        target: answer
        for each in members
        for target, answer in job_answers(waiting(each.name, id=each.id)).items()
    }


def waiting(name: str, *after: str, **fields: Any) -> Any:
    task = {"run": "true", "after": [{"job": each, "id": f"id-{each}"} for each in after]}
    return detail(name, **{"task": Raw(encode(task)), **fields})


def shown(page: str) -> list[str]:
    return re.findall(r'<tr data-key="id-(\d+)"', page)


def test_the_jobs_of_an_array_are_sorted_filtered_and_shown_in_pages() -> None:
    members = [member(n, phase="failed" if n == 2 else "done") for n in range(250)]
    client = CannedClient(array(*members, best="loss:min"))
    browser = sign_in(client)
    page = browser.get("/groups/default/id-fits").text
    assert shown(page)[:3] == ["249", "248", "247"], "the best first"
    assert len(shown(page)) == 100
    assert "1 to 100 of 250" in page
    assert "At most 2 run at once" in page
    assert 'aria-sort="ascending"><a' in page
    assert shown(browser.get("/groups/default/id-fits?page=3").text)[-1] == "0", "without a number"
    assert shown(browser.get("/groups/default/id-fits?sort=lr&way=up").text)[:2] == ["0", "1"]
    assert shown(browser.get("/groups/default/id-fits?sort=Cost&way=down").text)[0] == "249"
    assert shown(browser.get("/groups/default/id-fits?phase=failed").text) == ["2"]
    for wrong in ("sort=no", "sort=lr&way=x", "page=x"):
        assert browser.get(f"/groups/default/id-fits?{wrong}").status_code == 400
    assert len(shown(browser.get("/groups/default/id-fits?page=99").text)) == 50


def test_arrays_and_groups_are_listed_and_several_are_stopped() -> None:
    row = listing("fits", id="id-fits", phase="running", members={"running": 2, "failed": 1})
    odd = listing(HOSTILE_TEXTS[0], id="id-odd", phase="done", members={"done": 1})
    first, last = JobPage(jobs=[row, odd], cursor="id-odd"), JobPage(jobs=[], cursor=None)
    stopped = {f"{AT}/stop": row}
    gone = {"/v1/projects/default/arrays/id-odd/stop": ApiError("job-not-found", "gone", "", 404)}

    def read(target: str) -> JobPage:
        return last if "cursor=id-odd" in target else first

    client = CannedClient({"/v1/arrays": read, "/v1/projects": [], **stopped, **gone})
    browser = sign_in(client)
    page = browser.get("/groups?project=default").text
    assert re.findall(r'href="(/groups/[^"]*)"', page) == [
        "/groups/default/id-fits",
        "/groups/default/id-fits?phase=running",
        "/groups/default/id-fits?phase=failed",
        "/groups/default/id-odd",
        "/groups/default/id-odd?phase=done",
    ]
    assert HOSTILE_TEXTS[0] not in page
    assert 'href="/groups?project=default&amp;before=id-odd" rel="next"' in page
    assert (
        "No arrays and no groups here" in browser.get("/groups?project=default&before=id-odd").text
    )
    both = {"do": "stop", "group": ["default/id-fits", "default/id-odd"]}
    assert "gone." in browser.post("/groups?project=default", data=both).text
    assert f"POST {AT}/stop" in client.asked
    assert "no group was chosen" in browser.post("/groups", data={"do": "stop"}).text
    assert browser.post("/groups", data={"do": "burn", "group": "a/b"}).status_code == 400


def test_an_array_is_stopped_queued_again_and_removed_as_one() -> None:
    client = CannedClient(array(member(1, phase="failed"), member(2, phase="running")))
    browser = sign_in(client)
    page = browser.get("/groups/default/id-fits").text
    assert re.findall(r'action="/groups/default/id-fits/(\w+)"', page) == ["stop", "retry"]
    for act in ("stop", "retry"):
        answer = browser.post(f"/groups/default/id-fits/{act}", follow_redirects=False)
        assert answer.headers["location"] == "/groups/default/id-fits"
        assert f"POST {AT}/{act}" in client.asked
    other = {"origin": "http://evil.example"}
    assert browser.post("/groups/default/id-fits/stop", headers=other).status_code == 403
    client.answers[f"DELETE {AT}"] = ApiError("job-not-ended", "fits.2 has not ended", "", 409)
    assert browser.post("/groups/default/id-fits/remove").status_code == 409
    ended = sign_in(CannedClient(array(member(1)))).get("/groups/default/id-fits").text
    assert re.findall(r'action="/groups/default/id-fits/(\w+)"', ended) == ["remove"]
    gone = ApiError("job-not-found", "no array", "", 404)
    assert sign_in(CannedClient({AT: gone})).get("/groups/default/id-fits").status_code == 404


def test_a_job_shows_what_it_waits_for_and_what_it_is_part_of() -> None:
    missing = ApiError("job-not-found", "no such job", "", 404)
    rows = job_answers(waiting("rows", phase="done"))
    answers = rows | job_answers(waiting("report", "rows", "fits", "gone", array_id="id-fits"))
    answers |= {f"/v1/projects/default/jobs/id-{each}": missing for each in ("fits", "gone")}
    answers |= array(member(1)) | {"/v1/projects/default/arrays/id-gone": missing}
    client = CannedClient(answers)
    page = sign_in(client).get("/jobs/default/report").text
    assert "report waits for rows (success), fits (success), id-gone (success)" in page
    assert page.count('marker-end="url(#arrow)"') == 3
    assert '<a href="/jobs/default/id-rows"><rect' in page
    assert '<a href="/groups/default/id-fits"><rect' in page
    assert "id-gone: removed" in page
    assert "waits for" not in sign_in(CannedClient(rows)).get("/jobs/default/rows").text


def test_a_group_shows_its_jobs_and_what_they_wait_for() -> None:
    group = array(member(0, name="trainer"), member(1, name="reward"), group=True)
    group |= job_answers(waiting("trainer", "rows", id="id-0")) | job_answers(waiting("rows"))
    page = sign_in(CannedClient(group)).get("/groups/default/id-fits").text
    assert "A group of 2 jobs" in page
    assert "trainer waits for rows (success)" in page


def test_a_graph_has_a_column_for_each_step_and_bears_circles() -> None:
    def job(name: str, *after: str) -> GraphJob:
        return GraphJob(name, name, "done", after=[(each, "any") for each in after])

    def columns(*jobs: GraphJob) -> dict[str, int]:
        graph = place({each.id: each for each in jobs})
        assert graph is not None
        assert len({(each.x, each.y) for each in graph.boxes}) == len(jobs), "none hides another"
        assert all(0 < each.x < graph.width and 0 < each.y < graph.height for each in graph.boxes)
        return {each.job.id: each.x // 236 for each in graph.boxes}

    found = columns(job("d", "b", "c"), job("c", "b"), job("b", "a"), job("a"), job("e"))
    assert found == {"a": 0, "b": 1, "c": 2, "d": 3, "e": 0}
    columns(job("a", "b"), job("b", "a"))
    assert place({"a": job("a", "unknown")}) is None


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_texts_of_arrays_are_shown_as_they_are(text: str) -> None:
    one = member(1, name=text, reason=text, params={text: text}, progress={text: text}, phase="x")
    answers = array(one) | job_answers(waiting(text, "rows", id="id-1"))
    answers |= job_answers(waiting(text, id="id-rows"))
    answer = sign_in(CannedClient(answers)).get("/groups/default/id-fits")
    assert answer.status_code == 200
    assert text not in answer.text


def test_other_sites_act_on_no_rows() -> None:
    browser, other = sign_in(CannedClient({})), {"origin": "http://evil.example"}
    assert browser.post("/machines", data={"do": "stop"}, headers=other).status_code == 403
