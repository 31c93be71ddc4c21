"""The console's page of one job, in each phase, and what an update of the page requests."""

import html
import re
from datetime import datetime, timedelta
from typing import Any

import pytest
from msgspec import Raw
from msgspec.json import encode
from tests.console_rig import (
    NOW,
    CannedClient,
    attempt,
    detail,
    job_answers,
    node,
    replica,
    served,
    sign_in,
)

from cavvy.client import ApiError, wire

PATH = "/jobs/default/train"
API = "/v1/projects/default/jobs"


def page_of(job: wire.JobDetail, **more: Any) -> str:
    """The text of the page, without its tags."""
    answers = job_answers(job) | more
    page = sign_in(CannedClient(answers)).get(f"/jobs/{job.project}/{job.name}").text
    words = html.unescape(" ".join(re.sub(r"<[^>]+>", " ", page).split()))
    return re.sub(r" ([.,])", r"\1", words)


def task(**fields: Any) -> Raw:
    return Raw(encode({"run": "python train.py"} | fields))


def test_a_job_held_by_its_schedule_and_window() -> None:
    job = detail(
        phase="queued",
        held=True,
        attempt=0,
        placement=None,
        not_before=NOW + timedelta(hours=2),
        task=task(window={"text": "22:00-06:00", "time_zone": "Europe/Berlin"}),
    )
    text = page_of(job)
    assert "The job is held until 2026-03-04 14:00:00 UTC" in text
    assert "it starts in the window 22:00-06:00 (Europe/Berlin)" in text


def test_a_job_that_has_lost_a_node_shows_its_sizes_over_time() -> None:
    times = [NOW - timedelta(seconds=each) for each in (90, 30, 20)]
    nodes = [node(rank=rank) for rank in range(2)]
    first = attempt(1, gang="g@1", nodes=nodes, running_at=times[0], finished_at=times[1])
    second = attempt(
        2, gang="g", nodes=nodes, repairs=[1], launched_at=times[1], running_at=times[2]
    )
    text = page_of(detail(attempts=[first, second], attempt=2))
    shown = text.partition("Sizes over time")[2]
    assert "1 of 2 replaced 10s $0.01" in shown
    assert "Sizes over time" not in page_of(detail(attempts=[second], attempt=2))


def test_a_page_that_is_opened_early_shows_the_log_and_the_nodes_later() -> None:
    job = detail(phase="queued", attempt=0, placement=None)
    client = CannedClient(job_answers(job))
    page = sign_in(client).get(PATH).text
    assert 'data-attempt="1" data-offset="0">' in page, "the page's script waits for the log"
    assert not any("/logs" in each for each in client.asked)
    assert '<div id="nodes" data-live>' in page
    assert '<div id="rank-choice" data-live>' in page
    stopped = detail(phase="stopped", attempt=0, placement=None, ended_at=NOW)
    assert "The job ended before its first attempt." in page_of(stopped)


def test_an_update_says_whether_the_job_still_has_no_log() -> None:
    """The page's script loads the page again when the log begins, and must not do so for ever."""
    for phase, has_log in (("stopped", False), ("queued", True)):
        answers = job_answers(detail(phase=phase, attempt=0, placement=None))
        page = sign_in(CannedClient(answers)).get(PATH, headers={"sec-fetch-dest": "empty"}).text
        assert ('id="no-log"' not in page) == has_log


def test_a_queued_job_with_and_without_a_position() -> None:
    waits = {"phase": "queued", "attempt": 0, "placement": None, "queue_position": 3}
    assert "probably" not in page_of(detail(**waits))
    later = [NOW + timedelta(minutes=each) for each in (1, 5, 9)]
    start = wire.EstimatedStart(earliest=later[0], likely=later[1], latest=later[2])
    page = page_of(detail(**waits, estimated_start=start))
    assert re.search("probably starts at .*12:05:00 UTC.* between .*12:01:00.* and .*12:09", page)
    job = detail(phase="queued", attempt=0, placement=None, not_before=NOW + timedelta(minutes=1))
    assert "The job waits at least until 2026-03-04 12:01:00 UTC, and has no" in page_of(job)


def test_a_starting_job_says_what_it_waits_for() -> None:
    nodes = [node(rank, phase="claimed" if rank < 3 else "expected") for rank in range(64)]
    own = attempt(
        1,
        phase="booting",
        reason="the provider starts the nodes",
        expected_at=NOW + timedelta(minutes=2),
        nodes=nodes,
    )
    text = page_of(detail(phase="starting", attempts=[own]))
    assert "3 of 64 nodes joined: the provider starts the nodes." in text
    assert "Expected by the provider: in 2m00s." in text
    assert "64 nodes: 3 claimed, 61 expected." in text


def test_a_rank_of_a_large_gang_keeps_the_attempt() -> None:
    gang = attempt(1, nodes=[node(rank) for rank in range(64)])
    job = detail(attempt=2, attempts=[gang, attempt(2, nodes=[node(0)])])
    answers = job_answers(job)
    client = CannedClient(answers)
    text = sign_in(client).get(f"{PATH}?attempt=1&rank=63").text
    choices = text.split('<select name="rank"')[1].split("</select>")[0]
    assert choices.count("<option") == 64
    assert "<option selected>63</option>" in choices
    assert '<input type="hidden" name="attempt" value="1">' in text
    newest = sign_in(CannedClient(job_answers(detail(attempts=[gang])))).get(PATH).text
    assert '<select name="rank"' in newest
    assert 'name="attempt"' not in newest, "another attempt may begin while the page is open"
    log = next(each for each in client.asked if "/logs" in each)
    assert "rank=63" in log
    assert "attempt=1" in log


def test_the_deadline_policy_standby_gangs_and_avoided_placements() -> None:
    job = detail(
        attempts=[attempt(1), attempt(2, phase="booting")],
        standbys=[2],
        plan_state=wire.PlanStateView(
            at=NOW - timedelta(minutes=1), mode="spot", reason="it is cheap", placement=None
        ),
        avoid={
            "aws/us/p5:8/spot": NOW + timedelta(minutes=5),
            "aws/eu/p5:8/spot": NOW - timedelta(minutes=5),
        },
    )
    forecast = wire.ForecastView(
        runs=60, mean_micros=5_000_000, in_time=0.97, hours_p50=1.5, p90_micros=9_000_000
    )
    text = page_of(job, **{f"{API}/id-train/forecast": forecast})
    assert "the deadline policy chose spot: it is cheap" in text
    assert "$5.00" in text
    assert "97.0% of the runs" in text
    assert "booting standby" in text
    assert "aws/us/p5:8/spot in 5m00s" in text
    assert "aws/eu/p5:8/spot" not in text, "the cooldown has ended"


def test_a_stopped_job_names_the_cause() -> None:
    job = detail(
        phase="stopped",
        stop_reason="the budget was reached",
        stop_cause="budget",
        ended_at=NOW - timedelta(minutes=1),
    )
    text = page_of(job)
    assert "Stopped by budget the budget was reached" in text
    assert "Duration 9m00s" in text


def test_a_replica_and_a_machine_are_linked() -> None:
    job = detail("chat.1", machine="box")
    answers = job_answers(job) | {"/v1/services": [served("chat", replica(job=job.id))]}
    text = sign_in(CannedClient(answers)).get("/jobs/default/chat.1").text
    assert '<a href="/services/default/chat">chat</a>' in text
    assert '<a href="/machines#machine-default-box">box</a>' in text


@pytest.mark.parametrize(
    ("offer", "expected"),
    [
        ({"accelerator": "H100", "accelerator_count": 8}, "8 × H100"),
        ({"accelerator": "A10", "accelerator_count": 1, "accelerator_part": 0.25}, "0.25 × A10"),
    ],
)
def test_the_accelerators_of_an_attempt(offer: dict[str, Any], expected: str) -> None:
    assert expected in page_of(detail(attempts=[attempt(1, offer=Raw(encode(offer)))]))


def test_a_job_of_a_project_without_a_role_is_an_error_page() -> None:
    refusal = ApiError("role-needed", "you have no role in default", "ask an admin", 403)
    page = sign_in(CannedClient({f"{API}/train": refusal})).get(PATH)
    assert page.status_code == 403
    assert "you have no role in default" in page.text
    assert "ask an admin" in page.text


def test_a_viewer_sees_the_job_without_its_cost() -> None:
    refusal = ApiError("role-needed", "no role with spending", "", 403)
    text = page_of(detail(attempts=[attempt(1)]), **{f"{API}/id-train/cost": refusal})
    assert "The time and the cost cannot be shown: no role with spending." in text
    assert "on-demand" in text


def test_an_update_requests_only_what_may_have_changed() -> None:
    def event(number: int, at: datetime) -> wire.EventView:
        return wire.EventView(id=number, at=at, attempt=1, rank=None, kind="k", text=f"e{number}")

    def events(target: str) -> wire.EventPage:
        after = int(re.findall(r"after=(\d+)", target)[0])
        found = [event(number, NOW) for number in range(after + 1, min(after + 3, 6))]
        return wire.EventPage(events=found, last=after + len(found), over=False)

    plan = wire.PlanStateView(at=NOW, mode="spot", reason="", placement=None)
    job = detail(attempts=[attempt(1)], plan_state=plan)
    client = CannedClient(job_answers(job) | {f"{API}/id-train/events": events})
    browser = sign_in(client)
    first = browser.get(PATH).text
    client.asked.clear()
    second = browser.get(PATH, headers={"sec-fetch-dest": "empty"}).text
    asked = [each.split("?")[0].removeprefix(f"GET {API}/") for each in client.asked]
    core = [each for each in asked if each != "id-train/curves"]  # of a capability
    assert core == ["train", "id-train/cost", "id-train/events"]
    for page in (first, second):
        assert [f"e{number}" for number in range(5, 0, -1)] == re.findall(r">(e\d)<", page)


def series(rank: int = 0, name: str = "loss", **fields: Any) -> wire.SeriesView:
    values: list[float | None] = [2.0, 1.0, None, 0.5]
    usual = {"attempt": 1, "low": values, "mean": values, "high": [3.0, 1.5, None, 0.5]}
    return wire.SeriesView(rank=rank, name=name, **usual | fields)


def test_figures_are_drawn_over_time_with_a_line_for_each_rank() -> None:
    found = wire.JobFigures(
        start=NOW - timedelta(minutes=4),
        step_s=60,
        series=[series(), series(1), series(name="gpu_percent")],
    )
    job = detail(attempts=[attempt(nodes=[node(0), node(1)])])
    client = CannedClient(job_answers(job, figures=found))
    page = sign_in(client).get("/jobs/default/train?period=hour").text
    titles = re.findall(r"<figcaption>([^<]+)</figcaption>", page)
    assert titles == ["Loss", "GPU"], "what the work reports comes first"
    assert page.count('class="curve series-1"') == 1
    assert page.count('class="curve band"') == 1, "only a line that is alone has a band"
    assert "rank 1" in page
    assert "M0 " in page
    asked = next(each for each in client.asked if "/figures" in each)
    assert asked.count("rank=") == 8
    alone = sign_in(client).get("/jobs/default/train?rank=1").text
    assert 'aria-current="true">12 hours' in alone
    assert client.asked[-1].count("rank=") <= 1


def test_updates_have_the_charts_once_a_minute() -> None:
    found = wire.JobFigures(start=NOW, step_s=60, series=[series()])
    client = CannedClient(job_answers(detail(attempts=[attempt(nodes=[node()])]), figures=found))
    update = {"sec-fetch-dest": "empty"}
    page = sign_in(client).get("/jobs/default/train", headers=update).text
    assert 'id="figures"' in page, "at the begin of a minute"


def test_progress_has_a_bar_and_the_time_left_at_the_speed_of_the_last_minutes() -> None:
    done: list[float | None] = [10.0, 20.0, 30.0]
    found = wire.JobFigures(
        start=NOW - timedelta(minutes=2),
        step_s=60,
        series=[series(name="done", low=done, mean=done, high=done)],
    )
    told = node(progress={"done": 30, "total": 120})
    job = detail(attempts=[attempt(nodes=[told])])
    client = CannedClient(job_answers(job, figures=found))
    page = sign_in(client).get(PATH).text
    assert re.search(r'<progress aria-label="[^"]+" max="100" value="25.0">', page)
    assert "25.0%, about 9m00s left" in re.sub(r"<[^>]+>", "", page)
    for progress in ({}, {"done": 5}, {"done": "x", "total": 0}, {"loss": 1.0}):
        other = detail(attempts=[attempt(nodes=[node(progress=progress)])])
        answers = job_answers(other, figures=found)
        assert "<progress" not in sign_in(CannedClient(answers)).get(PATH).text
    told = node(progress={"done": 1, "total": 2, "left_s": 61.4})
    job = detail(attempts=[attempt(nodes=[told])])
    assert "50.0%, about 1m01s left" in page_of(job)


def test_the_energy_of_the_work_is_shown() -> None:
    energy = wire.EnergyView(joules=7_200_000, co2_g=688, unplaced_j=0, grids={"de": 2024})
    assert "Energy 2 kWh, 688 g of CO2 (grid of de, 2024)" in page_of(detail(energy=energy))


def test_files_that_no_checkpoint_has_are_named() -> None:
    unsafe = wire.UnsafeView(at=NOW, rank=0, reason="a.h5 has never been safe: it stays open")
    job = detail(attempts=[attempt(unsafe=unsafe)])
    assert "Not safe: a.h5 has never been safe: it stays open" in page_of(job)
    assert "Not safe" not in page_of(detail(attempts=[attempt()]))


def test_ranks_that_are_slower_than_others_are_marked() -> None:
    def shown(phase: str, *step_ms: float) -> str:
        nodes = [node(rank, progress={"step_ms": ms}) for rank, ms in enumerate(step_ms)]
        job = detail(phase=phase, attempts=[attempt(nodes=nodes)])
        return sign_in(CannedClient(job_answers(job))).get("/jobs/default/train").text

    page = shown("running", 100, 100, 250)
    assert "Stragglers</a>: steps take longer than the median: rank 2 (2.5 times)." in page
    assert page.count("2.5 × slower") == 1
    assert "Stragglers" not in shown("running", 100, 100, 110)
    assert "Stragglers" not in shown("done", 100, 100, 250)
