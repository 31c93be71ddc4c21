"""The curves of a job on its page in the console, and in a terminal."""

import html
import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import structs
from tests.console_rig import (
    NOW,
    CannedClient,
    attempt,
    detail,
    job_answers,
    listing,
    node,
    sign_in,
)

from cavvy.capabilities.curves.data import Axis, charts_of, make_clock
from cavvy.capabilities.curves.drawing import draw
from cavvy.capabilities.curves.machine import follow_steps
from cavvy.capabilities.curves.order import prominence
from cavvy.capabilities.curves.wire import Curve, CurveNames, Gap, JobCurves
from cavvy.client import ApiError, wire
from cavvy.client.array_wire import ArrayDetail, ArrayMemberView

PATH = "/jobs/default/train"
API = "/v1/projects/default/jobs/"


def curve(name: str, *values: float, attempt: int = 1, rank: int = 0) -> Curve:
    count = len(values)
    return Curve(
        name=name,
        attempt=attempt,
        rank=rank,
        count=count,
        steps=[float(each) for each in range(count)],
        times_ms=[1_700_000_000_000 + 1000 * each for each in range(count)],
        values=[*values],
        low=min(values),
        high=max(values),
        last=values[-1],
    )


def curve_answers(*curves: Curve) -> dict[str, Any]:
    names = CurveNames(names=sorted({each.name for each in curves}))
    job = detail()
    return {
        f"{API}{each}/{path}": found
        for each in (job.name, job.id)
        for path, found in (("curves", JobCurves(curves=[*curves])), ("curve-names", names))
    }


def page_of(*curves: Curve, query: str = "") -> str:
    job = detail(attempts=[attempt()])
    answers = job_answers(job)
    answers |= curve_answers(*curves)
    return sign_in(CannedClient(answers)).get(PATH + query).text


def curves_of(page: str) -> str:
    return page[page.index('id="curves-title"') : page.index('id="figures-title"')]


def test_curves_stand_above_the_figures_the_losses_first() -> None:
    shown = curves_of(page_of(curve("lr", 0.1, 0.05), curve("acc", 0.1, 0.9), curve("loss", 2, 1)))
    assert re.findall(r"<figcaption>(\w+)</figcaption>", shown) == ["loss", "acc", "lr"]
    assert 'd="M0 0L1000 110h0.1"' in shown, "the loss falls from the top left to the bottom right"


def test_each_attempt_has_a_line_of_its_own() -> None:
    shown = curves_of(page_of(curve("loss", 3, 2), curve("loss", 2, 1, attempt=2)))
    words = html.unescape(re.sub(r"<[^>]+>", " ", shown))
    assert shown.count('<path class="curve') == 2
    assert "attempt 1" in words
    assert "attempt 2" in words


def test_a_logarithmic_scale_has_no_place_for_zero() -> None:
    shown = curves_of(page_of(curve("loss", 100, 0, 1), query="?scale=log&by=time"))
    assert shown.count("L") >= 1
    assert "1 s" in shown
    assert ">100<" in shown
    shown = curves_of(page_of(curve("loss", 0, 0), query="?scale=log"))
    assert "loss" in shown


def test_the_name_of_a_curve_is_text() -> None:
    shown = curves_of(page_of(curve("<b>loss", 1, 2)))
    assert "<b>loss" not in shown
    assert "&lt;b&gt;loss" in shown


def test_a_page_without_curves_has_no_empty_charts() -> None:
    assert 'id="curves-title"' not in page_of()


def test_updates_of_a_page_ask_for_names_only() -> None:
    """The page's script draws the charts, and asks for their data itself."""
    job = detail(phase="running", attempts=[attempt()])
    client = CannedClient(job_answers(job) | curve_answers(curve("loss", 2, 1)))
    browser = sign_in(client)
    assert "/static/curves/curves.js" in browser.get(PATH).text
    client.asked.clear()
    page = browser.get(PATH, headers={"sec-fetch-dest": "empty"}).text
    assert not any(each.endswith("/curves") or "/curves?" in each for each in client.asked)
    assert '<path class="curve' not in page
    part = 'data-part="cavvy.capabilities.curves:part.html"'
    assert part in page, "a page that was opened before the first value is loaded again"


def test_a_page_brings_the_data_of_the_charts_that_are_drawn_first() -> None:
    """The script needs no second request before the first chart."""
    page = page_of(curve("loss", 2, 1), query="?by=step&from=0&to=9")
    [first] = re.findall(r'data-first="([^"]*)"', page)
    [chart] = json.loads(html.unescape(first))["charts"]
    assert (chart["name"], chart["lines"][0]["y"]) == ("loss", [2, 1])
    assert 'id="curves-title"' in page_of(curve("loss", 2, 1), query="?by=mood&from=x"), "no error"


def test_checkpoints_and_stragglers_are_marks_of_the_charts() -> None:
    job = detail(phase="running", attempts=[attempt()])
    client = CannedClient(job_answers(job) | curve_answers(curve("loss", 2, 1, 0.5)))
    at = datetime.fromtimestamp(1_700_000_001, tz=UTC)
    events = [
        wire.EventView(id=number, at=at, attempt=1, rank=0, kind=kind, text="")
        for number, kind in enumerate(("checkpoint", "straggler", "running"), 1)
    ]
    pages = [wire.EventPage(events=events, last=3, over=False)]
    empty = wire.EventPage(events=[], last=3, over=False)
    client.answers[f"{API}{job.id}/events"] = lambda _: pages.pop() if pages else empty
    browser = sign_in(client)
    data = browser.get(f"{PATH}/curves?curve=loss&by=step").json()
    assert data["marks"] == [{"x": 1, "text": "checkpoint"}, {"x": 1, "text": "straggler"}]


def test_the_script_of_the_page_gets_the_data_of_charts() -> None:
    job = detail(phase="running", attempts=[attempt()])
    gap = Gap(step=1, time_ms=1_700_000_001_000, value="nan")
    found = structs.replace(curve("loss", 2, 1, 0.5), steps=[0, 2, 3], gaps=[gap], gap_count=1)
    client = CannedClient(job_answers(job) | curve_answers(found))
    browser = sign_in(client)
    data = browser.get(f"{PATH}/curves?curve=loss&by=step&from=0&to=3").json()
    assert (data["names"], data["live"]) == (["loss"], True)
    [line] = data["charts"][0]["lines"]
    assert (line["x"], line["y"]) == ([0, 1, 2, 3], [2, None, 1, 0.5])
    assert (line["count"], line["gaps"], line["last"]) == (3, 1, 0.5)
    assert any(
        "from=0" in each and "to=3" in each and "curve=loss" in each for each in client.asked
    )
    for wrong in ("by=mood", "from=nan", "to=x"):
        assert browser.get(f"{PATH}/curves?curve=loss&{wrong}").status_code == 400
    assert browser.get("/static/curves/uPlot.iife.min.js").status_code == 200


def test_what_the_machines_measured_lies_on_the_axis_of_the_curves() -> None:
    """A step a second from the second minute on; ranks are a band."""
    begin = datetime(2026, 3, 1, 12, tzinfo=UTC)
    steps = [*range(0, 241, 10)]
    times = [int(begin.timestamp() * 1000) + 60_000 + 1000 * each for each in steps]
    loss = structs.replace(curve("loss", *([1.0] * len(steps))), steps=steps, times_ms=times)
    measured = [
        wire.SeriesView(
            attempt=1,
            rank=rank,
            name="gpu_percent",
            low=[0, 50, 60, None, 90],
            mean=[0, 60 + 20 * rank, 70, None, 95],
            high=[0, 90, 80, None, 99],
        )
        for rank in (0, 1)
    ]
    found = wire.JobFigures(start=begin, step_s=60, series=measured)
    nodes = [node(telemetry={"gpu_percent": 95, "temperature": 70.0})]
    job = detail(attempts=[attempt(running_at=begin, nodes=nodes)])
    client = CannedClient(
        job_answers(job) | curve_answers(loss) | {f"{API}{job.id}/figures": found}
    )
    browser = sign_in(client)
    asked = f"{PATH}/curves?curve=machine/gpu_percent"
    data = browser.get(f"{asked}&by=step").json()
    assert data["names"] == ["loss", "machine/gpu_percent"]
    [chart] = data["charts"]
    [line] = chart["lines"]
    assert (chart["name"], line["label"]) == ("machine/gpu_percent", "attempt 1, mean of 2 ranks")
    # the first minute had no step
    assert (line["x"], line["y"]) == ([30, 90, 210], [70, 70, 95])
    assert (line["low"], line["high"]) == ([50, 60, 90], [90, 80, 99])
    assert (line["count"], line["lowest"], line["highest"], line["last"]) == (3, 50, 99, 95)
    [line] = browser.get(f"{asked}&by=time").json()["charts"][0]["lines"]
    assert line["x"] == [30, 90, 150, 270]
    client.asked.clear()
    assert browser.get(f"{asked}&by=step&from=100&to=120").json()["charts"]
    [read] = [each for each in client.asked if "/figures" in each]
    assert "since=2026-03-01T12%3A00" in read
    assert "until=2026-03-01T12%3A05" in read
    page = html.unescape(browser.get(PATH).text)
    assert 'data-names="["loss", "machine/gpu_percent"]"' in page


def test_a_curve_that_has_the_name_of_a_machines_chart_is_the_programs() -> None:
    name = "machine/gpu_percent"
    client = CannedClient(job_answers(detail()) | curve_answers(curve(name, 1, 2)))
    job = detail(attempts=[attempt(nodes=[node(telemetry={"gpu_percent": 9})])])
    client.answers[f"{API}{job.name}"] = client.answers[f"{API}{job.id}"] = job
    data = sign_in(client).get(f"{PATH}/curves?curve={name}").json()
    assert data["names"] == [name]
    assert data["charts"][0]["lines"][0]["y"] == [1, 2]


@pytest.mark.parametrize(
    ("at", "step"),
    [(-1, None), (0, 0), (5, 1), (15, 2), (20, 1), (25, 1.5), (99, 2), (60_100, None)],
)
def test_a_time_is_placed_at_the_step_of_the_program(at: float, step: float | None) -> None:
    """The second attempt begins again, at step 1."""
    place = follow_steps([(0, 0), (10, 2), (20, 1), (30, 2)])
    assert place(at) == step


def test_ranks_and_processes_are_a_band() -> None:
    axis = Axis("step", 0, make_clock([], NOW), (None, None))
    found = [
        curve("loss", 1, 2),
        curve("loss", 3, 4, rank=1),
        structs.replace(curve("loss", 5, 6), process=1),
    ]
    [chart] = charts_of(found, axis)
    [line] = chart["lines"]
    assert line["label"] == "attempt 1, mean of 3 processes"
    assert (line["x"], line["y"], line["low"], line["high"]) == ([0, 1], [3, 4], [1, 2], [5, 6])


def test_times_of_runs_begin_with_their_first_figure() -> None:
    axis = Axis("time", 0, make_clock([], NOW), (None, None))
    loss = structs.replace(curve("loss", 1, 2), job="a")
    late = [at + 600_000 for at in loss.times_ms]
    score = structs.replace(curve("score", 3, 4), job="a", times_ms=late)
    charts = {each["name"]: each["lines"][0]["x"] for each in charts_of([loss, score], axis)}
    assert charts["loss"][0] == 0
    assert charts["score"][0] == 600


def test_a_band_of_numbers_that_cannot_be_added_is_json() -> None:
    axis = Axis("step", 0, make_clock([], NOW), (None, None))
    first, second = curve("loss", 1, 1.7e308, 4), curve("loss", 3, 1.7e308, 1.7e308, rank=1)
    ends = structs.replace(curve("loss", 5, 5), process=1, steps=[-1.7e308, 1.7e308])
    [chart] = charts_of([first, second, ends], axis)
    [line] = chart["lines"]
    assert (line["x"], line["y"]) == ([0, 2], [2, 4])
    assert json.loads(json.dumps(chart, allow_nan=False))["name"] == "loss"


def test_a_rank_of_thousands_of_digits_is_none() -> None:
    job = detail(attempts=[attempt()])
    client = sign_in(CannedClient(job_answers(job) | curve_answers(curve("loss", 1, 2))))
    found = client.get(f"{PATH}/curves?curve=loss&rank={'9' * 5000}")
    assert found.status_code == 200


def test_the_cost_at_a_time_is_that_of_all_attempts() -> None:
    """Two nodes for an hour at $3, a pause of an hour, then half an hour at $2."""
    hour = timedelta(hours=1)

    def made(number: int, rate: float, begin: float, end: float, nodes: int) -> Any:
        own = attempt(number=number, rate_micros_per_hour=int(rate * 1e6))
        return structs.replace(
            own, launched_at=NOW + begin * hour, ended_at=NOW + end * hour, nodes=[None] * nodes
        )

    clock = make_clock([made(1, 3, 0, 1, 2), made(2, 2, 2, 2.5, 1)], NOW)
    begin = NOW.timestamp() * 1000
    costs = [clock.cost_at(begin + hours * 3_600_000) for hours in (0, 0.5, 1, 1.5, 2, 2.5, 9)]
    assert costs == pytest.approx([0, 3, 6, 6, 6, 7, 7])
    assert clock.time_of(3) == pytest.approx(begin + 1_800_000)
    assert clock.time_of(6.5) == pytest.approx(begin + 2.25 * 3_600_000)


def test_a_figure_that_is_a_curve_is_not_shown_twice() -> None:
    job = detail(attempts=[attempt()])
    series = [
        wire.SeriesView(attempt=1, rank=0, name=name, low=[1.0], mean=[1.0], high=[1.0])
        for name in ("loss", "cpu_percent")
    ]
    figures = wire.JobFigures(start=job.submitted_at, step_s=60, series=series)
    answers = job_answers(job, figures=figures)
    answers |= curve_answers(curve("loss", 2, 1))
    page = sign_in(CannedClient(answers)).get(PATH).text
    assert re.findall(r"<figcaption>([^<]+)</figcaption>", page) == ["loss", "CPU"]


def member(index: int, **fields: Any) -> ArrayMemberView:
    usual: dict[str, Any] = {
        "index": index,
        "id": f"id-{index}",
        "name": f"fits.{index}",
        "phase": "running",
        "reason": "",
        "attempt": 1,
        "exit_code": None,
        "placement": None,
        "since": NOW,
        "ended_at": None,
        "spent_micros": 0,
        "params": {"lr": index},
        "progress": {},
    }
    return ArrayMemberView(**usual | fields)


def test_the_page_of_an_array_has_a_line_for_each_job() -> None:
    members = [member(index) for index in range(9)] + [member(9, attempt=0, phase="queued")]
    row = listing("fits", id="id-fits", phase="running", members={"running": 10})
    found = [structs.replace(curve("loss", 2, index), job=f"fits.{index}") for index in range(1, 9)]
    answers = {
        "/v1/projects/default/arrays/id-fits": ArrayDetail(array=row, parallel=2, jobs=members),
        "/v1/projects/default/curves": JobCurves(curves=found),
        **{
            target: answer
            for each in members
            for target, answer in job_answers(detail(name=each.name, id=each.id)).items()
        },
    }
    client = CannedClient(answers)
    page = sign_in(client).get("/groups/default/id-fits").text
    shown = page[page.index('id="curves-title"') : page.index('id="members-title"')]
    assert shown.count('<path class="curve') == 8
    assert shown.count('<path class="curve rest"') == 2
    assert "2 others" in shown
    assert "fits.1 (lr 1)" in shown
    [asked] = [each for each in client.asked if "/curves" in each]
    assert "job=id-0" in asked
    assert "job=id-9" not in asked, "it has not begun"
    for each in range(3):
        names = CurveNames(names=["loss"] if each else [])
        answers[f"{API}id-{each}/curve-names"] = names
    client = CannedClient(answers)
    update = sign_in(client).get("/groups/default/id-fits", headers={"sec-fetch-dest": "empty"})
    assert 'data-part="cavvy.capabilities.curves:part.html"' in update.text
    assert not any("/v1/projects/default/curves" in each for each in client.asked)


def test_a_plot_in_a_terminal_has_the_bounds_of_both_axes() -> None:
    rows = draw([([0, 1, 2, 3], [3.0, 2.0, 1.0, 0.0])], 40, 4)
    assert len(rows) == 5
    assert all(len(row) <= 40 for row in rows)
    assert rows[0].startswith("3 ┤⠉⠑")
    assert rows[3].startswith("0 ┤")
    assert rows[3].endswith("⣀")
    assert rows[4].split() == ["0", "3"]
    assert draw([([5], [1.0])], 20, 2)[0].startswith("1 ┤")


def test_losses_come_before_results_before_settings() -> None:
    names = ["lr", "val_acc", "tokens", "train_loss", "grad_norm"]
    expected = ["train_loss", "val_acc", "tokens", "grad_norm", "lr"]
    assert sorted(names, key=prominence) == expected


def test_the_marks_of_runs_are_told_if_they_are_asked_for() -> None:
    """Each has the name of its line; those of a job that is gone are left out."""
    first = datetime.fromtimestamp(1_700_000_000, tz=UTC)
    lost = structs.replace(
        attempt(), outcome="preempted", ended_at=first + timedelta(seconds=2), checkpoint_at=None
    )
    saved = structs.replace(attempt(), ended_at=None, checkpoint_at=first + timedelta(seconds=1))
    jobs = {
        "a": detail(name="fit.0", id="a", attempts=[lost]),
        "b": detail(name="fit.1", id="b", attempts=[saved]),
    }
    late = structs.replace(curve("loss", 3, 2, 1), job="fit.1", steps=[0.0, 10.0, 20.0])
    answers: dict[str, Any] = {
        "/v1/projects/default/curves": JobCurves(
            curves=[structs.replace(curve("loss", 3, 2, 1), job="fit.0"), late]
        ),
        f"{API}gone": ApiError("job-not-found", "no such job", status=404),
    }
    for key, job in jobs.items():
        answers[f"{API}{key}"] = job
        answers[f"{API}{key}/events"] = wire.EventPage(events=[], last=0, over=False)
    client = CannedClient(answers)
    path = "/groups/default/fits/curves?curve=loss&job=a&job=b&job=gone"
    browser = sign_in(client)
    assert browser.get(path).json()["marks"] is None
    assert not any("/events" in each for each in client.asked)
    marks = browser.get(f"{path}&marks=true").json()["marks"]
    assert marks == [
        {"x": 2, "text": "attempt 1 preempted", "line": "fit.0"},
        {"x": 10, "text": "checkpoint", "line": "fit.1"},
    ]
    by_time = browser.get(f"{path}&marks=true&by=time").json()["marks"]
    assert [each["x"] for each in by_time] == [2, 1], "each line begins at zero"
    # what is drawn later, such as a score after the first epoch, begins no attempt
    score = structs.replace(
        late, name="score", job="fit.1", times_ms=[t + 600 for t in late.times_ms]
    )
    answers["/v1/projects/default/curves"].curves.append(score)
    with_score = sign_in(CannedClient(answers)).get(f"{path}&curve=score&marks=true&by=time").json()
    assert [each["x"] for each in with_score["marks"]] == [2, 1]
