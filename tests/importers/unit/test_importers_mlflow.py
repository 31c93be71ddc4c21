"""MLflow projects become jobs, or errors that say what to write."""

import re
from pathlib import Path
from typing import Any

import pytest

from cavvy.task_files import load_script

PROJECT = """\
name: My Project
entry_points:
  main:
    parameters:
      data: path
      alpha: {type: float, default: 0.1}
      note: {default: "it's"}
    command: "python train.py -a {alpha} {data} {note} {{x}}"
  validate:
    command: "python validate.py"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(folder: Path, *words: str, text: str = PROJECT) -> tuple[dict[str, Any], tuple[str, ...]]:
    (folder / "MLproject").write_text(text)
    found = load_script(folder / "MLproject", words)
    assert found is not None
    return found.keys, found.notes


def test_the_command_of_an_entry_point(folder: Path) -> None:
    keys, _ = read(folder, "-P", "data=a b.csv", "-Palpha=1e-3", "-P", "more=x y")
    assert keys["run"] == ("python train.py -a 1e-3 'a b.csv' 'it'\"'\"'s' {x} --more 'x y'")
    assert keys["name"] == "my-project"
    assert "setup" not in keys
    assert read(folder, "-e", "validate")[0]["run"] == "python validate.py"
    assert read(folder, "--entry-point=validate", "-P", "k=v")[0]["run"].endswith(" --k v")


def test_a_script_may_be_the_entry_point(folder: Path) -> None:
    (folder / "other.py").write_text("")
    keys, _ = read(folder, "-e", "other.py", "-P", "a=1")
    assert keys["run"] == "python3 other.py --a 1"


def test_environments(folder: Path) -> None:
    (folder / "python_env.yaml").write_text(
        'python: "3.10"\nbuild_dependencies: [pip, wheel]\ndependencies: ["-r req.txt", "a>1"]\n'
    )
    (folder / "req.txt").write_text("six\n")
    (folder / "conda.yaml").write_text("dependencies: [python, numpy]\n")
    own = "entry_points: {main: {command: echo hi}}\n"
    keys, notes = read(folder, text=own + "python_env: python_env.yaml\n")
    assert keys["setup"]["run"] == "python3 -m pip install pip wheel -r req.txt 'a>1'"
    assert keys["setup"]["uses"] == ["req.txt"]
    assert any("Python 3.10" in each for each in notes)
    keys, notes = read(folder, text=own + "conda_env: conda.yaml\n")
    assert "needs conda" in keys["setup"]["run"]
    assert "env create" in keys["setup"]["run"]
    assert keys["setup"]["uses"] == ["conda.yaml"]
    assert keys["run"].endswith("/activate\necho hi")
    assert any("conda" in each for each in notes)
    docker = "docker_env: {image: team/train, environment: [[A, b], HOME_TOKEN]}\n"
    keys, notes = read(folder, text=own + docker)
    assert (keys["image"], keys["env"]) == ("team/train", {"A": "b"})
    assert any("--env HOME_TOKEN" in each for each in notes)


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (PROJECT, (), "needs the parameter data: `cavvy run MLproject -- -P data=VALUE`"),
        (
            PROJECT,
            ("-e", "train"),
            "no entry point train; it has main, validate: `cavvy run MLproject -- -e main`",
        ),
        (PROJECT, ("-P", "data"), "expected NAME=VALUE"),
        (PROJECT, ("-P",), "lacks a word"),
        (PROJECT, ("--lr", "1"), "'--lr' is no option here"),
        (PROJECT, ("-P", "data=x", "-P", "data=y"), "is given twice"),
        (PROJECT, ("-P", "data=x", "-P", "alpha=lots"), "-P alpha=lots: expected a number"),
        (PROJECT, ("-P", "data=s3://a/b"), "write `inputs`"),
        (PROJECT.replace("{note}", "{nota}"), ("-P", "data=x"), "{nota}, which is no parameter"),
        (PROJECT.replace("{{x}}", "{"), ("-P", "data=x"), "{, which is no parameter"),
        (PROJECT.replace("type: float", "type: 5"), ("-P", "data=x"), "unknown type 5"),
        ("entry_point: {}\n", (), "did you mean entry_points?"),
        ("entry_points: {main: {}}\n", (), "has no `command`"),
        ("entry_points: []\n", (), "no entry point main"),
        ("- a\n", (), "expected a table"),
        ("a: [\n", (), "MLproject:2: this is no YAML"),
        ("a: &x [1]\nb: *x\n", (), "is no alias of a single value"),
        (PROJECT + "conda_env: ../conda.yaml\n", ("-P", "data=x"), "outside of the project"),
        (PROJECT + "conda_env: gone.yaml\n", ("-P", "data=x"), "there is no file gone.yaml"),
        (
            PROJECT + "conda_env: a\npython_env: b\n",
            ("-P", "data=x"),
            "conda_env and python_env exclude each other",
        ),
        (PROJECT + "docker_env: {}\n", ("-P", "data=x"), "has no `image`"),
        (
            PROJECT + "docker_env: {image: a, volumes: ['/a:/b']}\n",
            ("-P", "data=x"),
            "write a Cavvy file with `volumes`",
        ),
    ],
)
def test_mistakes(folder: Path, text: str, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        read(folder, *words, text=text)


def test_aliases_of_values_and_types_that_mlflow_takes_as_text(folder: Path) -> None:
    point = "{parameters: {p: {type: epochs, default: *x}}, command: 'e {p}'}"
    keys, notes = read(folder, text=f"shared_value: &x two\nentry_points: {{main: {point}}}\n")
    assert "e two" in keys["run"]
    assert any("does not read the key 'shared_value'" in each for each in notes)
    assert any("with a type such as epochs" in each for each in notes)
