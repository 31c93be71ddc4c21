"""A pool as the cloud nodes of a Slurm cluster: names of nodes, programs and lines of slurm.conf."""

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tests.cli.unit.test_cli_layout import POOL

from cavvy.capabilities.clusters import slurm
from cavvy.capabilities.clusters.slurm import _make_conf, _make_program, find_pools
from cavvy.capabilities.clusters.wire import PoolShapeView
from cavvy.cli.view.failure import CommandFailure
from cavvy.client import ApiError
from cavvy.domain.values import replace


def test_a_node_belongs_to_the_pool_in_its_name() -> None:
    assert find_pools("burst-[1-2,07],gpu-a100-3") == {
        "burst": ["burst-1", "burst-2", "burst-07"],
        "gpu-a100": ["gpu-a100-3"],
    }


@pytest.mark.parametrize(
    "hostlist",
    ["", "-p", "burst", "burst-[1-", "burst-[a-b]", "$(id)-1", "burst-[1-999999999]", "a b-1"],
)
def test_a_wrong_list_of_nodes(hostlist: str) -> None:
    with pytest.raises(CommandFailure):
        find_pools(hostlist)


def test_a_program_works_where_it_can_write_no_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slurmctld runs the programs as SlurmUser, who may not own their folder."""
    command = tmp_path / "command"
    command.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\n')
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(command))
    program = tmp_path / "resume"
    program.write_text(_make_program("slurm-resume", "lab", tmp_path))
    (tmp_path / "log").mkdir()  # nobody can append to it, not even root
    done = subprocess.run(["sh", program, "burst-[1-3]"], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    called = (tmp_path / "called").read_text()
    assert called == "-m cavvy pool slurm-resume -p lab -- burst-[1-3]\n"


def test_the_lines_state_what_the_smallest_node_has() -> None:
    shape = PoolShapeView(
        cpus=64,
        memory_mib=512_000,
        gpus=8,
        gpu="A100-80GB",
        architecture="",
        labels={},
        rate_micros_per_hour=1,
    )
    lines = _make_conf(replace(POOL, name="burst", max=4), shape, Path("/etc/slurm/cavvy"))
    assert (
        "NodeName=burst-[1-4] CPUs=64 RealMemory=486400 Gres=gpu:a100-80gb:8 State=CLOUD\n" in lines
    )
    assert "ResumeProgram=/etc/slurm/cavvy/resume\n" in lines


def test_a_pool_that_refuses_keeps_no_other_pool_from_its_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slurm, "session", nullcontext)
    sent: list[str] = []

    def send(client: Any, project: str, pool: str, nodes: Any) -> list[Any]:
        if pool == "full":
            raise ApiError("too-many", "the pool is full")
        sent.extend(nodes)
        return []

    with pytest.raises(CommandFailure, match="full-1: the pool is full"):
        slurm._send("full-1,burst-[1-2]", "p", send, "starting")
    assert sent == ["burst-1", "burst-2"]
