"""The console's editor: a task is checked, planned and run from a form, as the commands do it."""

import html
import json
import re
from typing import Any
from urllib.parse import urlsplit

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
    replica,
    served,
    sign_in,
)

from cavvy.client import ApiError, wire
from cavvy.client.account_wire import ProjectView
from cavvy.client.transport import HttpAnswer
from cavvy.console.pages.submit import list_keys
from cavvy.domain.jobs import RunOrigin
from cavvy.domain.tasks import SweptParam, TaskSpec

TASK = "name: hello\nrun: echo hi\n"
PLACE = "aws/us-east-1/us-east-1a/p5.48xlarge:8/spot"
CHECK, JOBS = "/v1/projects/default/job-check", "/v1/projects/default/jobs"


def placement(**fields: Any) -> wire.PlacementView:
    usual = {
        "placement": PLACE,
        "accelerator": "H100",
        "accelerators": 8.0,
        "nodes": 2,
        "rate_micros_per_hour": 40_000_000,
        "run_time_s": None,
        "wall_time_s": 7200.0,
        "cost_micros": 80_000_000,
        "preemptions": None,
        "available": True,
        "notes": ["may be preempted"],
    }
    return wire.PlacementView(**usual | fields)


def submitted(**fields: Any) -> wire.Submitted:
    usual = {"id": "id-1", "project": "default", "name": "hello", "phase": "queued"}
    return wire.Submitted(**usual | fields)


class Recording(CannedClient):
    """Keeps the bodies of the requests, by "METHOD /path"."""

    def __init__(self, answers: dict[str, Any], bodies: dict[str, Any] | None = None) -> None:
        super().__init__(answers)
        self.bodies: dict[str, Any] = {} if bodies is None else bodies

    def send(self, method: str, target: str, *arguments: Any, **named: Any) -> HttpAnswer:
        if arguments and arguments[0]:
            self.bodies[f"{method} {urlsplit(target).path}"] = json.loads(arguments[0])
        return super().send(method, target, *arguments, **named)

    def sibling(self) -> "Recording":
        made = Recording(self.answers, self.bodies)
        made.asked = self.asked
        return made


def client(**more: Any) -> Recording:
    usual = {
        "/v1/projects": [],
        "/v1/services": [],
        "/v1/projects/default/recipes": [],
        "/v1/jobs": wire.JobPage(jobs=[], cursor=None),
    }
    return Recording(usual | more)


def form(text: str = TASK, do: str = "plan", **more: str) -> dict[str, str]:
    return {"text": text, "project": "default", "do": do, **more}


def test_the_form_has_an_example_that_is_valid() -> None:
    page = sign_in(client()).get("/submit").text
    text = re.findall(r"<textarea[^>]*>\n(.*?)</textarea>", page, re.DOTALL)[0]
    assert "run:" in text
    assert "notice bad" not in page


def test_a_task_starts_from_an_earlier_job_but_not_from_an_array_or_a_replica() -> None:
    jobs = [
        listing("train", id="new"),
        listing("sweep", id="id-s", members={"done": 3}),
        listing("train", id="old"),
        listing("chat.1", id="id-1"),
        listing("eval", id="id-e"),
    ]
    found = {
        "/v1/jobs": wire.JobPage(jobs=jobs, cursor=None),
        "/v1/services": [served("chat", replica(job="id-1"))],
    }
    page = sign_in(client(**found)).get("/submit").text
    links = re.findall(r'<a href="/submit\?from=([^"]+)" title="[^"]*">([^<]+)</a>', page)
    assert links == [("default/new", "train"), ("default/id-e", "eval")]
    assert 'type="file" id="open-file"' in page


def test_problems_stand_at_their_lines_and_ask_no_server() -> None:
    asking = client()
    page = sign_in(asking).post("/submit", data=form("name: x\nrunn: true\nnodes: none\n")).text
    assert re.findall(r'data-line="(\d+)"', page) == ["2", "3"]
    assert "run" in page
    assert not [each for each in asking.asked if "job" in each]


GRAPH = """\
name: prepare
run: make data
---
name: train
params: {lr: 0.1}
run: train --lr ${{ params.lr }}
after: prepare
"""


def test_problems_of_several_tasks_stand_at_their_lines() -> None:
    asking = client()
    for text, lines in (
        (
            GRAPH.replace("run: make", "runn: make").replace("run: train", "nodes: none"),
            ["2", "4", "6"],
        ),
        (GRAPH.replace("after: prepare", "after: train"), ["7"]),
        (GRAPH.replace("name: train", "name: prepare"), ["7"]),
        (
            GRAPH.replace("make data", "make data\nworkdir: .") + "workdir: src\n",
            ["3", "9"],
        ),
        (GRAPH + "service: {port: 80}\n", ["7"]),
    ):
        page = sign_in(asking).post("/submit", data=form(text, do="run")).text
        assert re.findall(r'data-line="(\d+)"', page) == lines, text
        assert "notice bad" in page
    page = sign_in(asking).post("/submit", data=form(GRAPH, do="run", name="both")).text
    assert "a name is for a file with one task" in page
    assert not [each for each in asking.asked if "job" in each]


def test_several_tasks_are_planned_and_run_together_and_once() -> None:
    asking = client()
    graphs = "/v1/projects/default/job-graphs"
    asking.answers |= {
        "POST /v1/projects/default/job-graph-check": [
            wire.SubmissionCheck(name="prepare", placements=[placement()]),
            wire.SubmissionCheck(name="train", consent_needed="train costs $40.00/h"),
        ],
        f"POST {graphs}": [submitted(), submitted()],
        "/v1/jobs": wire.JobPage(jobs=[], cursor=None),
    }
    browser = sign_in(asking)
    page = browser.post("/submit", data=form(GRAPH)).text
    titles = re.findall(r"<h2[^>]*>(Where [^<]+)</h2>", page)
    assert titles == ["Where prepare would run", "Where train would run"]
    assert re.findall(r"<summary>What (\S+) does", page) == ["prepare", "train"]
    assert 'name="param.lr"' in page
    assert "<p>train costs $40.00/h.</p>" in page
    key = re.findall(r'name="key" value="([^"]+)"', page)[0]
    sent = []
    for _ in range(2):
        data = form(GRAPH, do="agree", key=key, **{"param.lr": "0.5"})
        answer = browser.post("/submit", data=data, follow_redirects=False)
        assert answer.headers["location"] == "/jobs?project=default"
        sent.append(asking.bodies[f"POST {graphs}"])
    first = sent[0]
    assert first["keys"] == sent[1]["keys"]
    assert len({*first["keys"]}) == 2
    assert [each["params"] for each in first["tasks"]] == [{}, {"lr": "0.5"}]
    assert [each["consent"] for each in first["tasks"]] == [True, True]
    assert "make data" not in first["tasks"][1]["text"]
    refused = ApiError("invalid-task", "after: project default has no job x", "list", 422)
    asking.answers[f"POST {graphs}"] = refused
    assert "has no job x" in browser.post("/submit", data=form(GRAPH, do="run")).text


def text_of(page: str) -> str:
    [found] = re.findall(r"<textarea[^>]*>\n(.*?)</textarea>", page, re.DOTALL)
    return html.unescape(found)


def test_fields_change_the_file_and_offers_follow() -> None:
    asking = client()
    asking.answers["POST " + CHECK] = wire.SubmissionCheck(name="hello", placements=[placement()])
    browser = sign_in(asking)
    fields = {"gpu": "A100:80GB", "count": "2", "spot": "auto", "region": "eu", "budget": "25"}
    given = {f"set.{name}": value for name, value in fields.items()}
    page = browser.post("/submit", data=form(TASK + "# mine\n", do="form", **given)).text
    text = text_of(page)
    for line in ("gpu: A100:80GB:2", "spot: auto", "regions: [eu]", "budget: 25", "# mine"):
        assert line in text
    assert asking.bodies[f"POST {CHECK}"]["text"] == text
    assert "p5.48xlarge" in page
    for name, value in fields.items():
        assert re.search(rf'name="set.{name}" value="{value}"|value="{value}" selected', page), name
    again = browser.post("/submit", data=form(text, do="form", **given)).text
    assert text_of(again) == text, "nothing differs"
    fewer = given | {"set.budget": "", "set.count": "1", "set.region": "x\ny: 1"}
    text = text_of(browser.post("/submit", data=form(text, do="form", **fewer)).text)
    assert "limits" not in text
    assert "gpu: A100:80GB\n" in text
    assert "regions: [eu]" in text, "what is no value changes nothing"
    page = browser.post("/submit", data=form("a: [", do="form", **given)).text
    assert text_of(page) == "a: ["
    assert 'id="task-form"' not in page


def offer(**fields: Any) -> wire.OfferView:
    usual = {
        "key": "k",
        "provider": "lambda",
        "region": "us-east",
        "zone": None,
        "instance_type": "gpu_1x_a100",
        "accelerator": "A100",
        "accelerators": 1.0,
        "accelerator_memory_mib": 40960,
        "vcpus": 30.0,
        "memory_mib": 204800,
        "purchase": "on-demand",
        "rate_micros_per_hour": 1_290_000,
        "ready": False,
        "places": 1,
        "as_of": None,
    }
    return wire.OfferView(**usual | fields)


def test_who_has_no_provider_sees_list_prices() -> None:
    asking = client()
    refused = ApiError("no-offer", "nothing has an A100", "set a provider up", 422)
    asking.answers["POST " + CHECK] = refused
    asking.answers["/v1/projects/default/offers"] = wire.OfferPage(offers=[offer()], total=1)
    task = TASK + "resources: {gpu: A100}\nlimits: {duration: 2h}\n"
    page = sign_in(asking).post("/submit", data=form(task)).text
    assert "nothing has an A100" in page
    for text in ("gpu_1x_a100", "$1.29/h", "$2.58", "cavvy setup"):
        assert text in page
    [query] = [each for each in asking.asked if "/offers?" in each]
    assert "gpu=A100" in query


def test_a_page_of_offers_is_short_until_more_are_asked_for() -> None:
    asking = client()
    many = [offer(key=f"k{each}", instance_type=f"type-{each}") for each in range(120)]
    asking.answers["/v1/projects/default/offers"] = wire.OfferPage(offers=many, total=300)
    browser = sign_in(asking)
    text = browser.get("/offers?gpu=A100").text
    assert text.count('<tr id="offer-') == 40
    [more] = re.findall(r'<a href="([^"]+)">Show more rows', text)
    longer = browser.get(html.unescape(more)).text
    assert longer.count('<tr id="offer-') == 100
    assert "Show more rows" not in longer
    assert "200 more match" in longer


def test_a_plan_ranks_what_the_server_can_rent() -> None:
    asking = client()
    asking.answers["POST " + CHECK] = wire.SubmissionCheck(
        name="hello", consent_needed="hello costs $40.00/h", placements=[placement()]
    )
    page = sign_in(asking).post("/submit", data=form(name="mine")).text
    assert "p5.48xlarge" in page
    assert "8 × H100" in page
    assert "$40.00/h" in page
    assert "$80.00" in page
    assert "hello costs $40.00/h" in page
    assert "Agree and run" in page
    assert asking.bodies[f"POST {CHECK}"]["name"] == "mine"
    assert any("placements=" in each for each in asking.asked)
    assert not [each for each in asking.asked if each.startswith(f"POST {JOBS}?")]


def test_running_without_consent_shows_the_price_first() -> None:
    asking = client()
    asking.answers["POST " + JOBS] = ApiError("consent-needed", "hello costs $40.00/h", "", 409)
    asking.answers["POST " + CHECK] = wire.SubmissionCheck(name="hello", placements=[placement()])
    page = sign_in(asking).post("/submit", data=form(do="run")).text
    assert "hello costs $40.00/h" in page
    assert 'value="agree"' in page
    assert asking.bodies[f"POST {JOBS}"]["consent"] is False


def test_after_agreeing_the_job_runs_once_and_is_shown() -> None:
    asking = client()
    asking.answers["POST " + JOBS] = submitted()
    answer = sign_in(asking).post("/submit", data=form(do="agree"), follow_redirects=False)
    assert answer.headers["location"] == "/jobs/default/id-1"
    body = asking.bodies[f"POST {JOBS}"]
    assert body["consent"] is True
    assert body["origin"]["task_text"] == TASK


def test_what_the_server_refuses_is_told_beside_the_text() -> None:
    asking = client()
    refusal = ApiError("no-offer", "no offer has 99 GPUs", "ask for fewer", 422)
    asking.answers["POST " + JOBS] = refusal
    page = sign_in(asking).post("/submit", data=form(do="run")).text
    assert "no offer has 99 GPUs" in page
    assert "ask for fewer" in page
    assert "echo hi" in page, "the text stays"


def test_parameters_have_fields_and_are_sent() -> None:
    asking = client()
    text = "params:\n  lr: 0.1\nrun: train --lr ${{ params.lr }}\n"
    asking.answers["POST " + JOBS] = submitted()
    browser = sign_in(asking)
    page = browser.post("/submit", data=form(text, do="check")).text
    assert 'name="param.lr"' in page
    assert 'placeholder="0.1"' in page
    browser.post(
        "/submit", data=form(text, do="run", **{"param.lr": "0.5"}), follow_redirects=False
    )
    assert asking.bodies[f"POST {JOBS}"]["params"] == {"lr": "0.5"}
    page = browser.post("/submit", data=form(text, do="check", **{"param.no": "1"})).text
    assert "no" in page
    assert "notice bad" in page


def rerun() -> Recording:
    task = TaskSpec(name="train", run="train --lr 0.1", params={"lr": 0.1})
    origin = RunOrigin(
        task_text="params:\n  lr: 0.1\nworkdir: .\nrun: train --lr ${{ params.lr }}\n",
        snapshot="a" * 64,
    )
    job = detail("train", task=Raw(encode(task)), origin=Raw(encode(origin)))
    asking = client(**job_answers(job))
    asking.answers["POST " + JOBS] = submitted()
    return asking


def test_a_job_runs_again_with_changed_parameters_and_its_folder() -> None:
    asking = rerun()
    browser = sign_in(asking)
    page = browser.get("/submit?from=default/train").text
    assert 'name="param.lr" value="0.1"' in page
    text = html.unescape(re.findall(r"<textarea[^>]*>\n(.*?)</textarea>", page, re.DOTALL)[0])
    data = form(text, do="run", name="train", **{"from": "default/id-train", "param.lr": "0.2"})
    answer = browser.post("/submit", data=data, follow_redirects=False)
    assert answer.headers["location"] == "/jobs/default/id-1"
    body = asking.bodies[f"POST {JOBS}"]
    assert body["params"] == {"lr": "0.2"}
    assert body["origin"]["snapshot"] == "a" * 64
    assert body["origin"]["rerun_of"] == "id-train"


def test_the_best_run_of_a_sweep_runs_again_alone() -> None:
    task = TaskSpec(
        name="train",
        run="train 0.1",
        params={"lr": 0.1},
        sweep=(SweptParam(name="lr", values=(0.3, 0.1), texts=("0.3", "0.1")),),
    )
    text = "name: train\nsweep: {lr: [0.3, 0.1]}\nrun: train ${{ params.lr }}\n"
    job = detail("train.1", task=Raw(encode(task)), origin=Raw(encode(RunOrigin(task_text=text))))
    asking = client(**job_answers(job))
    asking.answers["POST " + JOBS] = submitted(members=1)
    browser = sign_in(asking)
    assert "only lr 0.1, whatever the file says" in browser.get("/submit?from=default/train.1").text
    data = form(text, do="run", name="train", **{"from": f"default/{job.id}"})
    answer = browser.post("/submit", data=data, follow_redirects=False)
    assert answer.headers["location"] == "/groups/default/id-1"
    overrides = asking.bodies[f"POST {JOBS}"]["origin"]["overrides"]
    assert json.loads(overrides) == {"sweep": {"lr": [0.1]}}


def test_a_folder_of_the_users_machine_cannot_be_sent() -> None:
    asking = client()
    page = sign_in(asking).post("/submit", data=form("workdir: .\nrun: ls\n", do="run")).text
    assert "cannot send a folder" in page
    assert 'data-line="1"' in page
    assert not [each for each in asking.asked if each.startswith("POST")]


def test_a_service_starts_from_the_same_form() -> None:
    asking = client()
    path = "/v1/projects/default/services/web"
    asking.answers[f"PUT {path}"] = served("web")
    text = "name: web\nrun: python -m http.server 8000\nservice: {port: 8000}\n"
    answer = sign_in(asking).post("/submit", data=form(text, do="run"), follow_redirects=False)
    assert answer.headers["location"] == "/services/default/web"
    assert asking.bodies[f"PUT {path}"]["text"] == text


@pytest.mark.parametrize("text", [*HOSTILE_TEXTS, "a: &a [*a, *a]\n", "\x00", "run: [[[[[", "--- !!python/object:os.system x"])  # fmt: skip
def test_odd_texts_are_shown_as_they_are(text: str) -> None:
    answer = sign_in(client()).post("/submit", data=form(text, do="check"))
    assert answer.status_code == 200
    assert "<script>alert" not in answer.text
    assert "<img src=x" not in answer.text


def test_a_huge_text_is_refused() -> None:
    browser = sign_in(client())
    assert browser.post("/submit", data=form("x" * 300_000)).status_code == 413
    assert browser.post("/submit", data=form("x" * 2_000_000)).status_code == 413
    many = "&".join(f"a{number}=1" for number in range(3000))
    answer = browser.post(
        "/submit", content=many, headers={"content-type": "application/x-www-form-urlencoded"}
    )
    assert answer.status_code == 413


def test_other_sites_submit_nothing() -> None:
    asking = client()
    browser = sign_in(asking)
    for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
        answer = browser.post("/submit", data=form(do="agree"), headers=headers)
        assert answer.status_code == 403
    assert not [each for each in asking.asked if each.startswith("POST")]


def test_links_of_other_pages_write_no_keys() -> None:
    page = sign_in(client()).get("/submit?gpu=H100:8&providers=aws%0Arun:%20evil").text
    assert "gpu: H100:8" in page
    assert "evil" not in page


def test_the_editor_knows_all_keys() -> None:
    keys = list_keys()
    assert {"run", "resources", "limits", "params"} <= {name for name, _, _ in keys[""]}
    assert "gpu" in {name for name, _, _ in keys["resources"]}
    assert next(values for name, _, values in keys["resources"] if name == "spot")
    answer = sign_in(client()).get("/submit/keys")
    assert answer.json()["resources"]
    assert len(answer.content) < 100_000


def test_an_old_key_is_replaced() -> None:
    asking = client()
    asking.answers["POST " + JOBS] = submitted()
    browser = sign_in(asking)
    page = browser.get("/submit").text
    key = re.findall(r'name="key" value="([^"]+)"', page)[0]
    page = browser.post("/submit", data=form(do="check", key=key)).text
    assert f'name="key" value="{key}"' in page
    page = browser.post("/submit", data=form(do="check", key="0" * len(key))).text
    assert f'name="key" value="{"0" * len(key)}"' not in page


def test_a_task_is_shared_as_a_recipe() -> None:
    path = "/v1/projects/default/recipes"
    recipe = wire.RecipeView(name="small", text="run: small\n", account="bob", updated_at=NOW)
    asking = client(**{path: [recipe], f"{path}/mine": HttpAnswer(204, {}, b"")})
    browser = sign_in(asking)
    assert "recipe=small" in browser.get("/submit").text
    assert "run: small" in browser.get("/submit?recipe=small").text
    assert browser.get("/submit?recipe=other").status_code == 404
    data = form(do="share", recipe="mine")
    answer = browser.post("/submit", data=data, follow_redirects=False)
    assert answer.headers["location"] == "/submit?project=default&recipe=mine"
    assert asking.bodies[f"PUT {path}/mine"] == {"text": TASK}
    answer = browser.post("/submit", data=form(do="forget", recipe="mine"), follow_redirects=False)
    assert f"DELETE {path}/mine" in asking.asked
    assert browser.post("/submit", data=form(do="share")).status_code == 400


@pytest.mark.parametrize(
    ("names", "usual"),
    [(["pm"], "pm"), (["b", "a"], "b"), (["pm", "default"], "default"), ([], "default")],
)
def test_the_project_is_one_of_the_users(names: list[str], usual: str) -> None:
    projects = [ProjectView(name=each, parent=None, roles=["member"]) for each in names]
    projects[:0] = [ProjectView(name="0ld", parent=None, roles=["member"], archived_at=NOW)]
    usual = "0ld" if not names else usual
    asking = client(**{"/v1/projects": projects, f"/v1/projects/{usual}/recipes": []})
    page = sign_in(asking).get("/submit").text
    assert f"<option selected>{usual}</option>" in page
    assert f"GET /v1/projects/{usual}/recipes" in {each.partition("?")[0] for each in asking.asked}
