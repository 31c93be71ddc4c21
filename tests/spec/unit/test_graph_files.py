"""Files with several tasks: what is read, what is submitted for each task, and what is refused."""

import re
from datetime import timedelta
from pathlib import Path

import pytest
from tests.own_parts import reads_other_tools

from cavvy.domain.tasks import JobDependency, JobGroup, StartCondition
from cavvy.spec import SpecError
from cavvy.task_files import ReadOptions, load_file, load_task, load_tasks

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
    with pytest.raises(SpecError, match=re.escape(told)):
        load_tasks(write(tmp_path, text))


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


@reads_other_tools
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


GROUP = """\
name: trainer
group: rl
run: train $CAVVY_HOSTS_REWARD
---
name: reward
group: {name: rl, helper: true, linger: 30s}
run: serve
"""
JOB_GROUP = """\
name: RL_run
execution: parallel
primary_tasks: [trainer]
termination_delay: {default: 30s, buffer: 1m}
---
name: trainer
setup: ping reward_server-1.$SKYPILOT_JOBGROUP_NAME
run: train http://reward_server-0.${SKYPILOT_JOBGROUP_NAME}:80 buffer-0.${SKYPILOT_JOBGROUP_NAMES}
---
name: reward_server
num_nodes: 2
run: serve
---
name: buffer
resources: {image_id: "docker:python:3"}
run: keep
"""


def test_the_tasks_of_a_group_are_read(tmp_path: Path) -> None:
    loaded = load_tasks(write(tmp_path, GROUP))
    assert [each.task.group for each in loaded] == [
        JobGroup(name="rl"),
        JobGroup(name="rl", helper=True, linger=timedelta(seconds=30)),
    ]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("helper: true, ", "", r"6:19: only a helper is stopped .* `linger` has no effect"),
        ("group: rl", "group: {name: rl, helper: true}", "2:1: all tasks of the group rl are help"),
        ("group: rl", "group: reward", "reward is the name of a group and of a task"),
        ("run: serve", "after: trainer\nrun: serve", "7:1: reward waits for trainer, but starts"),
        ("run: serve", "array: 0-3\nrun: serve", "7:1: `array` has no meaning with `group`"),
        ("run: serve", "schedule: 0 3 * * *\nrun: serve", "`schedule` has no meaning with `group`"),
        ("name: rl, ", "", "`group.name` is missing"),
        ("group: rl", "group: RL", "'RL' cannot be a name"),
        ("group: rl", "group: {name: rl, primary: true}", "write `helper: true`"),
    ],
)
def test_a_group_that_cannot_start_is_refused(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    with pytest.raises(SpecError, match=told):
        load_tasks(write(tmp_path, GROUP.replace(old, new, 1)))


def test_groups_that_wait_for_each_other_are_refused(tmp_path: Path) -> None:
    tasks = ("{name: a, group: x, after: d, run: a}", "{name: b, group: x, run: b}")
    tasks += ("{name: c, group: y, after: b, run: c}", "{name: d, group: y, run: d}")
    with pytest.raises(SpecError, match="the tasks wait for each other: "):
        load_tasks(write(tmp_path, "\n---\n".join(tasks)))


@reads_other_tools
def test_a_job_group_of_skypilot_is_a_group(tmp_path: Path) -> None:
    file = write(tmp_path, JOB_GROUP)
    loaded = load_tasks(file)
    assert [each.task.name for each in loaded] == ["trainer", "reward-server", "buffer"]
    assert [each.task.group for each in loaded] == [
        JobGroup(name="rl-run"),
        JobGroup(name="rl-run", helper=True, linger=timedelta(seconds=30)),
        JobGroup(name="rl-run", helper=True, linger=timedelta(minutes=1)),
    ]
    trainer, _, buffer = (each.task for each in loaded)
    address = '$(printf %s "$CAVVY_HOSTS_REWARD_SERVER" | cut -d, -f{})'
    assert f"train http://{address.format(1)}:80 buffer-0.${{SKYPILOT_JOBGROUP_NAMES}}" in (
        trainer.run
    )
    assert f"ping {address.format(2)}" in (trainer.setup or "")
    assert "/etc/hosts" not in trainer.run
    assert "/etc/hosts" in buffer.run
    for each in loaded:
        options = ReadOptions(overrides=each.overrides, dialect=each.source.kind, text=each.text)
        assert load_task(file, options=options).task == each.task


@reads_other_tools
@pytest.mark.parametrize(
    "delay", ["25h", "{default: 30s, buffer: 2d}", "99999999999w", f"{'9' * 5000}s"]
)
def test_a_job_group_whose_helpers_stay_too_long_is_refused(tmp_path: Path, delay: str) -> None:
    file = write(tmp_path, JOB_GROUP.replace("{default: 30s, buffer: 1m}", delay))
    with pytest.raises(SpecError, match=r":4:.*is too long") as refused:
        load_tasks(file)
    assert "at most 24h" in str(refused.value)


@reads_other_tools
def test_a_node_with_an_impossible_number_keeps_its_name(tmp_path: Path) -> None:
    name = f"reward_server-{'9' * 5000}.$SKYPILOT_JOBGROUP_NAME"
    text = JOB_GROUP.replace("reward_server-1.$SKYPILOT_JOBGROUP_NAME", name)
    assert name in (load_tasks(write(tmp_path, text))[0].task.setup or "")


@reads_other_tools
@pytest.mark.parametrize(
    ("delay", "seconds"), [("0x1F", 31), ("1_000", 1000), ("'90'", 90), ("{default: 0x10}", 16)]
)
def test_a_delay_of_skypilot_may_be_any_whole_number(
    tmp_path: Path, delay: str, seconds: int
) -> None:
    file = write(tmp_path, JOB_GROUP.replace("{default: 30s, buffer: 1m}", delay))
    found = load_tasks(file)[1].task.group
    assert found == JobGroup(name="rl-run", helper=True, linger=timedelta(seconds=seconds))


@reads_other_tools
def test_a_job_group_without_primary_tasks_has_no_helpers(tmp_path: Path) -> None:
    text = "name: a\nexecution: parallel\n---\nname: a\nrun: x\n---\nname: b\nrun: x\n"
    assert [each.task.group for each in load_tasks(write(tmp_path, text))] == [
        JobGroup(name="a-group"),
        JobGroup(name="a-group"),
    ]
