"""Files of `accelerate config`, with the script that they launch."""

from pathlib import Path

import pytest

from cavvy.spec import SpecError
from cavvy.task_files import load_script, parse_file

CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: {kind}
num_machines: {nodes}
num_processes: {processes}
mixed_precision: bf16
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(kind: str = "MULTI_GPU", nodes: int = 1, processes: int = 8, more: str = "") -> str:
    return CONFIG.format(kind=kind, nodes=nodes, processes=processes) + more


def read(folder: Path, text: str, *words: str) -> tuple[dict[str, object], str]:
    (folder / "a.yaml").write_text(text)
    found = load_script(folder / "a.yaml", words or ("train.py", "--lr", "1"))
    assert found is not None
    return found.keys, "\n".join(found.notes)


def test_processes_become_nodes_and_gpus(folder: Path) -> None:
    (folder / "train.py").write_text("")
    (folder / "requirements.txt").write_text("six\n")
    keys, said = read(folder, make("FSDP", 2, 16, "main_process_ip: 10.0.0.1\ngpu_ids: 1,3\n"))
    assert (keys["nodes"], keys["resources"]) == (2, {"gpu": "any:8"})
    run = str(keys["run"])
    assert run.startswith('exec accelerate launch --config_file a.yaml --num_machines "$NNODES"')
    assert run.endswith('"$MASTER_PORT" --gpu_ids all train.py --lr 1')
    assert "--num_processes $((NNODES * NPROC_PER_NODE))" in run
    assert "main_process_ip, gpu_ids" in said
    assert "requirements.txt" in said


def test_kinds(folder: Path) -> None:
    keys, _ = read(folder, make("DEEPSPEED", processes=2))
    assert "--deepspeed_multinode_launcher standard train.py" in str(keys["run"])
    keys, _ = read(folder, make("MULTI_CPU", processes=4))
    assert "resources" not in keys
    assert "--num_processes 4" in str(keys["run"])
    keys, _ = read(folder, make("NO", processes=1, more="use_cpu: true\n"))
    assert "resources" not in keys


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (make("XLA"), "distributed_type XLA is not supported"),
        (make(nodes=3), "8 processes cannot be shared by 3 machines"),
        (make(processes=0), "num_processes: 0 is no number"),
        (make().replace("LOCAL_MACHINE", "AMAZON_SAGEMAKER"), "is for SageMaker"),
    ],
)
def test_mistakes(folder: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(folder, text)


def test_a_config_alone_says_what_it_lacks() -> None:
    with pytest.raises(SpecError, match="it says how to launch a script, not which") as error:
        parse_file(make(), file="a.yaml")
    assert "cavvy run a.yaml -- train.py" in str(error.value)


def test_other_files_are_none(folder: Path) -> None:
    (folder / "b.yaml").write_text("run: echo distributed_type\nresources: {cpu: 1}\n")
    assert load_script(folder / "b.yaml", ("x",)) is None
