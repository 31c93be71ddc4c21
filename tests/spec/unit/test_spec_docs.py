"""The schema and the reference page say what the parser does, and what lies in docs/
is up to date.
"""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema_rs
import pytest
from scripts.docs.task_file import pages

from cavvy.cli.init import StarterAnswers, make_starter
from cavvy.domain.tasks import Objection
from cavvy.spec import SpecError
from cavvy.spec.describe import describe_task
from cavvy.spec.fields.task import make_schema
from cavvy.spec.support import NOT_YET, refusals
from cavvy.task_files import load_task, parse_task

ROOT = Path(__file__).resolve().parents[3]
TASK_FILES = sorted((ROOT / "examples").glob("**/task*.yaml"))


@pytest.mark.parametrize("file", pages(), ids=lambda file: file.name)
def test_generated_pages_are_up_to_date(file: Path) -> None:
    assert file.read_text() == pages()[file], "run: python scripts/docs/task_file.py"


def test_the_schema_is_one() -> None:
    jsonschema_rs.meta.validate(make_schema())


@pytest.mark.parametrize(
    "document",
    [
        {"run": "x"},
        {"run": "x", "nodes": "${{ params.n }}", "resources": {"spot": "${{ params.s }}"}},
        {
            "run": "x",
            "resources": {
                "gpu": ["H100:8", {"name": "A100", "count": "1..4"}],
                "memory": 64,
                "disk": 100,
            },
        },
        {"run": "x", "resources": {"disk": {"size": "1TB", "type": "gp3"}, "network": "100Gbps"}},
        {"run": "x", "params": {"a": 1, "b": {"type": "float", "default": 2, "choices": [2, 3]}}},
        {
            "run": "x",
            "limits": {"deadline": "8h", "budget": 3.5},
            "retry": {"preemption": "unlimited", "exit": 3},
        },
        {
            "run": "x",
            "webhooks": ["https://x.org", {"url": "https://y.org", "on": "failure"}],
            "checkpoint": "c",
        },
        {
            "run": "x",
            "env": {"A": 1, "B": True},
            "secrets": "T",
            "work": {"samples": 10, "rates": {"cpu": 3}},
        },
        {"run": "x", "workdir": {"git": "https://x.org/a", "commit": "abcdef1"}},
        {"batch": {"input": "a.jsonl", "output": "/b", "function": "m:f", "rows": 10}},
        {"edge": {"deploy": "m@prod", "labels": {"kind": "pi"}, "waves": [0.1, 1], "soak": "1h"}},
    ],
)
def test_what_the_parser_accepts_the_schema_accepts(document: dict[str, object]) -> None:
    parameters = {"n": 2, "s": "auto", **{}}
    if "params" not in document:
        document = {**document, "params": parameters}
    parse_task(json.dumps(document))
    jsonschema_rs.validate(make_schema(), document)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"run": "x", "resorces": {}},
        {"run": "x", "resources": {"spot": "sometimes"}},
        {"run": "x", "nodes": 0},
        {"run": "x", "env": {"2A": "x"}},
        {"run": "x", "env": {"A": [1]}},
        {"run": "x", "retry": {"exit": -1}},
        {"run": "x", "inputs": "data"},
        {"run": "x", "work": {"flops": 0}},
        {"run": "x", "checkpoint": {"every": "3s"}},
        {"run": ["x"]},
    ],
)
def test_what_the_schema_refuses_the_parser_refuses(document: dict[str, object]) -> None:
    with pytest.raises(jsonschema_rs.ValidationError):
        jsonschema_rs.validate(make_schema(), document)
    with pytest.raises(SpecError):
        parse_task(json.dumps(document))


@pytest.mark.parametrize("file", TASK_FILES, ids=lambda file: file.parent.name)
def test_our_examples_are_valid(file: Path) -> None:
    assert load_task(file).task.run


def test_the_page_shows_a_valid_file() -> None:
    page = next(text for file, text in pages().items() if file.suffix == ".md")
    example = page.split("```yaml\n")[2].split("```")[0]
    assert parse_task(example).resources.accelerators[1].count_min == 8
    for key in NOT_YET:
        assert f"`{key}`: " in page


def test_importing_the_room_is_light() -> None:
    heavy = ("yaml", "pydantic", "subprocess")
    code = (
        f"import sys; import cavvy.spec; print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_refusals_name_the_field_and_the_reason() -> None:
    task = parse_task(
        "run: x\nnodes: 2\nimage: a\nresources: {spot: only, network: 1Gbps, disk: {size: 3, type: "
        "gp3}}"
    )
    unsupported = {
        name: f"no {name}" for name in ("spot", "gang", "image", "network", "disk", "volumes")
    }
    assert [str(each) for each in refusals(task, unsupported)] == [
        "resources.spot: no spot",
        "nodes: no gang",
        "image: no image",
        "resources.network: no network",
        "resources.disk.type: no disk",
    ]
    assert refusals(task, {"image": "no engine here"}) == [Objection("image", "no engine here")]
    assert refusals(parse_task("run: x\nresources: {spot: auto, disk: 5}"), unsupported) == []


def test_a_task_in_plain_words() -> None:
    rows = dict(
        describe_task(
            parse_task(
                make_starter(StarterAnswers(gpu="A100:40GB..80GB:1..4", budget="25", name="a"))
            )
        )
    )
    assert rows["on"] == "1 node with 1 to 4 A100 of 40 GiB to 80 GiB"
    assert rows["stops"] == "before it costs more than $25.00"
    assert rows["runs"] == "echo hello from $(hostname)"
    full = parse_task(
        "run: |\n  a\n  b\nnodes: 2\nresources: {instance: p5.48xlarge, cpu: 8..32, memory: "
        "..64GB, spot: only, "
        "providers: [a, b], regions: eu, max_price: 3}\nlimits: {deadline: 8h, idle: 10m}\n"
        "retry: {preemption: 1, node: 0}"
    )
    rows = dict(describe_task(full))
    assert (
        rows["on"]
        == "2 nodes, each of type p5.48xlarge with 8 to 32 CPUs and at most 64 GiB of memory"
    )
    assert rows["where"] == "at a or b in eu, on spot capacity only, at most $3.00/h for each node"
    assert rows["stops"] == "8h after its submission or after being idle for 10m"
    assert rows["tries again"] == "after being preempted once"
    assert rows["runs"] == "a (and 1 more line)"


@pytest.mark.parametrize(
    ("cpu", "said"),
    [
        ("1", "at least 1 CPU"),
        ("..1", "at most 1 CPU"),
        ("1..4", "1 to 4 CPUs"),
        ("2", "at least 2 CPUs"),
    ],
)
def test_one_cpu_is_no_cpus(cpu: str, said: str) -> None:
    rows = dict(describe_task(parse_task(f"run: x\nresources: {{cpu: {cpu}}}")))
    assert rows["on"] == f"1 node with {said}"


@pytest.mark.parametrize(
    ("window", "starts"),
    [
        ("off-peak Europe/Berlin", "when it is cheapest in off-peak Europe/Berlin"),
        ("Mon-Fri 20:00-08:00", "when it is cheapest in Mon-Fri 20:00-08:00 (UTC)"),
    ],
)
def test_a_window_names_its_time_zone_once(window: str, starts: str) -> None:
    assert dict(describe_task(parse_task(f"run: x\nwindow: {window}")))["starts"] == starts
