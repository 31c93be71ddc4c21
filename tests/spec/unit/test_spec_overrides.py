"""Values of a command line replace those of a file of any tool, in every alternative."""

from datetime import timedelta

import pytest
from tests.own_parts import reads_other_tools

from cavvy.domain.tasks import SpotPolicy, TaskSpec
from cavvy.domain.units import HourlyRate, Money
from cavvy.spec import SpecError
from cavvy.spec.overrides import apply_overrides
from cavvy.task_files import ReadOptions, parse_task

FILES = {
    "Cavvy": "resources: {any_of: [{gpu: A100, cpu: 8}, {gpu: T4, providers: [aws]}]}\nrun: x",
    "SkyPilot": (
        "resources: {any_of: [{accelerators: A100, cpus: 8}, {accelerators: T4, cloud: aws}]}\nrun: x"
    ),
    "dstack": "type: task\nresources: {gpu: A100}\ninstance_types: [a, b]\ncommands: [x]",
}


def read(text: str, overrides: str) -> TaskSpec:
    return parse_task(text, options=ReadOptions(overrides=overrides))


@reads_other_tools
@pytest.mark.parametrize("kind", FILES)
def test_resources_hold_in_every_alternative(kind: str) -> None:
    before, after = (
        read(FILES[kind], text) for text in ("", "resources: {gpu: H100:8, spot: only}")
    )
    assert len(after.resources.choices) == len(before.resources.choices) > 1
    for old, new in zip(before.resources.choices, after.resources.choices, strict=True):
        assert (new.accelerators[0].name, new.accelerators[0].count_min) == ("H100", 8)
        assert new.spot is SpotPolicy.ONLY
        assert (new.cpus_min, new.providers, new.instance) == (
            old.cpus_min,
            old.providers,
            old.instance,
        )


def test_alternatives_that_become_equal_are_one() -> None:
    task = read("resources: {any_of: [{gpu: A100}, {gpu: T4}]}\nrun: x", "resources: {gpu: L4}")
    assert task.resources.any_of == ()


def test_of_a_section_only_what_is_said_changes() -> None:
    text = "limits: {duration: 2h, budget: 5}\nresources: {memory: 64}\nrun: x"
    task = read(text, "limits: {budget: 25, deadline: 8h}\nresources: {max_price: 3}\nnodes: 2")
    assert (task.limits.duration, task.limits.budget) == (timedelta(hours=2), Money(25_000_000))
    assert task.limits.deadline_after == timedelta(hours=8)
    assert (task.resources.memory_min_mib, task.resources.max_rate) == (
        65_536,
        HourlyRate(3_000_000),
    )
    assert task.nodes == 2


def test_variables_and_secrets_are_added() -> None:
    task = read("env: {A: '1', B: '2'}\nsecrets: [C, D]\nrun: x", "env: {A: '3', C: '4'}")
    assert (task.env, task.secrets) == ({"A": "3", "B": "2", "C": "4"}, ("D",))
    task = read("env: {A: '1', B: '2'}\nsecrets: [C]\nrun: x", "secrets: [A]")
    assert (task.env, task.secrets) == ({"B": "2"}, ("C", "A"))


@reads_other_tools
def test_a_variable_reaches_the_paths_of_a_skypilot_file() -> None:
    text = "envs: {BUCKET: }\nfile_mounts: {/data: 's3://$BUCKET/x/'}\nrun: x"
    task = read(text, "env: {BUCKET: mine}")
    assert task.inputs[0].source == "s3://mine/x/"
    assert (task.env, task.secrets) == ({"BUCKET": "mine"}, ())


@reads_other_tools
def test_a_variable_replaces_one_of_a_dstack_list() -> None:
    task = read("type: task\nenv: [A=1, B]\ncommands: [x]", "env: {A: '2', B: '3'}")
    assert (task.env, task.secrets) == ({"A": "2", "B": "3"}, ())


@reads_other_tools
def test_another_command_gets_the_variables_of_the_tool() -> None:
    task = read("num_nodes: 2\nrun: x", "run: echo $SKYPILOT_NODE_RANK")
    assert task.run.endswith("own commands\necho $SKYPILOT_NODE_RANK")


@pytest.mark.parametrize("text", ["[1]", "nodes: 0", "colour: red", "limits: {budget: 0}", "a: ["])
def test_wrong_ones_are_refused(text: str) -> None:
    with pytest.raises(SpecError):
        apply_overrides(TaskSpec(name="a", run="x"), text)


def test_tags_are_added_to_those_of_the_file() -> None:
    task = TaskSpec(name="train", run="x", tags={"team": "vision", "ci": "no"})
    changed = apply_overrides(task, "{tags: {ci: github}}")
    assert changed.tags == {"team": "vision", "ci": "github"}
