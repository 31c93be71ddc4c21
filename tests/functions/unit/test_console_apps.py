"""The console's pages about apps and their calls."""

import html
import re
from datetime import timedelta
from typing import Any

import pytest
from msgspec import Raw, structs
from msgspec.json import encode
from tests.console_rig import HOSTILE_TEXTS, NOW, CannedClient, listing, log_answer, sign_in

from cavvy.capabilities.functions import wire
from cavvy.capabilities.functions.counts.wire import (
    AppFigures,
    AppSummary,
    FunctionFigures,
    RecentCall,
)
from cavvy.client import ApiError
from cavvy.client.ledger_wire import LedgerSumView
from cavvy.client.service_wire import NamedService
from cavvy.client.wire import JobMatches

PATH = "/v1/projects/default/apps/embed"


def summary(**fields: Any) -> AppSummary:
    usual = {
        "project": "default",
        "name": "embed",
        "revision": "r1",
        "user": "ada",
        "deployed_at": NOW,
        "functions": ["encode"],
        "jobs": ["j1"],
        "workers": 2,
        "waiting": 1200,
        "running": 2,
        "done": 34,
        "failed": 5,
    }
    return AppSummary(**usual | fields)


def deployed(name: str = "encode") -> wire.DeployedApp:
    arguments = {"properties": {"texts": {"type": "array"}}, "required": ["texts"]}
    function = wire.DeployedFunction(
        name=name, arguments=Raw(encode(arguments)), result=Raw(b'{"type": "array"}')
    )
    part = wire.AppPart(
        part=0,
        revision="r1",
        text="",
        origin=Raw(b"{}"),
        snapshot="",
        meet="",
        functions=[function],
        consent=False,
        job="j1",
        user="ada",
        updated_at=NOW,
    )
    return wire.DeployedApp(name="embed", parts=[part])


def figures(**fields: Any) -> AppFigures:
    usual = {
        "name": "encode",
        "waiting": 1,
        "running": 2,
        "done": 3,
        "failed": 4,
        "ran": (0.0004, 1.5),
        "ran_p50": [None, 0.01],
        "ran_p99": [None, 0.02],
        "took_p50": [None, 0.03],
        "took_p99": [None, 2.0],
    }
    return AppFigures(
        begin=NOW - timedelta(minutes=2),
        step_s=60.0,
        workers=2,
        jobs=["j1"],
        functions=[FunctionFigures(**usual | fields)],
        recent=[recent()],
    )


def recent(**fields: Any) -> RecentCall:
    usual = {
        "function": "encode",
        "job": "j1",
        "state": "failed",
        "ended_at": NOW,
        "ran_s": 0.1,
        "took_s": 0.3,
        "type": "ValueError",
        "text": "too\nlong",
        "trace": "",
    }
    return RecentCall(**usual | fields)


def kept(state: str = "failed", **fields: Any) -> wire.CallSummary:
    end = wire.CallEnd(kind="error", type="KeyError", text="no key", trace="at 7", ran_s=2.0)
    usual = {
        "id": "c1",
        "function": "encode",
        "state": state,
        "user": "mia",
        "end": end if state == "failed" else wire.CallEnd(),
        "created_at": NOW - timedelta(seconds=9),
        "ended_at": NOW if state == "failed" else None,
    }
    return wire.CallSummary(**usual | fields)


def canned(**answers: Any) -> CannedClient:
    usual: dict[str, Any] = {
        "/v1/apps": [summary()],
        "/v1/services": [],
        "/v1/job-search": JobMatches(jobs=[], total=0),
        "/v1/ledger/sums": [],
        PATH: deployed(),
        f"{PATH}/figures": figures(),
        f"{PATH}/calls": [kept()],
    }
    return CannedClient(usual | answers)


def text_of(page: str) -> str:
    return " ".join(html.unescape(re.sub("<[^>]+>", " ", page.partition("<main")[2])).split())


def test_a_row_has_what_an_app_does_costs_and_answers() -> None:
    service = NamedService(
        project="default",
        name="embed-web",
        state="ready",
        url="https://embed.example.com",
        models=[],
        revision=1,
        ready=1,
        target=1,
        why="",
        problem="",
        replicas=[],
        tags={"cavvy-app": "embed"},
    )
    tags = {"cavvy-schedule": "embed", "cavvy-function": "nightly"}
    job = listing("embed-nightly", phase="queued", held=True, reason="next run at 03:00", tags=tags)
    groups = {"project": "default", "tag:cavvy-app": "embed"}
    cost = LedgerSumView(groups=groups, amount_micros=1_230_000, discount_micros=0, jobs=1)
    client = canned(
        **{
            "/v1/services": [service],
            "/v1/job-search": JobMatches(jobs=[job], total=1),
            "/v1/ledger/sums": [cost],
        }
    )
    shown = text_of(sign_in(client).get("/apps").text)
    for each in ("embed encode default 2 1,200 2 34 5 $1.23", "https://embed.example.com",
                 "nightly next run at 03:00", "by ada"):  # fmt: skip
        assert each in shown


def test_apps_are_found_by_their_functions_and_sorted() -> None:
    many = [summary(name=f"app-{number}", functions=[f"f{number}"]) for number in range(250)]
    browser = sign_in(canned(**{"/v1/apps": [*many, summary(workers=9)]}))
    page = browser.get("/apps?sort=Workers&way=down").text
    assert "first 200 of 251" in text_of(page)
    assert page.index("/apps/default/embed") < page.index("/apps/default/app-")
    assert re.findall(r'href="/apps/default/([\w-]+)"', browser.get("/apps?text=F17").text) == [
        "app-17",
        *(f"app-17{number}" for number in range(10)),
    ]
    assert "No app matches" in browser.get("/apps?text=zzz").text


def test_without_apps_a_page_says_how_to_make_one() -> None:
    page = sign_in(canned(**{"/v1/apps": []})).get("/apps").text
    assert "cavvy deploy app.py" in page


def test_costs_are_left_out_for_who_may_not_see_them() -> None:
    refused = ApiError("role-needed", "no role", status=403)
    page = sign_in(canned(**{"/v1/ledger/sums": refused})).get("/apps")
    assert page.status_code == 200
    assert "$" not in text_of(page.text)


def test_an_app_shows_functions_figures_and_calls() -> None:
    page = sign_in(canned()).get("/apps/default/embed").text
    shown = text_of(page)
    assert "(texts: array) → array" in shown
    assert "POST /v1/projects/default/apps/embed/functions/encode" in shown
    assert "1 2 3 4 0.4 ms 1.5 s" in shown
    assert "encode: running, in milliseconds" in shown
    assert "encode: from call to result, in seconds" in shown
    assert "KeyError: no key" in shown
    assert "at 7" not in shown, "the traceback of a call that the server keeps is on its page"
    assert "ValueError: long" in shown
    assert "traces=1" in page


def test_tracebacks_are_shown_on_demand() -> None:
    traced = recent(trace="Traceback:\n  line 1")
    client = canned(**{f"{PATH}/figures": structs.replace(figures(), recent=[traced])})
    shown = text_of(sign_in(client).get("/apps/default/embed?traces=1&state=failed").text)
    assert "Traceback: line 1" in shown
    assert any("traces=true" in each for each in client.asked)


@pytest.mark.parametrize(
    ("asked", "seen", "unseen"),
    [
        ("state=waiting", "No call matches", "KeyError"),
        ("function=encode", "KeyError", "No call matches"),
        ("function=other", "No call matches", "KeyError"),
    ],
)
def test_calls_are_chosen_by_function_and_state(asked: str, seen: str, unseen: str) -> None:
    shown = text_of(sign_in(canned()).get(f"/apps/default/embed?{asked}").text)
    assert seen in shown
    assert unseen not in shown


def test_an_app_that_is_not_deployed_is_shown_while_it_runs() -> None:
    gone = ApiError("app-not-found", "no app", status=404)
    shown = sign_in(canned(**{PATH: gone})).get("/apps/default/embed")
    assert "ends with the program" in shown.text
    assert "encode" in shown.text
    missing = sign_in(canned(**{PATH: gone, f"{PATH}/figures": gone})).get("/apps/default/embed")
    assert missing.status_code == 404


def test_a_call_has_its_traceback_and_what_it_has_printed() -> None:
    log = b"encode c1 | first\nencode c2 | other\nencode | none\nencode c1 | \x1b[31mred\n"
    client = canned(**{"/v1/projects/default/jobs/j1/logs": log_answer(log)})
    shown = text_of(sign_in(client).get("/apps/default/embed/calls/c1").text)
    assert "KeyError: no key" in shown
    assert "Traceback at 7" in shown
    assert "first" in shown
    assert "red" in shown
    assert "other" not in shown
    assert sign_in(client).get("/apps/default/embed/calls/c9").status_code == 404


def test_a_call_has_its_job_its_cost_and_what_it_waits_for() -> None:
    waits = kept("waiting", why="2 calls of user-7 run", id="c2")
    ran = kept("done", job="j9", cost_micros=2_500_000, ended_at=NOW)
    own, other = (f"/v1/projects/default/jobs/{each}/logs" for each in ("j9", "j1"))
    log = {own: log_answer(b"encode c1 | in its own job\n"), other: log_answer(b"")}
    read = {f"{PATH}/calls/read": wire.CallsRead(ended=[], missing=[])}
    client = canned(**{f"{PATH}/calls": [waits, ran], **log, **read})
    page = sign_in(client).get("/apps/default/embed").text
    assert "2 calls of user-7 run" in text_of(page)
    assert "$2.50 mia, in its job" in text_of(page)
    assert "/jobs/default/j9" in page
    shown = text_of(sign_in(client).get("/apps/default/embed/calls/c1").text)
    assert "in its own job" in shown
    assert "$2.50" in shown
    assert "It waits: 2 calls" in sign_in(client).get("/apps/default/embed/calls/c2").text


def test_a_call_that_waits_is_cancelled() -> None:
    client = canned(**{f"{PATH}/calls": [kept("waiting")], f"DELETE {PATH}/calls/c1": None})
    browser = sign_in(client)
    assert "/apps/default/embed/calls/c1/cancel" in browser.get("/apps/default/embed").text
    browser.post("/apps/default/embed/calls/c1/cancel")
    assert f"DELETE {PATH}/calls/c1" in client.asked


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_no_text_of_a_program_becomes_a_part_of_a_page(text: str) -> None:
    hostile = recent(type=text, text=text, trace=text, function=text)
    found = figures(name=text)
    client = canned(
        **{
            PATH: deployed(text),
            f"{PATH}/figures": AppFigures(
                begin=found.begin,
                step_s=60.0,
                workers=1,
                jobs=[text],
                functions=found.functions,
                recent=[hostile],
            ),
            f"{PATH}/calls": [kept(function=text, user=text)],
            "/v1/apps": [summary(name=text, user=text, functions=[text])],
        }
    )
    for page in ("/apps", "/apps/default/embed"):
        assert text not in sign_in(client).get(page).text.partition("<main")[2]
