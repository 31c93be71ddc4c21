"""The Dockerfile that is made of a task: which base, how many stages, what is copied."""

import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from cavvy.cli.main import cli
from cavvy.domain.tasks import AcceleratorNeed, ResourceSpec, TaskSpec, Workdir
from cavvy.spec.dockerfile import (
    CUDA_BUILD,
    CUDA_RUN,
    CUDA_WHEELS,
    PYTHON,
    ROCM,
    SETUP_FILE,
    make_dockerfile,
    make_recipe,
)
from cavvy.task_files import parse_task


def bases(text: str) -> list[str]:
    recipe = make_recipe(parse_task(text, file="t.yaml"))
    return [line.split()[1] for line in recipe.text.splitlines() if line.startswith("FROM")]


@pytest.mark.parametrize(
    ("gpu", "setup", "expected"),
    [
        ("", "pip install numpy", [PYTHON, PYTHON]),
        ("H100:8", "pip install torch", [CUDA_WHEELS, CUDA_WHEELS]),
        ("H100:8", "pip install flash-attn", [CUDA_BUILD, CUDA_WHEELS]),
        ("H100:8", "apt-get update && apt-get install -y ffmpeg", [CUDA_RUN, CUDA_RUN]),
        ("MI300X:8", "pip install torch", [ROCM, ROCM]),
        ("H100:8", "./configure && make install", [CUDA_BUILD]),
        ("", "curl -s https://example.org/x | sh", [PYTHON]),
    ],
)
def test_bases(gpu: str, setup: str, expected: list[str]) -> None:
    resources = f"resources: {{gpu: '{gpu}'}}\n" if gpu else ""
    assert bases(f"run: x\n{resources}setup: {setup!r}\n") == expected


def test_two_stages_leave_the_build_behind() -> None:
    setup = (
        "apt-get update\napt-get install -y libgl1\n# why\npip install \\\n  -r requirements.txt\n"
    )
    task = TaskSpec(
        name="t",
        run="x",
        workdir=Workdir(path="."),
        setup=setup,
        setup_uses=("requirements.txt",),
        resources=ResourceSpec(accelerators=(AcceleratorNeed(name="H100"),)),
    )
    recipe = make_recipe(task)
    build, final = recipe.text.split("\n\nFROM ", 1)
    assert "COPY requirements.txt ./requirements.txt" in build
    assert "libgl1" in build
    assert "libgl1" in final
    assert "requirements" not in final
    assert "COPY --from=setup /opt/venv /opt/venv" in final
    assert "apt-get" not in recipe.files[SETUP_FILE]
    assert "pip install" in recipe.files[SETUP_FILE]
    assert recipe.uses == ("requirements.txt",)


def test_the_whole_folder_where_the_setup_may_use_all_of_it() -> None:
    assert make_recipe(parse_task("run: x\nworkdir: .\nsetup: pip install .")).uses is None
    assert make_recipe(parse_task("run: x\nsetup: pip install numpy")).uses == ()
    assert make_recipe(parse_task("run: x\nworkdir: .")).uses == ()


def test_a_named_image_is_the_base_of_one_stage() -> None:
    recipe = make_recipe(
        parse_task("run: x\nimage: team/base:1\nsetup: pip install numpy\nenv: {A: 'b c'}")
    )
    assert bases("run: x\nimage: team/base:1\nsetup: pip install numpy") == ["team/base:1"]
    assert "RUN A='b c' " in recipe.text
    assert recipe.files[SETUP_FILE] == "pip install numpy\n"


def test_equal_tasks_give_equal_recipes() -> None:
    text = "run: x\nsetup: pip install numpy\nenv: {B: 1, A: 2}"
    assert make_recipe(parse_task(text)) == make_recipe(
        parse_task(text.replace("{B: 1, A: 2}", "{A: 2, B: 1}"))
    )


def test_one_file_alone_writes_the_setup_itself(tmp_path: Path) -> None:
    setup = "pip install 'numpy>=1'\npip install \"a b\" $HOME\n"
    text = make_dockerfile(TaskSpec(name="t", run="x", setup=setup))
    assert "COPY" not in text.split("\n\nFROM ")[0]
    at = text.index("RUN printf")
    command = text[at + 4 : text.index(f">/tmp/{SETUP_FILE}", at)].replace("\\\n", " ")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout == setup


def test_export_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "t.yaml"
    file.write_text("run: x\nsetup: pip install numpy\n")
    done = CliRunner().invoke(cli, ["export", "dockerfile", str(file)])
    assert done.exit_code == 0
    assert done.output.rstrip("\n") == make_dockerfile(
        parse_task(file.read_text(), file="t.yaml")
    ).rstrip("\n")
