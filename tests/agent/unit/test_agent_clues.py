"""What the agent says about common failures: missing files, packages and commands."""

from pathlib import Path

import pytest

from cavvy.agent.config import ConfigFields, read_work
from cavvy.agent.failure_clues import FailureClues


def explain(output: str, path: str = "/nowhere", folder: str = "", **fields: object) -> str:
    work = {"job": "x", "job_id": "1", "project": "p", "attempt": 1, "run": "true", **fields}
    clues = FailureClues()
    clues.feed(b"a line\n" * 9999)
    for piece in output.encode().splitlines(keepends=True):
        clues.feed(piece)
    return clues.explain(read_work(ConfigFields(work, "work")), path, folder)


MISSING_FILES = [
    "/usr/bin/python3: can't open file '/a/work/train.py': [Errno 2] No such file or directory\n",
    "bash: train.sh: No such file or directory\n",
    "sh: 0: cannot open train.sh: No such file\n",
    "FileNotFoundError: [Errno 2] No such file or directory: 'config.yaml'\n",
    "ERROR: Could not open requirements file: [Errno 2]\n",
    "Error: Cannot find module '/a/work/train.js'\n",
    "make: *** No rule to make target 'train'.  Stop.\n",
    "make: *** No targets specified and no makefile found.  Stop.\n",
    "ERROR: file or directory not found: tests\n",
    "ERROR: . does not appear to be a Python project\n",
]


@pytest.mark.parametrize("output", MISSING_FILES)
def test_a_missing_file_of_an_empty_folder(output: str) -> None:
    told = explain(output)
    assert "started in an empty folder" in told
    assert "in a folder of their own, with `workdir: .`" in told
    assert "an empty folder" not in explain(output, workdir={"snapshot": "0"})
    assert explain(output, git={"url": "https://x/y", "commit": "0"}) == ""


def test_a_missing_file_of_a_submitted_folder() -> None:
    told = explain(MISSING_FILES[3], workdir={"snapshot": "0"})
    assert "files that .gitignore or .cavvyignore excludes are not submitted" in told
    assert explain("make: *** No rule to make target 'x'.\n", workdir={"snapshot": "0"}) == ""


@pytest.mark.parametrize(
    "output",
    [
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.csv'\n",
        "/a/run.sh: line 1: cd: /data/train.csv: No such file or directory\n",
        "python: can't open file '/data/train.csv': [Errno 2] No such file or directory\n",
    ],
)
def test_a_missing_file_outside_of_the_folder(output: str, tmp_path: Path) -> None:
    for fields in ({}, {"workdir": {"snapshot": "0"}}):
        told = explain(output, folder=str(tmp_path), **fields)
        assert "sees no /data/train.csv" in told
        assert "`inputs`" in told
        assert "workdir" not in told
    inside = output.replace("/data", str(tmp_path))
    assert "started in an empty folder" in explain(inside, folder=str(tmp_path))


@pytest.mark.parametrize(
    ("output", "known"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n", True),
        ("OSError: [Errno 28] No space left on device: 'log'\n", True),
        ("ModuleNotFoundError: No module named 'einops'\n", True),
        ("ImportError: cannot import name 'Net' from 'model'\n", True),
        ("OSError: [Errno 98] Address already in use\n", True),
        ("RuntimeError: failed finding central directory\n", False),
        ("FileNotFoundError: [Errno 2] No such file: 'ck/checkpoint-8/state.json'\n", False),
        ("_pickle.UnpicklingError: pickle data was truncated\n", False),
    ],
)
def test_a_known_cause_is_none_of_a_checkpoint(output: str, known: bool) -> None:
    clues = FailureClues()
    clues.feed(output.encode())
    assert clues.is_known() is known


@pytest.mark.parametrize("start", ["ck/", "{folder}/ck/", "/shared/"])
def test_a_missing_file_of_a_checkpoint_is_none_that_was_not_submitted(
    tmp_path: Path, start: str
) -> None:
    path = start.replace("{folder}", str(tmp_path)) + "checkpoint-8/trainer_state.json"
    told = explain(
        f"FileNotFoundError: [Errno 2] No such file or directory: '{path}'\n",
        folder=str(tmp_path),
        workdir={"snapshot": "0"},
        checkpoint={"path": "ck", "storage": "/shared"},
    )
    assert told.startswith("the checkpoint folder ck has no checkpoint-8/trainer_state.json: ")
    assert "ignore" not in told


def test_a_missing_module_names_the_python_that_ran(tmp_path: Path) -> None:
    for name in ("python", "python3"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    error = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'torch.nn'\n"
    told = explain(error, str(tmp_path), run="python3 train.py")
    assert told.startswith(f"the task's `python3`, {tmp_path}/python3, has no module torch: ")
    assert "`pip install PACKAGE` in `setup`" in told
    assert "if torch is a file of yours" in told
    assert "a file of yours" not in explain(error, workdir={"snapshot": "0"})
    assert f"{tmp_path}/python," in explain(error, str(tmp_path), run="python train.py")
    assert "which `setup` fills, has no module torch" in explain(error, setup="true")
    assert "the image pytorch/pytorch has no" in explain(error, image="pytorch/pytorch")
    assert "has no module pkg" in explain("/usr/bin/python3: No module named pkg.train\n")
    own = explain("ModuleNotFoundError: No module named 'cavvy'\n", setup="true")
    assert "`uses: [cavvy-VERSION-py3-none-any.whl]` in `setup` brings it along" in own
    assert "PACKAGE" not in own, "an index may have another project under this name"


@pytest.mark.parametrize(
    "output",
    [
        "/a/run.sh: line 1: python: command not found\n",
        "/a/run.sh: 1: python: not found\n",
        "/usr/bin/env: 'python': No such file or directory\n",
        "bash: line 1: exec: python: not found\n",
    ],
)
def test_a_missing_python(tmp_path: Path, output: str) -> None:
    assert explain(output) == "the task's PATH has no `python`: /nowhere"
    (tmp_path / "python3").write_text("")
    (tmp_path / "python3").chmod(0o755)
    told = explain(output, str(tmp_path))
    assert told == "the task's PATH has `python3`, but no `python`: write `python3` in the task"
    assert explain(output, image="alpine") == "the image alpine has no python"


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("/a/run.sh: line 1: nosuch: command not found\n", "the node has no program `nosuch`: "),
        ("bash: line 1: exec: pythn: not found\n", "the node has no program `pythn`: "),
        ("/a/run.sh: line 1: ./t.sh: Permission denied\n", "./t.sh is not executable: `chmod +x"),
        ("torch.OutOfMemoryError: CUDA out of memory.\n", "or share; `cavvy estimate`"),
        ("RuntimeError: Found no NVIDIA driver on your system\n", "`resources: {gpu: 1}`"),
        ("AssertionError: Torch not compiled with CUDA enabled\n", "is built without CUDA"),
        ("OSError: [Errno 28] No space left on device\n", "`resources: {disk: 100GB}`"),
        ("OSError: [Errno 98] Address already in use\n", "$MASTER_PORT"),
        ("Cannot access gated repo for url https://x\n", "`cavvy secret set HF_TOKEN`"),
        ("curl: (6) Could not resolve host: x\n", "could not be resolved"),
        ("EOFError: EOF when reading a line\n", "reads from its standard input"),
    ],
)
def test_common_failures_say_what_to_do(output: str, said: str) -> None:
    assert said in explain(output, workdir={"snapshot": "0"})


EVENTS_TAKEN = (
    "zmq.error.ZMQError: Address already in use (addr='tcp://[::ffff:127.0.0.1]:12001')\n"
)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            EVENTS_TAKEN,
            "uses port 12001, which was chosen for key-value events ($CAVVY_EVENTS_PORT",
        ),
        (
            "ERROR: [Errno 98] error while attempting to bind on address ('127.0.0.1', 12000): "
            "address already in use\n",
            "uses port 12000, which was chosen for requests ($PORT)",
        ),
        (
            "port: 20123, code: -98, name: EADDRINUSE, message: address already in use\n",
            "the ranks",
        ),
        (
            "OSError: [Errno 98] Address already in use: ('0.0.0.0', 8998)\n",
            "uses port 8998, which",
        ),
    ],
)
def test_a_port_in_use_is_named_with_its_purpose(output: str, said: str) -> None:
    ports = {"PORT": 12000, "CAVVY_EVENTS_PORT": 12001}
    told = explain(output, ports=ports, master_port=20123)
    assert said in told
    names = {"PORT", "CAVVY_EVENTS_PORT", "MASTER_PORT"}
    if "8998" not in output:
        assert sum(f"${each}" in told for each in names) == 1


def test_a_port_that_the_task_states_is_not_said_to_be_chosen() -> None:
    told = explain(
        "[Errno 98] bind on ('0.0.0.0', 8000): address already in use", env={"PORT": "8000"}
    )
    assert told == "another program of the node uses port 8000, which the task states in `port`"


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            "python3: can't open file '{folder}/trian.py': [Errno 2]\n",
            "trian.py; did you mean train",
        ),
        ("No such file or directory: 'trian.py'\n", "no trian.py; did you mean train.py?"),
        ("bash: data/a.csv: No such file or directory\n", "no data/a.csv"),
        ("No such file or directory: 'train.py'\n", ""),  # by now, the file exists
        ("No such file or directory: '/etc/nosuch'\n", ""),
        ("cat: /proc/nosuch: No such file or directory\n", ""),
    ],
)
def test_a_missing_file_of_the_working_folder_is_named(
    tmp_path: Path, output: str, said: str
) -> None:
    (tmp_path / "train.py").touch()
    work = {"job": "x", "job_id": "1", "project": "p", "attempt": 1, "run": "true"}
    clues = FailureClues()
    clues.feed(output.replace("{folder}", str(tmp_path)).encode())
    fields = ConfigFields({**work, "workdir": {"snapshot": "0"}}, "work")
    clue = clues.explain(read_work(fields), "/nowhere", str(tmp_path))
    assert said in clue if said else "the working folder of the job" not in clue


def test_other_failures_get_no_clue() -> None:
    assert explain("RuntimeError: shapes do not match\n") == ""
    assert explain("") == ""


@pytest.mark.parametrize(
    "output",
    [
        "bash: line 1: /etc/hosts: Read-only file system\n",
        "OSError: [Errno 30] Read-only file system: '/opt/model.pt'\n",
        "E: Failed to fetch http://x  Could not open file /var/x - open (30: Read-only file "
        "system)\nE: Unable to fetch some archives\n",
        "error: could not write config file /home/x/.gitconfig: Device or resource busy\n",
        "mv: cannot move 'a' to '/home/x/.bashrc': Device or resource busy\n",
    ],
)
def test_a_protected_file_of_the_machine(output: str) -> None:
    told = explain(output)
    assert "docs/guides/isolation.md" in told
    assert "new files in the home folder" in told
    assert explain(output, image="python:3.12") == ""


def test_a_volume_that_the_task_has_made_read_only() -> None:
    volume = {"kind": "named", "source": "models", "path": "/data/models", "read_only": True}
    told = explain("bash: /data/models/x: Read-only file system\n", volumes=[volume])
    assert told.startswith("the task mounts /data/models read-only: leave `:ro`")
    other = explain("bash: /data/models-2/x: Read-only file system\n", volumes=[volume])
    assert "isolation" in other
    written = {**volume, "read_only": False}
    assert "isolation" in explain(
        "bash: /data/models/x: Read-only file system\n", volumes=[written]
    )


def test_a_busy_gpu_is_no_protected_file() -> None:
    assert "isolation" not in explain("CUDA error: Device or resource busy\n")
