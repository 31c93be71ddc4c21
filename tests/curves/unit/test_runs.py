"""The page that compares runs, and which parameters mattered."""

import html
import json
import re
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from msgspec import Raw, structs
from msgspec.json import encode
from tests.console_rig import CannedClient, detail, listing, sign_in
from tests.curves.unit.test_curve_part import curve

from cavvy.capabilities.curves.importance import explain, group_values, rank_params
from cavvy.capabilities.curves.runs import picture_of
from cavvy.capabilities.curves.wire import JobCurves, ParamsOfJobs, RunParams
from cavvy.client.wire import JobMatches

LRS = ["0.0001", "0.001", "0.01", "0.1"]


def make_runs(noise: float, seed: int = 1) -> list[tuple[Mapping[str, str], float]]:
    """Return 32 runs whose result is best at a learning rate in the middle, and of whose other
    parameters `seed` does nothing."""
    random = Random(seed)
    return [
        (
            {"lr": lr, "seed": str(each), "same": "1"},
            abs(LRS.index(lr) - 1.5) + random.gauss(0, noise),
        )
        for lr in LRS
        for each in range(8)
    ]


def test_a_parameter_that_decides_all_explains_all() -> None:
    assert explain([0, 0, 1, 1], [1, 1, 5, 5]) == 1
    assert explain([0, 0, 1, 1], [1, 5, 1, 5]) == 0
    assert explain([0, 0], [1, 2]) == 0
    # between 8, within 2 with 2 degrees of freedom: (8 - 1) / 10
    assert explain([0, 0, 1, 1], [0, 2**0.5, 8**0.5, 8**0.5 + 2**0.5]) == pytest.approx(0.7)


def test_the_best_in_the_middle_counts_and_chance_does_not() -> None:
    first, *rest = rank_params(make_runs(0.05), Random(1))
    assert first.name == "lr"
    assert first.low > 0.9
    assert [each.name for each in rest] == ["seed"], "what is always the same is left out"
    assert rest[0].share < 0.1


def test_noise_makes_the_interval_wide() -> None:
    quiet, loud = (rank_params(make_runs(each), Random(1))[0] for each in (0.05, 1.0))
    assert loud.share < quiet.share
    assert loud.high - loud.low > quiet.high - quiet.low
    assert rank_params(make_runs(0.05)[:4], Random(1)) == [], "too few runs"


def test_numbers_that_are_all_different_are_cut_into_groups() -> None:
    assert group_values([str(each) for each in range(9)]) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert group_values(["a", "b", "a", "c"]) == [0, 1, 0, 2]


def test_the_picture_has_an_axis_for_each_setting_and_the_result() -> None:
    runs = [({"lr": "0.0001", "opt": "adam"}, 3.0), ({"lr": "0.1", "opt": "sgd"}, 1.0)]
    axes, lines = picture_of(runs, "loss", is_high=False)
    assert [(each.x, each.name, each.bottom, each.top) for each in axes] == [
        (0, "lr", "0.0001", "0.1"),
        (50, "opt", "adam", "sgd"),
        (100, "loss", "1", "3"),
    ]
    assert lines == [("M0 220L500 220L1000 0", False), ("M0 0L500 0L1000 220", True)]


def page(query: str, count: int = 6, **more: Any) -> str:
    jobs = [
        listing(f"fit.{each}", id=f"id-{each}", attempt=1, phase="done") for each in range(count)
    ]
    jobs.append(listing("waits", id="id-waits", attempt=0, phase="queued"))
    curves = [
        structs.replace(curve(name, 9, value), job=f"fit.{each}")
        for each in range(count)
        for name, value in (("loss", 5.0 - each), ("acc", each / 10))
    ]
    params = [
        RunParams(id=f"id-{each}", params={"lr": str(each), "batch": "32"}) for each in range(count)
    ]
    answers = {
        "/v1/projects": [],
        "/v1/job-search": JobMatches(jobs=jobs, total=len(jobs)),
        "/v1/projects/default/curves": JobCurves(curves=curves),
        "/v1/projects/default/curve-params": ParamsOfJobs(jobs=params),
        **{
            f"/v1/projects/default/jobs/id-{each}": detail(
                name=f"fit.{each}", id=f"id-{each}", attempt=1
            )
            for each in range(count)
        },
        **more,
    }
    return sign_in(CannedClient(answers)).get(f"/runs?project=default&{query}").text


def words(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def test_code_and_environment_are_compared_if_asked_for() -> None:
    assert "Show what differs" in page("job=id-1&job=id-2")
    tasks = [
        {"run": "python train.py", "env": {"SEED": str(each)}, "params": {"lr": each}}
        for each in range(2)
    ]
    jobs = {
        f"/v1/projects/default/jobs/id-{each}": detail(
            name=f"fit.{each}", id=f"id-{each}", attempt=1, task=Raw(encode(task))
        )
        for each, task in enumerate(tasks)
    }
    text = page("details=1", count=2, **jobs)
    part = text[text.index('id="details"') :]
    part = part[: part.index("</section>")]
    assert re.findall(r"<code>([^<]+)</code>", part) == ["task.env.SEED"]
    assert re.findall(r'<td class="reason">([^<]+)</td>', part) == ["1", "0"], "the best first"
    assert "Nothing else differs" in page("details=1", count=3)


def test_runs_are_sorted_by_their_best_value() -> None:
    text = page("")
    rows = re.findall(r'<tr data-key="(id-\d)">', text)
    assert rows == ["id-5", "id-4", "id-3", "id-2", "id-1", "id-0"]
    assert "The best of 6 runs is fit.5 : loss 0, lr 5; it cost $" in words(text)
    assert "cavvy rerun fit.5" in text
    assert '<td data-name="batch">' not in text, "it is the same for all"
    rows = re.findall(r'<tr data-key="(id-\d)">', page("metric=loss&best=high"))
    assert len(rows) == 6
    assert "job=id-0" in html.unescape(text), "the script asks for the curves of all"
    runs = json.loads(html.unescape(re.findall(r'data-runs="([^"]*)"', text)[0]))
    assert runs["fit.0"]["path"] == "/jobs/default/id-0"


def test_one_run_with_a_number_that_cannot_be_squared_breaks_no_page() -> None:
    curves = [
        structs.replace(curve("loss", 9, value), job=f"fit.{each}")
        for each, value in enumerate((5.0, 1e200, -1.7e308, 3.0, 2.0, 1.0))
    ]
    text = page("metric=loss", **{"/v1/projects/default/curves": JobCurves(curves=curves)})
    assert len(re.findall(r'<tr data-key="(id-\d)">', text)) == 6
    assert explain([0, 0, 1, 1], [1e200, 1e200, 5e200, 5e200]) == 1
    _, lines = picture_of(
        [({"lr": "-1.7e308"}, 1.0), ({"lr": "1.7e308"}, 2.0)], "loss", is_high=False
    )
    assert not any("nan" in line for line, _ in lines)


def test_runs_that_the_address_names_are_compared() -> None:
    text = page("job=id-1&job=id-2")
    assert "The best of 2 runs" in words(text)
    assert text.count('<input type="hidden" name="job"') == 2


def test_a_page_without_runs_says_so() -> None:
    empty = {"/v1/job-search": JobMatches(jobs=[], total=0)}
    assert "No job that has begun matches" in page("text=nothing", **empty)
