"""Tasks described in Python: their typed keys, their text, and the errors for wrong values."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from tests.own_parts import reads_other_tools

import cavvy
from cavvy import InvalidArgument, InvalidTask, Resources, Task
from cavvy.sdk.task import make_batch
from cavvy.sdk.values import to_plain, write_text
from cavvy.spec import keys
from cavvy.spec.fields.kinds import FieldSpec
from cavvy.spec.fields.task import TASK, TaskKeys
from cavvy.spec.overrides import sections

# The typed table of each section of a task file.
TABLES: dict[str, Any] = {
    "": TaskKeys,
    "params.NAME": keys.Param,
    "resources": keys.Resources,
    "resources.gpu": keys.Accelerator,
    "resources.disk": keys.Disk,
    "resources.network": keys.Network,
    "resources.check": keys.NodeTest,
    "resources.any_of": keys.ResourceChoice,
    "resources.ordered": keys.ResourceChoice,
    "image": keys.Image,
    "workdir": keys.GitWorkdir,
    "setup": keys.Setup,
    "inputs": keys.Input,
    "outputs": keys.Output,
    "volumes": keys.VolumeMount,
    "checkpoint": keys.Checkpoint,
    "group": keys.Group,
    "batch": keys.RowBatch,
    "stop_early": keys.StopEarly,
    "search": keys.Search,
    "limits": keys.Limits,
    "limits.idle": keys.IdleGpus,
    "retry": keys.Retry,
    "topology": keys.Topology,
    "schedule": keys.Schedule,
    "work": keys.Work,
    "edge": keys.EdgeWork,
    "webhooks": keys.Webhook,
    "service": keys.Service,
    "service.replicas": keys.ServiceReplicas,
    "service.replicas.target": keys.ServiceTarget,
    "service.groups": keys.ServiceGroup,
    "service.model": keys.ServiceModel,
    "service.probe": keys.ServiceProbe,
    "service.timeouts": keys.ServiceTimeoutKeys,
    "service.rate": keys.ServiceRate,
    "service.limits": keys.ServiceLimits,
    "service.batch": keys.ServiceBatch,
    "service.routing": keys.ServiceRouting,
    "service.edge": keys.ServiceEdge,
    "service.fallback": keys.ServiceFallback,
    "service.fallback.openai": keys.ServiceFallbackApi,
    "service.fallback.openai.price": keys.ServiceFallbackPrice,
    "service.slo": keys.ServiceSlo,
    "service.slo.ttft": keys.ServiceGoal,
    "service.slo.token_gap": keys.ServiceGoal,
    "service.update": keys.ServiceUpdateKeys,
    "service.queue": keys.ServiceQueueKeys,
    "service.events": keys.ServiceEvent,
}


def test_the_typed_tables_have_the_keys_of_the_task_file() -> None:
    found = {
        section.path: {each.name: each for each in section.fields if not each.refused}
        for section in sections(TASK)
    }
    assert found.keys() == TABLES.keys()
    assert found[""].pop("run").required  # the first argument of `Task`
    for path, fields in found.items():
        table = TABLES[path]
        assert fields.keys() == table.__annotations__.keys(), path
        required = {name for name, each in fields.items() if each.required}
        assert required == table.__required_keys__, path


def test_the_typed_tables_have_the_words_of_the_task_file() -> None:
    compared = 0
    for section in sections(TASK):
        hints = get_type_hints(TABLES[section.path], localns=vars(keys))
        for each in section.fields:
            if each.name in hints and (words := list_words(hints[each.name])):
                assert words == list_enums(each), f"{section.path}.{each.name}"
                compared += 1
    assert compared >= 6


def list_words(hint: object) -> set[str]:
    """Every literal string in a type."""
    if get_origin(hint) is Literal:
        return set(get_args(hint))
    return {word for each in get_args(hint) for word in list_words(each)}


def list_enums(field: FieldSpec) -> set[str]:
    """Every word in an `enum` of the field's JSON Schema, without those of inner tables."""

    def walk(schema: Any) -> set[str]:
        if isinstance(schema, list):
            return {word for each in schema for word in walk(each)}
        if not isinstance(schema, dict) or "properties" in schema:
            return set()
        return {
            *schema.get("enum", ()),
            *(word for key, each in schema.items() if key != "enum" for word in walk(each)),
        }

    return walk(json.loads(json.dumps(field.kind.schema)))


def test_a_task_in_python_is_the_task_of_its_text() -> None:
    task = Task(
        "python train.py --lr ${{ params.lr }}\necho done",
        name="train",
        params={"lr": 1e-05, "note": {"default": "1e-3", "type": "str"}},
        resources=Resources(gpu=["H100:8", "A100:80GB:8"], max_price=Decimal("20.50"), spot="auto"),
        nodes=2,
        checkpoint={"path": "kept", "every": timedelta(minutes=10)},
        limits={"deadline": datetime(2035, 1, 1, tzinfo=UTC), "duration": timedelta(hours=1.5)},
        env={"WORD": "yes", "NUMBER": 3, "EMPTY": "", "ZERO": "007"},
        outputs=[{"source": "out", "target": Path("/data/out")}],
    )
    own = task._load().task
    assert own.run == "python train.py --lr 1e-05\necho done"
    assert own.params == {"lr": 1e-05, "note": "1e-3"}
    assert own.limits.duration == timedelta(minutes=90)
    assert own.limits.deadline == datetime(2035, 1, 1, tzinfo=UTC)
    assert own.checkpoint is not None
    assert own.checkpoint.every == timedelta(minutes=10)
    assert own.env == {"WORD": "yes", "NUMBER": "3", "EMPTY": "", "ZERO": "007"}
    assert own.outputs[0].target == "/data/out"
    assert [need.name for need in own.resources.accelerators] == ["H100", "A100"]
    assert "run: |-\n  python train.py" in task.text


def test_none_leaves_a_key_out() -> None:
    assert Task("true", name=None, resources={"gpu": None}).text == 'resources: {}\nrun: "true"\n'


def test_a_mistake_is_shown_in_the_text_of_the_task() -> None:
    with pytest.raises(InvalidTask, match=r"Task:2:3: unknown key 'spott'") as caught:
        Task("true", resources={"spott": "auto"})
    assert "did you mean `spot`?" in str(caught.value)
    assert [(each.file, each.line) for each in caught.value.problems] == [("Task", 2)]
    with pytest.raises(ValueError, match="nodez"):
        Task("true", nodez=2)


def test_every_mistake_is_reported_at_once() -> None:
    with pytest.raises(InvalidTask) as caught:
        Task("true", nodes=0, priority=1000)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1, 2}, r"env\.X is a value of the type set; expected a string"),
        (b"x", r"env\.X is a value of the type bytes"),
        (datetime(2035, 1, 1), r"env\.X: 2035-01-01 00:00:00 has no time zone"),
    ],
)
def test_a_value_that_no_file_can_contain_is_refused(value: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Task("true", env={"X": value})


class Spot(StrEnum):
    """An enum of the caller."""

    AUTO = "auto"


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (timedelta(days=100), "8640000s"),
        (timedelta(milliseconds=1500), "1.5s"),
        (Path("a/b"), "a/b"),
        (Spot.AUTO, "auto"),
        (Fraction(1, 4), 0.25),
        ((1, "a"), [1, "a"]),
        (True, True),
    ],
)
def test_values_of_python_become_values_of_a_file(value: object, plain: object) -> None:
    found = to_plain(value, "key")
    assert found == plain
    assert type(found) is type(plain)


def test_strings_that_look_like_other_values_stay_strings() -> None:
    from cavvy.spec.problems import ProblemNotes
    from cavvy.spec.tree import compose_all, to_value

    words = [
        "1e-3",
        "0x1f",
        "null",
        "~",
        "yes",
        "true",
        "12",
        ".5",
        "",
        "2035-01-01",
        "a: b",
        "\té",
    ]
    table = {"words": words, "lines": "a\n  b\n", "numbers": [1, 0.1, 1e-07, True]}
    notes = ProblemNotes("x", write_text(table))
    (root,) = compose_all(notes.text, notes)
    notes.check()
    assert to_value(root) == table


def test_replace_changes_only_the_given_keys() -> None:
    task = Task("true", resources={"cpu": 2, "memory": "4GB"}, env={"A": "1"})
    other = task.replace(resources={"cpu": 4}, nodes=2).replace(resources={"spot": "only"})
    needs = other._load().task.resources
    assert (needs.cpus_min, needs.memory_min_mib, needs.spot) == (4, 4096, "only")
    assert (task._load().task.nodes, other._load().task.nodes) == (1, 2)
    with pytest.raises(TypeError, match=r"Client\.submit"):
        task.replace(params={"x": 1})
    with pytest.raises(InvalidTask, match=r"Task\.replace"):
        task.replace(nodes=0)


def test_a_task_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "train.yaml"
    file.write_text("params: {lr: {type: float}}\nworkdir: .\nrun: echo ${{ params.lr }}\n")
    with pytest.raises(InvalidTask, match="lr"):
        Task.from_file(file)
    monkeypatch.chdir(tmp_path)
    task = Task.from_file("train.yaml", params={"lr": 0.1})
    monkeypatch.chdir("/")
    loaded = task._load({"lr": 0.2})
    assert (task.name, loaded.task.run, loaded.folder) == ("train", "echo 0.2", tmp_path)
    with pytest.raises(InvalidTask, match="the file does not exist"):
        Task.from_file("missing.yaml")


@reads_other_tools
def test_a_file_of_skypilot_is_a_task(tmp_path: Path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text("num_nodes: 2\nrun: echo hi\n")
    assert Task.from_file(file)._load().task.nodes == 2


def test_the_module_exports_what_it_lists() -> None:
    for name in cavvy.__all__:
        assert getattr(cavvy, name) is not None
    assert set(cavvy.__all__) <= set(dir(cavvy))
    with pytest.raises(AttributeError, match="nothing"):
        cavvy.nothing  # noqa: B018


def test_importing_cavvy_loads_nothing_else() -> None:
    code = "import sys; before = set(sys.modules); import cavvy; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["cavvy"]


def test_rows_are_mapped_by_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rows_code.py").write_text("def run(rows): return rows\nself = lambda rows: rows\n")
    module = import_module("rows_code")
    task = make_batch(module.run, "rows.jsonl", "out", 7, {"parallel": 3, "name": "many"})
    found = task._load().task
    assert found.run.endswith(f"--output {tmp_path}/out --rows 7 --function rows_code:run")
    assert (found.name, len(found.array[0].indices)) == ("many", 3)
    command = make_batch("wc -l", "s3://b/rows.jsonl", "/out", None, {})._load().task
    assert command.run.endswith("--rows 1000 --command 'wc -l'")
    for wrong in (module.self, len, json.dumps):
        with pytest.raises(InvalidArgument, match="run: "):
            make_batch(wrong, "rows.jsonl", "out", None, {})
    with pytest.raises(TypeError, match="output is missing"):
        make_batch("wc -l", "rows.jsonl", None, None, {})
    with pytest.raises(InvalidTask, match=r"batch\.rows|too small"):
        make_batch("wc -l", "rows.jsonl", "/out", 0, {})
