"""A task file without `workdir`: its folder is submitted if its commands name a file of it."""

import tempfile
from pathlib import Path

import pytest
import yaml
from tests.own_parts import reads_other_tools

from cavvy.domain.tasks import CheckpointPolicy, TaskSpec, Transfer, Workdir
from cavvy.spec import SpecError, own_folder
from cavvy.spec.own_folder import choose_named, explain_unfit, list_named
from cavvy.task_files import ReadOptions, load_file, load_task, parse_task


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "project"
    for name in (
        "train.py",
        "requirements.txt",
        "src/model.py",
        "pkg/__init__.py",
        "Makefile",
        "my train.py",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    (folder / "pyproject.toml").write_text("[project]\n")
    return folder


@pytest.mark.parametrize(
    ("run", "named"),
    [
        ("python train.py", "train.py"),
        ("python3 ./train.py --lr=0.1", "train.py"),
        ("torchrun --nproc_per_node=2 train.py", "train.py"),
        ("cd src && python model.py", "src"),
        ("accelerate launch src/model.py", "src/model.py"),
        ('bash -c "python train.py"', "train.py"),
        ("python 'my train.py' --fast", "my train.py"),
        ("pip install -r requirements.txt", "requirements.txt"),
        ("pip install --requirement=requirements.txt", "requirements.txt"),
        ("pip install -e .", "pyproject.toml"),
        ("pip install '.[dev]'", "pyproject.toml"),
        ("uv sync", "pyproject.toml"),
        ("python -m pkg", "pkg/__init__.py"),
        ("python -m src.model", "src/model.py"),
        ("uvicorn train:app --port 80", "train.py"),
        ("pytest src/model.py::test_one", "src/model.py"),
        ("make train", "Makefile"),
        ("ls src/", "src"),
        ("cat <<E\nx\nE\npython train.py", "train.py"),
    ],
)
def test_commands_that_name_a_file(project: Path, run: str, named: str) -> None:
    assert list_named(TaskSpec(name="x", run=run), project)[0] == (named, "run")
    setup = TaskSpec(name="x", run="true", setup=run)
    assert list_named(setup, project)[0] == (named, "setup")


@pytest.mark.parametrize(
    "run",
    [
        "nvidia-smi",
        "python -c 'import src'",
        "echo src",
        "python other.py",
        "python /app/train.py",
        "python $HOME/train.py",
        "python ../project/train.py",
        "ls .",
        "wget https://example.com/train.py",
        "# python train.py",
        "echo hi > train.py",
        "uv pip install torch",
        "",
    ],
)
def test_commands_that_name_no_file(project: Path, run: str) -> None:
    assert list_named(TaskSpec(name="x", run=run), project) == []


@pytest.mark.parametrize(
    ("service", "key"),
    [
        (
            "groups: {router: {router: none, run: smg}, worker: {run: python train.py}}",
            "service.groups.worker.run",
        ),
        (
            "engine: vllm\n  model: a/b\n  adapters: {sql: org/sql, own: ./src}",
            "service.adapters.own",
        ),
    ],
)
def test_groups_and_adapters_of_a_service_name_files(project: Path, service: str, key: str) -> None:
    (project / "x.yaml").write_text(f"image: i\nresources: {{gpu: L4}}\nservice:\n  {service}\n")
    found = load_file(str(project / "x.yaml"), options=ReadOptions(serves=True))
    assert [each.workdir for each in found.tasks] == [Workdir(path=".")]
    assert any(note.startswith(f"`{key}` names ") for note in found.notes)


def test_files_that_the_task_receives_or_creates_do_not_count(project: Path) -> None:
    (project / "out").mkdir()
    (project / "out" / "last.pt").write_text("")
    task = TaskSpec(
        name="x",
        run="cat src/model.py out/last.pt",
        inputs=(Transfer(source="s3://b/src", target="src"),),
        checkpoint=CheckpointPolicy(path="./out"),
    )
    assert list_named(task, project) == []


def read(project: Path, text: str, name: str = "task.yaml") -> tuple[str, str, list[str]]:
    """The working folder, the overrides and the notes of a task file."""
    (project / name).write_text(text)
    loaded = load_task(project / name)
    workdir = loaded.task.workdir
    found = load_file(project / name)
    assert found.notes == loaded.source.notes
    return (workdir.path or "") if workdir else "", loaded.overrides, list(found.notes)


def test_the_folder_of_the_file_is_submitted(project: Path) -> None:
    folder, overrides, (note,) = read(project, "run: python train.py")
    assert folder == "."
    assert (
        note == f"`run` names train.py, so the folder {project} is submitted, as `workdir: .` says"
    )
    # the server reads the text again, with the overrides
    task = parse_task("run: python train.py", options=ReadOptions(overrides=overrides))
    assert task.workdir == Workdir(path=".")
    assert read(project, "run: nvidia-smi") == ("", "", [])
    assert read(project, "run: python train.py\nworkdir:\n") == ("", "", [])
    assert read(project, "run: python train.py\nworkdir: src\n") == ("src", "", [])


def test_the_current_folder_above_the_file_is_submitted(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "configs" / "a").mkdir(parents=True)
    monkeypatch.chdir(project)
    folder, overrides, (note,) = read(project, "run: python train.py", "configs/a/task.yaml")
    assert (folder, yaml.safe_load(overrides)) == ("../..", {"workdir": "../.."})
    assert f"the folder {project} is submitted, as `workdir: ../..` says" in note
    (project / "configs" / "a" / "train.py").write_text("")  # next to the file: it wins
    assert read(project, "run: python train.py", "configs/a/task.yaml")[0] == "."
    monkeypatch.chdir(project / "src")  # not above the file
    assert read(project, "run: python model.py", "configs/a/task.yaml") == ("", "", [])


def test_a_link_to_a_task_file_means_the_folder_of_the_file(project: Path) -> None:
    (project / "src" / "task.yaml").write_text("run: python model.py")
    (project / "task.yaml").symlink_to("src/task.yaml")
    loaded = load_task(project / "task.yaml")
    assert (loaded.task.workdir, loaded.folder) == (Workdir(path="."), project / "src")


def test_other_overrides_stay(project: Path) -> None:
    (project / "task.yaml").write_text("run: python train.py")
    options = ReadOptions(overrides='{"resources": {"gpu": ["H100:8"]}, "env": {"A": "1"}}')
    overrides = yaml.safe_load(load_task(project / "task.yaml", options=options).overrides)
    assert overrides == {"resources": {"gpu": ["H100:8"]}, "env": {"A": "1"}, "workdir": "."}
    replaced = ReadOptions(overrides='{"run": "nvidia-smi"}')
    assert load_task(project / "task.yaml", options=replaced).task.workdir is None


@reads_other_tools
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("run: python train.py\nresources: {cpus: 1}\n", "SkyPilot"),
        ("type: task\ncommands: [python train.py]\n", "dstack"),
    ],
)
def test_files_of_other_tools_get_a_note(project: Path, text: str, kind: str) -> None:
    folder, _, (note,) = read(project, text)
    assert folder == ""
    assert "names train.py" in note
    assert f"a {kind} file" in note
    assert f"--workdir {project} submits" in note


def test_a_home_or_a_shared_folder_is_not_submitted(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(project))
    folder, overrides, (note,) = read(project, "run: python train.py")
    assert (folder, overrides) == ("", "")
    assert "starts in an empty folder" in note
    assert "your home folder; move" in note
    (project / "Downloads").mkdir()
    for shared in (project.parent, Path("/"), Path("/tmp"), project / "Downloads"):
        assert "not the folder of one project" in explain_unfit(shared)


def test_a_named_file_that_is_ignored_is_not_submitted(project: Path) -> None:
    (project / ".gitignore").write_text("train.py\nsrc\n")
    for run, name in (("python train.py", "train.py"), ("ls src/", "src")):
        folder, _, (note,) = read(project, f"run: {run}")
        assert folder == ""
        assert f"an ignore file excludes {name}; change .gitignore" in note
    folder, _, (note,) = read(project, "run: python train.py -r requirements.txt")
    assert (folder, "names requirements.txt, so" in note) == (".", True)


def test_a_large_folder_is_not_submitted(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cavvy.spec.own_folder.MOST_OWN_FILES", 3)
    folder, _, (note,) = read(project, "run: python train.py")
    assert folder == ""
    assert "more than the limit of 3" in note
    assert "`workdir: .`" in note


@reads_other_tools
def test_advice_in_a_home_folder_can_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No advice names a folder that would be refused."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "sky.yaml").write_text("resources: {cpus: 1}\nrun: python train.py\n")
    (tmp_path / "go.sh").write_text("#!/bin/bash\n")
    told = " ".join(load_task("sky.yaml").source.notes)
    with pytest.raises(SpecError) as caught:
        load_task("go.sh")
    for text in (told, str(caught.value)):
        assert "your home folder; move the task file" in text
        assert "--workdir ." not in text


def test_a_folder_is_too_large_for_the_key_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("x" * 100)
    monkeypatch.setattr(own_folder, "MOST_OWN_BYTES", 10)
    assert "`workdir: .`" in choose_named(tmp_path, [("train.py", "run")])[1]
    with open(tmp_path / "data", "wb") as file:
        file.truncate(11 << 30)
    assert "`workdir: .`" not in choose_named(tmp_path, [("train.py", "run")])[1]
