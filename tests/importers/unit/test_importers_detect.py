"""Whose file it is: found by keys, without reading more than two levels, and without weight."""

import subprocess
import sys
from pathlib import Path

import pytest

from cavvy.capabilities.importers import detect
from cavvy.capabilities.importers.detect import find_dialect
from cavvy.capabilities.importers.dialects import Dialect
from cavvy.capabilities.importers.skypilot.rules import NEEDS
from cavvy.capabilities.importers.skypilot.rules import TASK as SKYPILOT
from cavvy.spec import SpecError
from cavvy.spec.fields.resources import RESOURCES
from cavvy.spec.fields.service import SERVICE
from cavvy.spec.fields.task import TASK
from cavvy.spec.problems import ProblemNotes
from cavvy.spec.tree import compose_all
from cavvy.task_files import ReadOptions, load_file, parse_file


def find(text: str) -> Dialect:
    return find_dialect(compose_all(text, ProblemNotes("f", text)))


@pytest.mark.parametrize(
    ("text", "dialect"),
    [
        ("run: x", Dialect.CAVVY),
        ("run: x\nresources: {memory: 8}", Dialect.CAVVY),
        ("run: x\nresources: {gpu: H100}", Dialect.CAVVY),
        ("run: x\nnodes: 2\nresources: {accelerators: H100}", Dialect.CAVVY),
        ("run: x\nenv: {}\nnum_nodes: 2", Dialect.CAVVY),
        ("type: task\nrun: x", Dialect.CAVVY),
        ("- a", Dialect.CAVVY),
        ("run: x\n---\nrun: y", Dialect.SKYPILOT),
        ("run: x\n---\nrun: y\nnodes: 2", Dialect.CAVVY),
        ("run: x\nresources: {accelerators: H100}", Dialect.SKYPILOT),
        ("num_nodes: 2\nrun: x", Dialect.SKYPILOT),
        ("run: echo ${SKYPILOT_NODE_RANK}", Dialect.SKYPILOT),
        ("run: x\nenvs: {A: b}", Dialect.SKYPILOT),
        ("run: x\nsecrets: {A: b}", Dialect.SKYPILOT),
        ("run: x\nsecrets: [A]", Dialect.CAVVY),
        ("name: a\n---\nrun: x\nresources: {cpus: 1}", Dialect.SKYPILOT),
        ("name: a\nexecution: parallel\n---\nname: b\nrun: x", Dialect.SKYPILOT),
        ("name: v\ntype: k8s-pvc\nsize: 10Gi", Dialect.SKYPILOT),
        ("type: task\ncommands: [x]", Dialect.DSTACK),
        ("type: fleet\nnodes: 2", Dialect.DSTACK),
        ("type: tsk\ncommands: [x]", Dialect.DSTACK),
        ("type: preset\nenv: {}", Dialect.DSTACK),
    ],
)
def test_whose_file_it_is(text: str, dialect: Dialect) -> None:
    assert find(text) is dialect


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("task.yaml", "Cavvy"),
        ("train.sky.yaml", "SkyPilot"),
        ("sky.yml", "SkyPilot"),
        ("skypilot/examples/minimal.yaml", "SkyPilot"),
        ("ignoring/task.yaml", "SkyPilot"),
    ],
)
def test_a_file_without_a_tool_s_own_key_belongs_to_the_tool_that_its_path_names(
    path: str, kind: str, tmp_path: Path
) -> None:
    (tmp_path / ".git").mkdir()
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "ignoring").mkdir(exist_ok=True)
    (tmp_path / "ignoring" / ".skyignore").touch()
    file.write_text("name: min\nsetup: echo a\nrun: false; echo b")
    assert load_file(file).kind == kind
    assert load_file(file, options=ReadOptions(dialect="cavvy")).kind == "Cavvy"
    assert load_file(file, options=ReadOptions(dialect="skypilot")).kind == "SkyPilot"
    file.write_text("run: x\nenv: {A: b}")
    assert load_file(file).kind == "Cavvy"


SCRIPT = "#!/usr/bin/env -S bash -e\n# all nodes\nmodule load cuda\nmpirun hostname\n"


@pytest.mark.parametrize(
    ("name", "text", "kind", "command"),
    [
        ("x y", SCRIPT, "is a script", "bash 'x y'"),
        ("t.py", 'import torch\nprint({"a": 1})\n', "a script", "cavvy run"),
    ],
)
def test_a_file_that_is_not_read_is_named(
    tmp_path: Path, name: str, text: str, kind: str, command: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError) as caught:
        load_file(tmp_path / name)
    (problem,) = caught.value.problems
    assert kind in problem.message
    assert command in problem.suggestion


def test_a_task_file_may_name_cavvy_as_its_interpreter() -> None:
    task = parse_file("#!/usr/bin/env -S cavvy run\nrun: hostname\n").task
    assert task is not None
    assert task.run == "hostname"


def test_ours_is_read_as_ever() -> None:
    found = parse_file("run: x\nresources: {gpu: H100:8}")
    assert (found.kind, found.what, found.kept) == ("Cavvy", "task", ())
    assert found.task is not None
    assert found.task.resources.accelerators[0].name == "H100"


def test_importing_the_room_reads_none_of_the_rules() -> None:
    code = (
        "import sys, cavvy.spec; print([n for n in sys.modules if n.startswith('yaml') or 'shapes' in n "
        "or 'spec.tree' in n])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_every_key_of_ours_is_ours_or_shared() -> None:
    top = {field.name for field in TASK.fields}
    needs = {field.name for field in RESOURCES.fields}
    shared = {
        "name",
        "run",
        "setup",
        "workdir",
        "resources",
        "secrets",
        "inputs",
        "outputs",
        "volumes",
        "service",
        "pool",  # a name for Cavvy, a table for SkyPilot
    }
    assert top - shared == set(detect._OURS)
    # SkyPilot's service has `replicas`, too.
    assert {field.name for field in SERVICE.fields} - {"replicas"} == set(detect._OUR_SERVICE)
    assert needs - {"memory", "any_of", "ordered"} == set(detect._OUR_NEEDS)
    assert {*SKYPILOT.fields, "execution"} >= detect._SKYPILOT
    assert {*NEEDS.fields} - {
        "memory",
        "volumes",
        "priority",
        "any_of",
        "ordered",
    } <= detect._SKYPILOT_NEEDS | {key for key in NEEDS.fields if key.startswith("_")}


@pytest.mark.parametrize(
    ("name", "kind"), [("a.sbatch", "Slurm"), ("a.slurm", "Slurm"), ("a.pbs", "PBS")]
)
def test_the_name_of_a_batch_script_says_whose_it_is(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("#!/bin/bash\n# SBATCH --nodes=2\nhostname\n")
    assert load_file(tmp_path / name).kind == kind


def test_a_development_container_is_no_task(tmp_path: Path) -> None:
    path = tmp_path / "devcontainer.json"
    path.write_text('{\n\t// a comment\n\t"name": "A B",\n}\n')
    with pytest.raises(SpecError, match="`cavvy dev`"):
        load_file(path)


def test_a_table_of_outputs_alone_is_a_mistake_in_a_cavvy_file() -> None:
    with pytest.raises(SpecError) as error:
        parse_file("run: x\noutputs: {results: s3://b/a}\n")
    assert "SkyPilot" not in str(error.value)


def test_several_documents_of_dstack_are_one_too_many() -> None:
    with pytest.raises(SpecError, match="a second document begins here"):
        parse_file("type: dev-environment\nide: vscode\n---\ntype: task\ncommands: [a]\n")


@pytest.mark.parametrize(
    "text",
    [
        "name: a\nrun: echo hi\n",
        "resources: {accelerators: T4}\nrun: echo hi\n",
        "type: task\ncommands: [echo hi]\n",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\nspec:\n  containers: [{name: a, image: b}]\n",
    ],
)
def test_empty_documents_do_not_count(text: str) -> None:
    alone = parse_file(text)
    for other in (f"{text}---\n", f"---\n---\n{text}", f"# nothing\n---\n{text}...\n---\n# end\n"):
        found = parse_file(other)
        assert (found.kind, found.task) == (alone.kind, alone.task)


def test_variables_that_the_nodes_set_are_said_to_have_no_effect() -> None:
    for text in (
        "run: a\nenv: {NNODES: '3'}\n",
        "type: task\ncommands: [a]\nenv: [NNODES=3]\n",
        "resources: {accelerators: T4}\nrun: a\nenvs: {NNODES: 3}\n",
    ):
        assert any(note.startswith("NNODES: each node sets it") for note in parse_file(text).notes)
    assert parse_file("run: a\nenv: {WORLD: '3'}\n").notes == ()
