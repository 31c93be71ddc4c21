"""The console's pages: what they show, and that no text of users or nodes becomes a part of them."""

import html
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from msgspec import structs
from tests.console_rig import (
    HOSTILE_TEXTS,
    NOW,
    CannedClient,
    attempt,
    cost,
    detail,
    job_answers,
    listing,
    log_answer,
    node,
    sign_in,
    spent,
)

from cavvy.client import ApiError, account_wire, maintenance_wire, wire
from cavvy.client.account_wire import AuditLogPage
from cavvy.client.policy_wire import BudgetView
from cavvy.client.queue_wire import ShareReport


def server_view(**fields: Any) -> wire.ServerView:
    usual = {
        "version": "1",
        "api": 1,
        "revision": 1,
        "agent_protocols": [1],
        "pid": 1,
        "host": "here",
        "home": "/home",
        "address": "unix:/nowhere",
        "started_at": NOW,
        "uptime_s": 1.0,
        "idle_s": 0.0,
        "idle_stop_s": 0,
        "unfinished": 0,
        "database": "sqlite",
    }
    return wire.ServerView(**usual | fields)


def node_listing(**fields: Any) -> wire.NodeListing:
    usual = {
        "project": "default",
        "job": "train",
        "job_id": "id-train",
        "attempt": 1,
        "rank": 0,
        "gang": "g1",
        "placement": "aws/use1/p5/spot",
        "phase": "running",
        "rank_phase": "running",
        "rate_micros_per_hour": 12_500_000,
        "since": NOW,
        "heard_at": NOW,
        "devices": ["0", "1"],
    }
    return wire.NodeListing(**usual | fields)


def jobs_by_phase(*jobs: wire.JobListing) -> Callable[[str], wire.JobPage]:
    """The server's answer about these jobs, which depends on the phases that are asked for."""

    def answer(target: str) -> wire.JobPage:
        phases = parse_qs(urlsplit(target).query).get("phase")
        return wire.JobPage(
            jobs=[each for each in jobs if phases is None or each.phase in phases], cursor=None
        )

    return answer


def everything(**more: Any) -> dict[str, Any]:
    """The answers for all pages that list something."""
    return {
        "/v1/jobs": jobs_by_phase(listing()),
        "/v1/job-search": wire.JobMatches(jobs=[listing()], total=1),
        "/v1/gpu-use": wire.GpuUse(begin=NOW, step_s=1800.0, gpus={"H100": [0.0, 8.0, 4.0]}),
        "/v1/shares": ShareReport(half_life_days=7, projects=[]),
        "/v1/pools": [],
        "/v1/audit-log": AuditLogPage(records=[]),
        "/v1/projects/default/offers": wire.OfferPage(offers=[], total=0),
        "/v1/nodes": [node_listing(), node_listing(rank=1)],
        "/v1/machines": [],
        "/v1/hosts": [],
        "/v1/joined": [],
        "/v1/services": [],
        "/v1/edge/devices": [],
        "/v1/rollouts": [],
        "/v1/models": [],
        "/v1/budgets": [],
        "/v1/projects": [account_wire.ProjectView(name="default", parent=None, roles=[])],
        "/v1/ledger/sums": [spent(1_500_000, project="default")],
        "/v1/server": server_view(),
    } | more


def test_the_overview_counts_and_adds_up() -> None:
    text = sign_in(CannedClient(everything())).get("/").text
    assert "<b>1</b> running" in text
    assert "<b>2</b> nodes" in text
    assert "GPUs in use in the last 24 hours" in text
    assert "H100" in text.partition('id="gpu-use"')[2].partition("</section>")[0]
    assert "<b>$25.00</b> per hour now" in text
    assert "Spending in the last 14 days: $21.00" in text
    assert "9m00s ago: the work runs" not in text, "the job has not failed"


def test_machines_are_shown_with_hardware_and_price() -> None:
    def machine(**fields: Any) -> wire.MachineView:
        usual = {
            "project": "default",
            "user": "ada",
            "job": None,
            "waiting": 0,
            "has": "8 H100",
            "nodes": 1,
            "since": NOW,
            "kept_until": None,
            "keep_s": 60.0,
            "spent_micros": None,
        }
        return wire.MachineView(**usual | fields)

    key = "aws/us-east-1/us-east-1a/p5.48xlarge:8/spot"
    kept = machine(
        name="box", state="idle", placement=key, rate_micros_per_hour=9_000_000, spent_micros=5
    )
    stopped = machine(name="off", state="stopped", placement=None, rate_micros_per_hour=None)
    cheap = machine(name="tiny", state="idle", placement=None, rate_micros_per_hour=300)
    answers = everything(
        **{"/v1/machines": [kept, stopped, cheap], "/v1/nodes": [node_listing(placement=key)]}
    )
    browser = sign_in(CannedClient(answers))
    text = browser.get("/machines").text
    assert text.count("p5.48xlarge, 8 GPUs<br>") == 2
    assert 'class="number">$0.0003/h</td>' in text
    assert "$12.50/h" in text
    assert 'class="number">$9.00/h</td>' in text
    assert 'class="number">–</td>' in text
    for column in ("Name", "State", "Project", "User", "Price", "Cost"):
        listed = browser.get(f"/machines?named-sort={column}&named-way=down")
        assert listed.status_code == 200, column


def test_own_hosts_are_shown_with_what_is_ordered_for_them() -> None:
    held = maintenance_wire.HolderView(
        project="default",
        job="train",
        job_id="01ab",
        user="ada",
        rank=0,
        phase="running",
        devices=["GPU-0"],
        part=1.0,
        cpus=4,
        memory_mib=1024,
        since=NOW,
        until=NOW,
        until_from="notice",
        lost_s=0,
        lost_micros=0,
    )
    reserved = maintenance_wire.ReservationView(
        name="",
        project="",
        user="",
        parts=[],
        gpus=0,
        begins_at=NOW,
        ends_at=NOW,
        made_by="",
        reason="",
    )
    host = maintenance_wire.HostView(
        name="ssh/box",
        state="draining",
        why="drained by ann (<fan>)",
        since=NOW,
        drain_by=NOW,
        cpus=8,
        memory_mib=4096,
        devices=["GPU-0", "GPU-1"],
        kinds=["T4", "T4"],
        sick={"GPU-1": "3 errors"},
        holders=[held, structs.replace(held, job="", until=None)],
        reservations=[reserved],
    )
    text = sign_in(CannedClient(everything(**{"/v1/hosts": [host]}))).get("/machines").text
    assert '<span class="badge is-draining">draining</span>' in text
    assert '<a href="/jobs/default/01ab">train</a> (1) until' in text
    assert text.count("another project") == 2
    assert "drained by ann (&lt;fan&gt;)<br>GPU-1: 3 errors" in text


def test_an_update_of_the_overview_does_not_add_up_past_days_again() -> None:
    client = CannedClient(everything())
    browser = sign_in(client)
    browser.get("/")
    assert sum("/v1/ledger" in each for each in client.asked) == 14
    client.asked.clear()
    assert "Spending in the last 14 days: $21.00" in browser.get("/").text
    assert sum("/v1/ledger" in each for each in client.asked) == 0
    browser.get("/costs?days=7")
    days = [each for each in client.asked if "/v1/ledger" in each and "until=" in each]
    assert days == [], "the pages share the days"


def test_the_overview_names_what_needs_attention() -> None:
    failed = listing("bad", phase="failed", reason="it crashed", since=NOW - timedelta(hours=1))
    old = listing("old", phase="failed", reason="long ago", since=NOW - timedelta(days=2))
    answers = everything(**{"/v1/server": server_view(problem="its disk is full")})
    answers["/v1/jobs"] = jobs_by_phase(failed, old)
    text = sign_in(CannedClient(answers)).get("/").text
    notices = text.split('id="attention"')[1].split("<section")[0]
    assert "its disk is full" in notices
    assert "it crashed" in notices
    assert "long ago" not in notices


def test_the_overview_names_jobs_that_wait_long_and_idle_gpus() -> None:
    hours = timedelta(hours=1)
    jobs = [
        listing("patient", phase="queued", reason="no capacity", since=NOW - hours),
        listing("held", phase="queued", held=True, since=NOW - hours),
        listing("fresh", phase="queued", since=NOW),
    ]
    idle = node_listing(
        accelerator="H100", accelerator_count=8, job="lazy", telemetry={"gpu_idle_s": 3600.0}
    )
    busy = node_listing(accelerator="H100", accelerator_count=4, telemetry={"gpu_idle_s": 3.0})
    answers = everything(**{"/v1/nodes": [idle, busy], "/v1/jobs": jobs_by_phase(*jobs)})
    text = sign_in(CannedClient(answers)).get("/").text
    notices = text.split('id="attention"')[1].split("<section")[0]
    assert "no capacity" in notices
    assert notices.count(" waits for ") == 1
    assert "8 × H100" in notices
    assert "lazy" in notices
    assert "$12.50 an hour" in notices
    assert "<b>12</b> H100" in text


def test_an_array_is_one_row_of_the_overview_and_a_service_too() -> None:
    members = {"running": 2, "done": 28}
    array = listing("sweep", phase="running", members=members, reason="2 running, 28 done")
    failed = listing("worse", phase="failed", members={"failed": 3, "done": 1}, since=NOW)
    asking = CannedClient(everything(**{"/v1/jobs": jobs_by_phase(array, failed)}))
    text = sign_in(asking).get("/").text
    assert f'href="/groups/default/{array.id}"' in text
    assert "2 running, 28 done" in text
    assert "3 of 4 jobs" in text
    assert any("arrays=" in each for each in asking.asked)


@pytest.mark.parametrize(("spent_micros", "needs"), [(7_900_000, False), (8_000_000, True)])
def test_a_budget_needs_attention_from_80_percent_on(spent_micros: int, needs: bool) -> None:
    budget = BudgetView(
        name="team",
        project="",
        user="",
        tag="",
        limit_micros=10_000_000,
        month_limit_micros=10_000_000,
        spent_micros=spent_micros,
        expected_micros=None,
        low_micros=None,
        high_micros=None,
        alerts=[],
        soft_percent=None,
        hard_percent=None,
        carry_over=False,
        request=None,
    )
    text = sign_in(CannedClient(everything(**{"/v1/budgets": [budget]}))).get("/").text
    assert ("of $10.00 this month" in text) == needs


def test_a_user_who_may_not_see_costs_sees_the_rest() -> None:
    refusal = ApiError("role-needed", "you have no role with costs", "", 403)
    answers = everything(**{"/v1/ledger/sums": refusal, "/v1/budgets": refusal})
    for path in ("/", "/costs"):
        page = sign_in(CannedClient(answers)).get(path)
        assert page.status_code == 200
        assert "you have no role with costs" in page.text


def test_a_job_is_shown_with_its_attempts_nodes_and_log() -> None:
    ranks = [
        node(0, telemetry={"gpu_percent": 93.4, "memory_mib": 2048.0}, progress={"epoch": 3.0}),
        node(1, phase="exited", exit_code=1, exit_reason="ran out of memory"),
    ]
    job = detail(
        attempt=2,
        attempts=[attempt(1, phase="ended", outcome="preempted"), attempt(2, nodes=ranks)],
    )
    stretch = wire.StretchView(
        spell="running", since=NOW - timedelta(minutes=9), until=NOW, attempt=2
    )
    answers = job_answers(job, b"epoch 1\repoch 2\n", cost=cost(timeline=[stretch]))
    text = sign_in(CannedClient(answers)).get("/jobs/default/train").text
    for part in (
        "preempted",
        "ran out of memory",
        "93 %",
        "memory 2 GiB",
        "epoch 3",
        "running 9m00s, attempt 2",
        "epoch 1&#13;epoch 2",
        "python train.py",
        "$0.30",
    ):
        assert part in text, part
    assert f'data-offset="{len(b"epoch 1 epoch 2 ")}"' in text


@pytest.mark.parametrize(
    ("log", "over", "shown", "offset"),
    [
        ("aä".encode()[:-1], False, "a", 1),  # the script reads the character when it is complete
        ("a€".encode()[:-1], False, "a", 1),
        ("aä".encode()[:-1], True, "a\N{REPLACEMENT CHARACTER}", 2),
        ("äb".encode()[1:], False, "b", 2),
        (b"a\xffb", False, "a\N{REPLACEMENT CHARACTER}b", 3),
    ],
)
def test_characters_that_are_cut_at_the_ends_of_the_log_are_not_shown(
    log: bytes, over: bool, shown: str, offset: int
) -> None:
    answers = job_answers(detail(attempts=[attempt()]))
    answers |= {each: log_answer(log, over=over) for each in answers if each.endswith("/logs")}
    text = sign_in(CannedClient(answers)).get("/jobs/default/train").text
    assert f">\n{shown}</pre>" in text
    assert f'data-offset="{offset}"' in text


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_texts_of_users_and_nodes_are_shown_as_they_are(text: str) -> None:
    job = detail(
        reason=text,
        user=text,
        placement=text,
        attempts=[
            attempt(
                reason=text,
                nodes=[
                    node(
                        exit_reason=text,
                        telemetry={text: 1.0, f"{text}_percent": 2.0},
                        progress={text: text},
                    )
                ],
            )
        ],
    )
    page = sign_in(CannedClient(job_answers(job, text.encode()))).get("/jobs/default/train").text
    assert text not in page
    shown = html.unescape(page)
    assert shown.count(text) >= 7
    listed = everything(
        **{"/v1/job-search": wire.JobMatches(jobs=[listing(reason=text, user=text)], total=1)}
    )
    listed["/v1/ledger/sums"] = [spent(1_000_000, project=text)]
    for path in ("/", "/jobs", f"/jobs?project=&phase={text}", "/costs"):
        page = sign_in(CannedClient(listed)).get(path).text
        assert text not in page


def test_a_piece_of_the_log_keeps_bytes_that_are_no_text() -> None:
    job = detail()
    answers = job_answers(job)
    answers["/v1/projects/default/jobs/train/logs"] = log_answer(b"\xff\xc3", 3, over=True)
    piece = sign_in(CannedClient(answers)).get("/jobs/default/train/log?attempt=3&offset=0").json()
    assert piece == {"data": "/8M=", "attempt": 3, "offset": 2, "over": True}


@pytest.mark.parametrize("query", ["rank=-1", "rank=x", "rank=١", "attempt=99999999999999999999"])
def test_wrong_numbers_are_refused(query: str) -> None:
    page = sign_in(CannedClient(job_answers(detail()))).get(f"/jobs/default/train?{query}")
    assert page.status_code == 400
    assert "must be a whole number" in page.text


@pytest.mark.parametrize("query", ["by=x", "days=8"])
def test_unknown_choices_are_refused(query: str) -> None:
    page = sign_in(CannedClient(everything())).get(f"/costs?{query}")
    assert page.status_code == 400
    assert "must be one of" in page.text


def test_a_job_that_does_not_exist_is_an_error_with_its_hint() -> None:
    missing = ApiError("job-not-found", "there is no job nope", "see `cavvy ps`", 404)
    page = sign_in(CannedClient({"/v1/projects/default/jobs/nope": missing})).get(
        "/jobs/default/nope"
    )
    assert page.status_code == 404
    assert "there is no job nope" in page.text
    assert "see `cavvy ps`" in page.text


def test_a_server_that_does_not_answer_is_an_error_page() -> None:
    silent = ApiError("http-503", "nothing answers", "start it", 0)
    page = sign_in(CannedClient({"/v1/nodes": silent})).get("/machines")
    assert page.status_code == 502
    assert "nothing answers" in page.text


def test_what_a_form_asks_for_is_done_once_and_the_job_is_shown() -> None:
    job = detail()
    answers = job_answers(job) | {
        "POST /v1/projects/default/jobs/train/stop": listing(phase="stopping"),
        "POST /v1/projects/default/jobs/train/retry": listing(phase="queued"),
    }
    for action in ("stop", "retry"):
        client = CannedClient(answers)
        browser = sign_in(client)
        answer = browser.post(f"/jobs/default/train/{action}", follow_redirects=False)
        assert (answer.status_code, answer.headers["location"]) == (303, "/jobs/default/train")
        assert client.asked == [f"POST /v1/projects/default/jobs/train/{action}"]
