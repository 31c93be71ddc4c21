"""Files with several tasks: what is read, what is submitted for each task, and what is refused."""

from pathlib import Path

import pytest

from cavvy.domain.tasks import JobDependency, StartCondition
from cavvy.importers import ReadOptions, load_file, load_task, load_tasks
from cavvy.spec import SpecError

GRAPH = """\
# three steps
name: prepare
params: {size: 3}
run: echo ${{ params.size }} é
---
name: train
after: prepare
nodes: 2
run: python train.py
---
# only if the training fails
name: alarm
after: [train:failure, old]
params: {to: ops, size: 1}
run: echo ${{ params.to }}
---
"""
PIPELINE = """\
name: flow
---
name: Prepare
run: echo $A
envs: {A: 1}
---
resources: {accelerators: "A100:1"}
run: echo two
---
run: echo three
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "flow.yaml"
    file.write_text(text)
    return file


def test_each_document_is_a_task_of_its_own(tmp_path: Path) -> None:
    file = write(tmp_path, GRAPH)
    (tmp_path / "train.py").write_text("")
    loaded = load_tasks(file, {"size": "7", "to": "me"})
    assert [each.task.name for each in loaded] == ["prepare", "train", "alarm"]
    assert [each.task.run for each in loaded] == ["echo 7 é", "python train.py", "echo me"]
    assert loaded[2].task.params == {"to": "me", "size": 7}
    assert loaded[2].task.after == (
        JobDependency("train", StartCondition.FAILURE),
        JobDependency("old"),
    )
    assert loaded[0].text.startswith("# three steps\nname: prepare")
    assert loaded[1].text.startswith("name: train")
    assert "".join(each.text for each in loaded) == GRAPH.replace("---\n", "")
    assert loaded[1].task.workdir is not None  # as for a file with one task
    for each in loaded:
        options = ReadOptions(overrides=each.overrides, dialect=each.source.kind, text=each.text)
        own = {name: str(value) for name, value in each.task.params.items()}
        assert load_task(file, own, options=options).task == each.task
    assert [task.name for task in load_file(file).tasks] == ["prepare", "train", "alarm"]


@pytest.mark.parametrize("text", ["name: a\nrun: x\n", "--- \nname: a\nrun: x\n"])
def test_a_file_with_one_task_stays_as_it_is(tmp_path: Path, text: str) -> None:
    [loaded] = load_tasks(write(tmp_path, text))
    assert (loaded.text, loaded.task.name) == (text, "a")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "{name: a, run: x, after: b}\n---\n{name: b, run: x, after: c}\n---\n{name: c, run: x, after: a}",
            "a waits for b, which waits for c, which waits for a",
        ),
        ("{name: a, run: x, after: c}\n---\n{name: a, run: x}", "two tasks have the name a"),
        ("{run: x, after: c}\n---\n{run: x}", "two tasks have the name flow"),
        ("{name: a, run: x, after: a}\n---\n{name: b, run: x}", "cannot wait for itself"),
        (
            "{name: a, run: x, after: c}\n---\n{name: b, run: x, project: q}",
            "the tasks belong to different projects",
        ),
        ("{name: a, run: x, after: c}\n---\n{name: b, rum: x}", "flow.yaml:3:11: unknown key"),
        ("{name: a, rum: x, after: c}\n---\n{name: b, rum: x}", "flow.yaml:1:11: unknown key"),
        (
            "{name: a, run: x, after: c}\n---\n{name: b, run: x, service: {port: 80}}",
            "the file describes a service",
        ),
        ("\n---\n".join(f"{{name: a{n}, run: x, after: c}}" for n in range(101)), "at most 100"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_tasks(write(tmp_path, text))
    assert told in str(caught.value)


def test_options_for_one_task_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, GRAPH)
    options = ReadOptions(overrides='{"run": "x", "nodes": 3}')
    with pytest.raises(SpecError, match="the file has 3 tasks, and this option is about one"):
        load_tasks(file, options=options)
    changed = load_tasks(file, options=ReadOptions(overrides='{"nodes": 3}'))
    assert [each.task.nodes for each in changed] == [3, 3, 3]
    with pytest.raises(SpecError, match="sise"):
        load_tasks(file, {"sise": "3"})
    with pytest.raises(SpecError, match="the file has 3 tasks"):
        load_task(file)


def test_a_pipeline_of_skypilot_runs_its_tasks_one_after_another(tmp_path: Path) -> None:
    file = write(tmp_path, PIPELINE)
    found = load_file(file)
    assert (found.what, found.refused) == ("pipeline", ())
    loaded = load_tasks(file, options=ReadOptions(overrides='{"env": {"A": "2"}}'))
    assert [each.task.name for each in loaded] == ["prepare", "flow-1", "flow-2"]
    assert [each.task.after for each in loaded] == [
        (),
        (JobDependency("prepare"),),
        (JobDependency("flow-1"),),
    ]
    assert loaded[0].task.env["A"] == "2"
    assert loaded[1].task.resources.accelerators[0].name == "A100"
    assert "SKYPILOT_NODE_RANK=" in loaded[2].task.run
    for each in loaded:
        options = ReadOptions(overrides=each.overrides, dialect=each.source.kind, text=each.text)
        assert load_task(file, options=options).task == each.task


def test_a_job_group_of_skypilot_is_refused(tmp_path: Path) -> None:
    text = "name: g\nexecution: parallel\n---\nname: a\nrun: x\n---\nname: b\nrun: x\n"
    with pytest.raises(SpecError, match="2 tasks that start together are not supported yet"):
        load_tasks(write(tmp_path, text))
