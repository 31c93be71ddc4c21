"""Launchers of processes are told of the other nodes of a job."""

import shlex
import subprocess
import sys

import pytest

from cavvy.cli.task.launch_lines import add_other_nodes

NODE = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "7"}


def run(line: str) -> list[str]:
    """The words that a line has on a node."""
    program = f"{sys.executable} -c 'import sys; print(*sys.argv[1:], sep=chr(10))' "
    env = {**NODE, "NPROC_PER_NODE": "8", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["sh", "-c", program + line], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.split("\n")[:-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "accelerate launch train.py --name 'a b'",
            "accelerate launch --num_machines 2 --machine_rank 1 --main_process_ip h "
            "--main_process_port 7 --num_processes 16 train.py --name",
        ),
        (
            "torchrun --nproc_per_node=4 a.py",
            "torchrun --nnodes 2 --node-rank 1 --master-addr h --master-port 7 --nproc_per_node=4",
        ),
        (
            "fabric run a.py",
            "fabric run --num-nodes 2 --node-rank 1 --devices 8 --main-address h --main-port 7 a.py",
        ),
    ],
)
def test_a_launcher_is_told_of_the_other_nodes(words: str, said: str) -> None:
    found = add_other_nodes(shlex.split(words))
    assert found is not None
    given = run(found[0])
    assert " ".join(given).startswith(said)
    assert given[-1] == shlex.split(words)[-1]


@pytest.mark.parametrize(
    "words",
    [
        "python train.py",
        "torchrun --standalone a.py",
        "torchrun --rdzv_endpoint=x:1 a.py",
        "accelerate launch --machine_rank 0 a.py",
        "accelerate config",
    ],
)
def test_other_commands_stay_as_they_are(words: str) -> None:
    assert add_other_nodes(words.split()) is None
