"""The program that starts MPI on a gang without SSH: ranks find each other, strangers do not."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.system.ports import free_port

from cavvy.agent.work import mpi

PROGRAM = Path(mpi.__file__)
# In place of mpirun: asks the remote shell for a command on the second host, as mpirun does for its
# daemon.
LAUNCHER = """
import os, subprocess, sys
done = subprocess.run([os.environ["OMPI_MCA_plm_rsh_agent"], "-x", "user@second", "echo", "$NODE_RANK", "of",
                       "$NNODES;", "echo", "bad", ">&2;", "exit", "5"], capture_output=True, text=True)
print(done.stdout.strip(), done.stderr.strip(), done.returncode)
other = subprocess.run([os.environ["OMPI_MCA_plm_rsh_agent"], "third", "true"], capture_output=True, text=True)
print(other.returncode, other.stderr.strip())
print(open(os.environ["OMPI_MCA_orte_default_hostfile"]).read().split())
sys.exit(3)
"""


@pytest.fixture
def port() -> int:
    return free_port() - 1  # the first rank listens at the next port


def start(
    folder: Path,
    rank: int,
    port: int,
    key: str = "key",
    *,
    command: str = LAUNCHER,
    hosts: str = "first,second",
    master: str = "127.0.0.1",
) -> subprocess.Popen[str]:
    home = folder / str(rank)
    home.mkdir(parents=True)
    (home / "mpi.py").write_bytes(PROGRAM.read_bytes())
    env = {
        **os.environ,
        **{
            "NODE_RANK": str(rank),
            "NNODES": "2",
            "CAVVY_HOSTS": hosts,
            "CAVVY_MPI_KEY": key,
        },
        **{"MASTER_ADDR": master, "MASTER_PORT": str(port), "NPROC_PER_NODE": "2"},
    }
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(home / "mpi.py"), sys.executable, "-c", command],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("inner", ["near", "/".join(["deep" * 10] * 4)])
def test_the_launcher_runs_commands_on_other_ranks(tmp_path: Path, port: int, inner: str) -> None:
    """The path of a Unix socket has at most 107 bytes, and the folder of a node may be deeper."""
    ranks = [start(tmp_path / inner, rank, port) for rank in range(2)]
    (said, wrong), _ = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [3, 3], wrong
    lines = said.splitlines()
    assert lines[0] == "1 of 2 bad 5"
    assert lines[1].startswith("255 cavvy: third: no such host")
    assert lines[2] == "['first', 'slots=2', 'second', 'slots=2']"


def test_ranks_with_only_ipv6_addresses_meet(tmp_path: Path, port: int) -> None:
    """Hydra takes the first colon of a line for the start of the count, so it gets other names."""
    command = """
import os, subprocess
shell, file = os.environ["HYDRA_LAUNCHER_EXEC"], os.environ["HYDRA_HOST_FILE"]
names = [line.rpartition(":")[0] for line in open(file).read().split()]
print(names, *(subprocess.run([shell, host, "exit", "5"]).returncode for host in (names[1], "::2")))
"""
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    hosts = "::1,::2"
    ranks = [
        start(tmp_path, rank, port, command=command, hosts=hosts, master="::1") for rank in range(2)
    ]
    (said, wrong), _ = [rank.communicate(timeout=60) for rank in ranks]
    assert said == "['localhost', 'cavvy-rank-1'] 5 5\n", wrong


def test_a_host_with_two_ranks_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI 5 takes no list that names one twice with its slots."""
    monkeypatch.setenv("NPROC_PER_NODE", "2")
    variables = mpi.launcher_variables(str(tmp_path), ["one", "two", "one"])
    assert (
        Path(variables["PRTE_MCA_prte_default_hostfile"]).read_text()
        == "one slots=4\ntwo slots=2\n"
    )
    assert Path(variables["HYDRA_HOST_FILE"]).read_text() == "one:4\ntwo:2\n"


def test_a_rank_with_another_key_is_a_stranger(tmp_path: Path, port: int) -> None:
    leader = start(tmp_path, 0, port)
    stranger = start(tmp_path, 1, port, "other")
    assert stranger.wait(60) == 1
    (tmp_path / "again").mkdir()
    member = start(tmp_path / "again", 1, port)
    assert member.wait(60) == 3
    leader.communicate(timeout=60)
    member.communicate()
    stranger.communicate()
    assert leader.returncode == 3


def test_ranks_leave_when_the_first_is_gone(tmp_path: Path, port: int) -> None:
    ranks = [
        start(tmp_path, rank, port, command="import time; print(1, flush=True); time.sleep(4)")
        for rank in (0, 1)
    ]
    assert ranks[0].stdout is not None
    assert ranks[0].stdout.readline() == "1\n"
    ranks[0].kill()
    _, wrong = ranks[1].communicate(timeout=60)
    assert ranks[1].returncode == 1
    assert "rank 0 has disconnected" in wrong
    ranks[0].communicate()
