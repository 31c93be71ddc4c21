"""Scripts of Python and of a shell as tasks."""

import json
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from cavvy.capabilities.importers.dependency_files import read_conda
from cavvy.capabilities.importers.scripts import is_script, read_script, read_start
from cavvy.cli.main import cli
from cavvy.task_files import load_script

HEAD = '# /// script\n# dependencies = [\n#   "numpy>=2",\n#   "a b",\n# ]\n# ///\n'
DISTRIBUTED = "import torch.distributed as dist\ndist.init_process_group()\n"


def make(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def read(path: Path, *arguments: str, processes: int = 1) -> dict[str, object]:
    return read_script(path, path.read_text(), arguments, path.parent, processes=processes).keys


@pytest.mark.parametrize(
    ("name", "text", "is_one"),
    [
        ("train.py", "print(1)\n", True),
        ("run.sh", "echo\n", True),
        ("run", "#!/usr/bin/env python3\n", True),
        ("task", "#!/usr/bin/env -S cavvy run\nrun: x\n", False),
        ("job.sh", "#!/bin/bash\n#SBATCH -N 2\n", False),
        ("a.yaml", "#!/bin/sh\n", False),
        ("data.txt", "x\n", False),
    ],
)
def test_scripts_are_known(tmp_path: Path, name: str, text: str, is_one: bool) -> None:
    assert is_script(tmp_path / name, text) is is_one


@pytest.mark.parametrize(
    ("name", "text", "run"),
    [
        ("t.py", "x", "exec python3 t.py --lr '0 1'"),
        ("t.sh", "x", "exec bash t.sh --lr '0 1'"),
        ("t.sh", "#!/bin/sh -eu\nx", "exec sh -eu t.sh --lr '0 1'"),
        ("t", "#!/usr/bin/env -S python3.12 -u\nx", "exec python3 -u t --lr '0 1'"),
        ("t", "#!/usr/bin/perl\nx", "exec perl t --lr '0 1'"),
    ],
)
def test_commands(tmp_path: Path, name: str, text: str, run: str) -> None:
    assert read(make(tmp_path / name, text), "--lr", "0 1") == {"run": run}


def test_torchrun_is_put_before_what_uses_several_gpus(tmp_path: Path) -> None:
    script = make(tmp_path / "t.py", DISTRIBUTED)
    assert read(script) == {"run": "exec python3 t.py"}
    assert str(read(script, processes=8)["run"]).startswith('exec torchrun --nnodes "$NNODES" ')
    assert str(read(script, "-x", processes=8)["run"]).endswith(" t.py -x")
    plain = make(tmp_path / "p.py", "import torch\n")
    spawns = make(tmp_path / "s.py", DISTRIBUTED + "mp.spawn(main, nprocs=8)\n")
    for each in (plain, spawns):
        assert read(each, processes=8) == {"run": f"exec python3 {each.name}"}
    said = read_script(script, DISTRIBUTED, [], tmp_path, processes=8).notes
    assert said == (
        "t.py uses torch.distributed, so torchrun starts it once for each of the 8 GPUs",
    )


def test_dependencies_of_the_head(tmp_path: Path) -> None:
    script = make(tmp_path / "t.py", f"#!/usr/bin/env python3\n{HEAD}x\n")
    setup = read(script)["setup"]
    assert setup == {"run": "python3 -m pip install 'numpy>=2' 'a b'", "uses": []}
    make(tmp_path / "requirements.txt", "torch\n")  # the head is all that counts
    assert read(script)["setup"] == setup
    empty = make(tmp_path / "e.py", "# /// script\n# requires-python = '>=3.12'\n# ///\n")
    found = read_script(empty, empty.read_text(), [], tmp_path, processes=1)
    assert found.notes == ("e.py needs Python >=3.12; the node's own python3 runs it",)
    assert "setup" not in found.keys


INDEX = """\
# /// script
# dependencies = ["torch", "own"]
# [tool.uv.sources]
# torch = { index = "cpu" }
# own = WHERE
# [[tool.uv.index]]
# name = "cpu"
# url = "https://example.org/cpu"
# ///
"""


def test_a_head_with_a_table_for_uv_is_installed_by_uv(tmp_path: Path) -> None:
    """pip knows neither its indexes nor its repositories, and installed others of these names."""
    head = INDEX.replace("WHERE", '{ git = "https://example.org/own" }')
    setup = read(make(tmp_path / "t.py", f"#!/usr/bin/env python3\n{head}x\n"))["setup"]
    assert isinstance(setup, dict)
    assert setup["uses"] == []  # another edit of the script does not install all again
    begin, _, rest = setup["run"].partition("<<'END'\n")
    assert rest.startswith(f"{head}END\npython3 -m pip install uv && uv sync ")
    assert rest.endswith(' --script "$head"')
    assert begin.startswith("head=")


def test_a_head_that_names_a_package_by_its_path(tmp_path: Path) -> None:
    head = INDEX.replace("WHERE", '{ path = "..", editable = true }')
    script = make(tmp_path / "scripts/t.py", f"{head}x\n")
    setup = read_script(script, script.read_text(), [], tmp_path, processes=1).keys["setup"]
    assert "uses" not in setup  # the whole folder
    assert setup["run"].endswith(" --script scripts/t.py")
    with pytest.raises(ValueError, match=r"t.py:1: the head names a package at \.\., outside"):
        read_script(script, script.read_text(), [], tmp_path / "scripts", processes=1)


def test_a_project_whose_packages_pip_would_not_find_is_installed_by_uv(tmp_path: Path) -> None:
    script = make(tmp_path / "t.py", "x\n")
    project = "[project]\nname = 'x'\ndependencies = ['own']\n[tool.uv]\npackage = false\n"

    def run() -> object:
        setup = read(script)["setup"]
        assert isinstance(setup, dict)
        return setup["run"]

    make(tmp_path / "pyproject.toml", project)
    assert run() == "python3 -m pip install ."
    make(tmp_path / "pyproject.toml", f"{project}sources.own = {{ path = 'own' }}\n")
    assert run() == "python3 -m pip install uv && uv pip install --quiet ."
    make(tmp_path / "pyproject.toml", project)
    own = '[[package]]\nname = "own"\nsource = { registry = "https://example.org/simple" }\n'
    make(tmp_path / "uv.lock", own)
    assert "uv export" in str(run())
    make(tmp_path / "uv.lock", own + own.replace("simple", "cpu").replace("own", "other"))
    assert "uv sync" in str(run())
    make(tmp_path / "uv.lock", own)
    make(tmp_path / "uv.toml", "[[index]]\nurl = 'https://example.org/simple'\n")
    assert "uv sync" in str(run())
    make(tmp_path / "uv.toml", "[[package\n")
    make(tmp_path / "pyproject.toml", "tool = 3\nproject = 3\n")
    assert "uv export" in str(run())
    (tmp_path / "uv.lock").unlink()
    assert "setup" not in read(script)


def test_dependencies_of_the_nearest_file(tmp_path: Path) -> None:
    script = make(tmp_path / "src/t.py", "x\n")

    def setup() -> object:
        return read_script(script, "x\n", [], tmp_path, processes=1).keys.get("setup")

    assert setup() is None
    make(tmp_path / "pyproject.toml", "[tool.ruff]\n")
    assert setup() is None
    make(tmp_path / "pyproject.toml", "[project]\nname = 'x'\ndependencies = ['a']\n")
    assert setup() == {"run": "python3 -m pip install ."}
    make(tmp_path / "requirements.txt", "a\n")
    want = {"run": "python3 -m pip install -r requirements.txt", "uses": ["requirements.txt"]}
    assert setup() == want
    make(tmp_path / "uv.lock", "")
    found = setup()
    assert isinstance(found, dict)
    assert found["uses"] == ["uv.lock", "pyproject.toml"]
    make(tmp_path / "src/requirements.txt", "b\n")
    found = setup()
    assert isinstance(found, dict)
    assert found["uses"] == ["src/requirements.txt"]


def make_conda(folder: Path) -> Path:
    """Make a stand-in for conda. The python3 of its environment says that it runs, and lacks each
    module."""
    conda = make(
        folder / "conda",
        """#!/bin/sh
case "$1" in
env) mkdir -p "$5/bin" && cp "$7" "$5/"
  printf '#!/bin/sh\necho "in the environment: $*"\n[ "$1" != -c ] && [ -z "$NO_PIP" ]\n' > "$5/bin/python3"
  chmod +x "$5/bin/python3" ;;
shell.posix) echo "PATH='$3/bin':\\"\\$PATH\\"" ;;
esac
""",
    )
    conda.chmod(0o755)
    return conda


def test_an_environment_of_conda_is_made_with_its_tool(tmp_path: Path) -> None:
    script = make(tmp_path / "src/t.py", "x\n")
    make(
        tmp_path / "environment.yml",
        "name: a\ndependencies:\n  - conda-forge::numpy>=2\n  - pip:\n    - -r more.txt\n",
    )
    make(tmp_path / "more.txt", "six\n")
    found = read_script(script, "x\n", [], tmp_path, processes=1)
    setup = found.keys["setup"]
    assert setup["uses"] == ["environment.yml", "more.txt"]
    assert found.keys["run"].endswith("/activate\nexec python3 src/t.py")
    assert any("with conda, which the node needs" in each for each in found.notes)
    conda = make_conda(tmp_path / "bin")
    bare = {"PATH": "/usr/bin:/bin", "CAVVY_SETUP_DIR": str(tmp_path / "kept")}
    with_conda = {**bare, "PATH": f"{conda.parent}:{bare['PATH']}"}
    done = subprocess.run(
        ["sh", "-ec", setup["run"]], cwd=tmp_path, env=with_conda, capture_output=True, check=True
    )
    assert (tmp_path / "kept/conda/environment.yml").is_file(), done.stderr
    run = ["sh", "-ec", found.keys["run"]]
    done = subprocess.run(run, cwd=tmp_path, env=with_conda, capture_output=True, check=True)
    assert done.stdout == b"in the environment: src/t.py\n"
    fails = subprocess.run(
        ["sh", "-ec", setup["run"]], cwd=tmp_path, env=bare, capture_output=True, check=False
    )
    assert (fails.returncode, b"needs conda, mamba or micromamba" in fails.stderr) == (1, True)


def test_papermill_is_installed_in_the_environment_of_conda(tmp_path: Path) -> None:
    notebook = make(tmp_path / "nb.ipynb", json.dumps({"nbformat": 4, "cells": []}))
    make(tmp_path / "environment.yml", "dependencies: [numpy]\n")
    keys = read(notebook)
    (setup, run) = (keys["setup"], keys["run"])
    assert isinstance(setup, dict)
    conda = make_conda(tmp_path / "bin")
    # the node's own python3 is not what the notebook runs with
    make(conda.parent / "python3", "#!/bin/sh\necho outside\n").chmod(0o755)
    env = {"PATH": f"{conda.parent}:/usr/bin:/bin", "CAVVY_SETUP_DIR": str(tmp_path / "kept")}

    def start(line: object) -> tuple[int, str, str]:
        words = ["sh", "-ec", str(line)]
        done = subprocess.run(
            words, cwd=tmp_path, env=env, capture_output=True, check=False, text=True
        )
        return done.returncode, done.stdout, done.stderr

    asked = "in the environment: -c import ipykernel, papermill\n"
    installed = "in the environment: -m pip install papermill ipykernel\n"
    assert start(setup["run"])[:2] == (0, asked + installed)
    env["NO_PIP"] = "yes"
    code, _, said = start(setup["run"])
    assert (code, "needs papermill and ipykernel, or pip" in said) == (1, True)
    del env["NO_PIP"]
    assert start(run)[1].startswith("in the environment: -m papermill nb.ipynb ")


def test_names_of_folders_are_no_commands_of_a_setup(tmp_path: Path) -> None:
    folder = tmp_path / "a$(touch made) 'b"
    folder.mkdir()
    (folder / "environment.yml").write_text("dependencies: [numpy]\nvariables: {A: 1}\n")
    notes: list[str] = []
    found = read_conda(tmp_path, f"{folder.name}/environment.yml", notes)
    assert found is not None
    fails = subprocess.run(
        ["sh", "-ec", found.keys["run"]],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        check=False,
    )
    assert fails.stderr.decode().startswith(f"{folder.name}/environment.yml needs conda")
    assert not (tmp_path / "made").exists()
    (folder / "environment.yml").write_text("dependencies: [pip: [six]]\nvariables: {A: 1}\n")
    read_conda(tmp_path, f"{folder.name}/environment.yml", notes)
    assert "which only conda sets: state them with --env" in notes[-2]


def test_an_environment_that_only_pip_makes_needs_no_conda(tmp_path: Path) -> None:
    script = make(tmp_path / "t.py", "x\n")

    def setup(*lines: str) -> object:
        text = "dependencies:\n" + "".join(f"  {line}\n" for line in lines)
        make(tmp_path / "environment.yml", text)
        return read(script).get("setup")

    assert setup("- python=3.11", "- pip", "- pip:", "  - -r a.txt", "  - six>1") == {
        "run": "python3 -m pip install -r a.txt 'six>1'",
        "uses": ["environment.yml"],
    }
    assert setup("- pip:", "  - -e .") == {"run": "python3 -m pip install -e ."}
    assert setup("- python=3.11") is None
    for wrong in ("- [", "- *all"):
        with pytest.raises(ValueError, match=r"environment\.yml"):
            setup(wrong)


def test_an_environment_of_pixi(tmp_path: Path) -> None:
    script = make(tmp_path / "t.py", "x\n")
    make(tmp_path / "pixi.lock", "version: 6\n")
    found = read_script(script, "x\n", [], tmp_path, processes=1)
    assert ("setup" in found.keys, "no pixi.toml" in found.notes[0]) == (False, True)
    make(tmp_path / "pixi.toml", "[pypi-dependencies]\nown = {path = '.'}\n")
    found = read_script(script, "x\n", [], tmp_path, processes=1)
    assert ("setup" in found.keys, "by its path" in found.notes[0]) == (False, True)
    make(tmp_path / "pixi.toml", "[dependencies]\nnumpy = '*'\n")
    found = read_script(script, "x\n", [], tmp_path, processes=1)
    setup = found.keys["setup"]
    assert setup["uses"] == ["pixi.lock", "pixi.toml"]
    pixi = make(
        tmp_path / "bin/pixi",
        """#!/bin/sh
case "$1" in
install) test -f "$4" && test -f "${4%/*}/pixi.lock" ;;
shell-hook) echo 'SEEN=yes' ;;
esac
""",
    )
    pixi.chmod(0o755)
    env = {"PATH": f"{pixi.parent}:/usr/bin:/bin", "CAVVY_SETUP_DIR": str(tmp_path / "kept")}
    begin = found.keys["run"].partition("\n")[0]
    script_text = f"{setup['run']}\nSEEN=\n{begin}\necho $SEEN"
    done = subprocess.run(
        ["sh", "-ec", script_text], cwd=tmp_path, env=env, capture_output=True, check=True
    )
    assert done.stdout == b"yes\n"


def test_files_of_a_setup_are_sent_with_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "requirements.txt", "six\n")
    make(tmp_path / "src/t.py", "x\n")
    for words in (["validate", "src/t.py"], ["convert", "src/t.py"]):
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, done.output
    assert "workdir: ." in done.output
    assert "- requirements.txt" in done.output
    # an image runs the setup each time, and has no list of files
    done = CliRunner().invoke(cli, ["convert", "src/t.py", "--image", "python:3.12"])
    assert (done.exit_code, "uses" in done.output) == (0, False), done.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A=$(scontrol show hostname x | head -n 1)\n", "calls scontrol"),
        ("echo $SLURM_NODELIST\n", "uses $SLURM_NODELIST"),
        ("echo ${SLURM_JOB_ID:-0}\n", ""),
        ("ray job submit --address http://localhost:8265 -- python a.py\n", "starts none"),
        ("ray job submit \\\n  --no-wait -- python a.py\n", "starts none"),
        ("ray start --head\nray job submit -- python a.py\n", ""),
        ("ray job submit --address=http://cluster:8265 -- python a.py\n", ""),
        ("ray job submit --address=http://localhost-gw.example.org -- python a.py\n", ""),
        ("ray job submit --address='http://localhost' -- python a.py\n", "starts none"),
    ],
)
def test_what_only_batch_scripts_have_is_said(tmp_path: Path, text: str, said: str) -> None:
    script = make(tmp_path / "t.sh", text)
    notes = read_script(script, text, [], tmp_path, processes=1).notes
    assert [said in each for each in notes] == ([True] if said else [])


@pytest.mark.parametrize(
    ("text", "said"),
    [(f"{HEAD}x = 1\n{HEAD}", "appears twice"), (HEAD.replace("[", "{", 1), "t.py:1: the head")],
)
def test_a_wrong_head_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(make(tmp_path / "t.py", text))


@pytest.mark.parametrize("first", ["#!", "#! ", "#!/usr/bin/env", "#!///"])
def test_a_first_line_that_names_no_program(tmp_path: Path, first: str) -> None:
    with pytest.raises(ValueError, match=r"t:1: the line `#!` names no program"):
        read(make(tmp_path / "t", f"{first}\nx\n"))
    assert read(make(tmp_path / "t.py", f"{first}\nx\n")) == {"run": "exec python3 t.py"}


def test_a_link_to_a_file_with_another_name(tmp_path: Path) -> None:
    make(tmp_path / "store/4f2a", "print(1)\n")
    (tmp_path / "t.py").symlink_to("store/4f2a")
    assert read(tmp_path / "t.py") == {"run": "exec python3 store/4f2a"}


def test_heads_without_an_end_are_read_once(tmp_path: Path) -> None:
    """Reading each to the end of the file once took minutes."""
    text = "# /// script\n# x = 1\n" * 100_000
    assert read(make(tmp_path / "t.py", text)) == {"run": "exec python3 t.py"}
    other = HEAD.replace("script", "other", 1)
    assert "setup" not in read(make(tmp_path / "o.py", f"{other}x\n"))
    # as in the reference of the format, a head ends with its last such line
    within = HEAD.replace('#   "a b",', '#   """\n# ///\n#   """,')
    assert "setup" in read(make(tmp_path / "w.py", f"{within}x\n"))


def test_the_commands_take_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path / "repo")], check=True)
    script = make(tmp_path / "repo/train.py", DISTRIBUTED)
    monkeypatch.chdir(script.parent)
    result = CliRunner().invoke(cli, ["validate", "train.py", "-o", "json"])
    (found,) = json.loads(result.stdout)
    assert found["task"]["run"] == "exec python3 train.py"
    assert found["task"]["workdir"] == {"path": ".", "git": None, "commit": None}
    options = ["--gpu", "H100:8", "--limit", "1", "-o", "json"]
    result = CliRunner().invoke(cli, ["plan", "train.py", *options, "--", "--lr", "1"])
    assert "torchrun starts it once for each of the 8 GPUs" in result.stderr
    make(tmp_path / "repo/bad.py", f"{HEAD}x = 1\n{HEAD}")
    result = CliRunner().invoke(cli, ["plan", "bad.py"])
    assert (result.exit_code, "appears twice" in result.output) == (2, True)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("#BSUB -n 4\n./a\n", "lines of #BSUB are for LSF"),
        ("#$ -cwd\n./a\n", "lines of #$ are for Grid Engine"),
        ("#SBTACH --nodes=2\n./a\n", "#SBATCH may be meant"),
        ('id="$(sbatch a.sh)"\n', "the script calls sbatch"),
        ("A=1 \\\n  srun -n 2 ./a\n", "the script calls srun"),
        ("# srun ./a\necho sbatch\n", ""),
    ],
)
def test_what_a_plain_script_has_for_a_batch_system_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\n{lines}")
    found = load_script(tmp_path / "run.sh", ())
    assert found is not None
    assert said in "\n".join(found.notes)
    assert bool(said) == bool(found.notes)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("deepspeed --num_gpus 4 t.py", "starts 4 processes with deepspeed"),
        ("accelerate launch \\\n  --mixed_precision bf16 --num_processes=8 t.py", "--gpu A100:8"),
        ("torchrun --nproc_per_node 2 t.py\ntorchrun --nproc-per-node=4 t.py", "starts 4 proc"),
        ("python -m torch.distributed.launch --nproc_per_node=8 t.py", "torch.distributed.launch"),
        ("torchrun --nproc_per_node=$GPUS t.py", ""),
        ("# torchrun --nproc_per_node=8 t.py", ""),
        ("accelerate launch --cpu --num_processes 4 t.py", ""),
        ("accelerate launch --num_processes 4 --use_cpu t.py", ""),
        ("torchrun --nproc_per_node=1 t.py", ""),
        ("deepspeed t.py; ./x --num_gpus 4", ""),
    ],
)
def test_a_script_that_starts_processes_for_several_gpus_is_named(
    tmp_path: Path, lines: str, said: str
) -> None:
    script = make(tmp_path / "run.sh", f"#!/bin/bash\n{lines}\n")
    text = script.read_text()
    notes = read_script(script, text, [], tmp_path, processes=1).notes
    assert said in "\n".join(notes)
    assert len(notes) == bool(said)
    assert read_script(script, text, [], tmp_path, processes=4).notes == ()


@pytest.mark.parametrize(
    ("name", "text", "beside", "said"),
    [
        ("t.py", "# /// script\n# a = {deep}\n# ///\n", "", "is no TOML"),
        ("t.py", "x\n", "environment.yml", "nested deeper than 40 levels"),
        ("t.py", "x\n", "pixi.lock", "this is no TOML"),
        ("t.py", "x\n", "pyproject.toml", ""),
        ("t.sh", "#!/bin/bash\n" + "torchrun " * 100_000, "", ""),
    ],
)
def test_hostile_scripts_and_files_beside_them_end_at_once(
    tmp_path: Path, name: str, text: str, beside: str, said: str
) -> None:
    deep = "[" * 20_000 + "]" * 20_000
    script = make(tmp_path / name, text.replace("{deep}", deep))
    if beside:
        make(tmp_path / beside, f"dependencies: {deep}\n" if "yml" in beside else f"a = {deep}\n")
        make(tmp_path / "pixi.toml", f"a = {deep}\n")
    if not said:
        assert "setup" not in read(script)
        return
    with pytest.raises(ValueError, match=said):
        read(script)


def test_a_script_that_only_mentions_torch_distributed_starts_once(tmp_path: Path) -> None:
    script = make(tmp_path / "t.py", "  # torch.distributed.init_process_group()\nprint(1)\n")
    assert read(script, processes=4) == {"run": "exec python3 t.py"}


@pytest.mark.parametrize("option", ["--local_rank", "--local-rank"])
def test_a_script_that_wants_its_rank_as_an_option_gets_it(tmp_path: Path, option: str) -> None:
    asks = f"import argparse, sys\np.add_argument(\n    '{option}', type=int)\n{DISTRIBUTED}"
    run = str(read(make(tmp_path / "t.py", asks), "--lr", "0 1", processes=4)["run"])
    torchrun = make(tmp_path / "bin" / "torchrun", '#!/bin/bash\nshift 10\nshift; exec "$@"\n')
    torchrun.chmod(0o755)
    make(tmp_path / "t.py", "import sys; print(*sys.argv[1:], sep='|')")
    paths = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "LOCAL_RANK": "3"}
    done = subprocess.run(
        ["sh", "-c", run], cwd=tmp_path, env=paths, capture_output=True, text=True
    )
    assert done.stdout == f"{option}=3|--lr|0 1\n", done.stderr
    reads = make(tmp_path / "t.py", f"{asks}\nr = os.environ['LOCAL_RANK']")
    assert "--no-python" not in str(read(reads, processes=4)["run"])


def test_a_script_for_uv_is_installed_by_the_setup(tmp_path: Path) -> None:
    script = make(tmp_path / "t.py", f"#!/usr/bin/env -S uv run --script\n{HEAD}")
    assert read(script) == {
        "run": "exec python3 t.py",
        "setup": {"run": "python3 -m pip install 'numpy>=2' 'a b'", "uses": []},
    }


def test_only_the_start_of_a_script_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "t.py", f"{HEAD}x = '{'é' * 5_000_000}'\n")
    assert len(read_start(tmp_path / "t.py")) < 2_000_000
    result = CliRunner().invoke(cli, ["validate", "t.py"])
    assert result.exit_code == 0, result.output  # the job gets the file, a request does not
    assert "the setup installs what the head of t.py states" in result.output
