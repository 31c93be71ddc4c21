"""How processes end: a rank that fails leaves the others, and its own exit code, at once. Cavvy's
agent learns which rank failed first, and why.
"""

import json
import os
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.train import ranks
from tests.train.torch.test_train_torchrun import torchrun
from tests.waits import PATIENCE_S

from cavvy.agent.work.python_start import LAUNCHER
from cavvy.train import world
from cavvy.train.world import SILENT, describe, is_lost_connection

SCRIPT = """
import os, sys, threading, time, torch
from cavvy import train
from cavvy.train import world

def main():
    world.GRACE_S = 0.5
    run = train.Run("checkpoints", plan=train.Plan(), device="cpu")
    model = run.model(lambda: torch.nn.Linear(2, 1))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    data = run.data(train.Tensors(torch.ones(40, 2)), global_batch=4)
    for batch in run.batches(data, epochs=100):
        run.accumulate(lambda part: model(part[0]).mean(), batch)
        run.step(optimizer)
        if run.steps == 3 and run.world.rank == int(sys.argv[2]):
            if sys.argv[1] == "killed":
                os.kill(os.getpid(), 9)
            if sys.argv[1] == "hanging":  # its connections stay open
                threading.Thread(target=time.sleep, args=(1000,)).start()
            raise KeyError("planted")

if __name__ == "__main__":
    main()
"""
PLANTED = "KeyError: 'planted'"


class Agent:
    """The agent's end of the notification socket. It keeps what the ranks send."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(path)
        self._socket.listen(64)  # nothing is accepted before the end
        self._socket.settimeout(0.1)

    def heard(self) -> list[Any]:
        found = []
        with suppress(TimeoutError):
            while True:
                with self._socket.accept()[0] as line:
                    found += [json.loads(each) for each in line.makefile()]
        self._socket.close()
        self.started = sorted(each["started"]["process"] for each in found if "started" in each)
        failed = [each["failed"] for each in found if "failed" in each]
        assert {each.pop("process") for each in failed} <= {*self.started}
        return failed


def run_ranks(folder: Path, *args: str) -> tuple[list[int], list[str], list[Any]]:
    """Start two ranks without torchrun. Returns their exit codes, stderr, and reports."""
    (folder / "fails.py").write_text(SCRIPT)
    store = dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    agent = Agent(str(folder / "notice"))
    scripts = []
    for rank in range(2):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1",
            "CAVVY_NOTICE": str(folder / "notice"),
        }
        env |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        scripts.append(ranks.Script([str(folder / "fails.py"), *args], env, folder))
    codes, _, said = zip(*(script.result() for script in scripts), strict=True)
    heard = agent.heard()
    assert agent.started == [0, 1]
    return [*codes], [*said], heard


@pytest.mark.parametrize("how", ["raising", "hanging"])
def test_a_rank_that_fails_keeps_nobody_waiting(how: str, tmp_path: Path) -> None:
    codes, said, heard = run_ranks(tmp_path, how, "1")
    assert PLANTED in said[1]
    assert codes == [1, 1]
    assert heard == [{"rank": 1, "ranks": 2, "error": PLANTED}] * 2
    if how == "hanging":
        assert f"rank 1 failed, so this rank ends: {PLANTED}" in said[0]


def test_a_rank_that_is_killed_is_found_by_the_others(tmp_path: Path) -> None:
    codes, _, heard = run_ranks(tmp_path, "killed", "0")
    assert codes == [-9, 1]
    assert heard == [{"rank": 0, "ranks": 2, "error": SILENT}]


@pytest.mark.parametrize(("how", "error"), [("raising", PLANTED), ("killed", SILENT)])
def test_under_torchrun_the_agent_learns_which_rank_failed(
    how: str, error: str, tmp_path: Path
) -> None:
    (tmp_path / "fails.py").write_text(SCRIPT)
    agent = Agent(str(tmp_path / "notice"))
    code, said = torchrun(
        tmp_path / "fails.py", how, "1", cwd=tmp_path, notice=str(tmp_path / "notice")
    )
    heard = agent.heard()
    assert code == 1, said
    assert heard, said
    assert all(each == {"rank": 1, "ranks": 2, "error": error} for each in heard)


def test_one_process_reports_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = Agent(str(tmp_path / "notice"))
    monkeypatch.setenv("CAVVY_NOTICE", str(tmp_path / "notice"))
    before = sys.excepthook
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)  # else it prints a traceback
    watch = world.FailureWatch(None, 0, 1)
    sys.excepthook(KeyError, KeyError("planted"), None)
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    watch.close()
    monkeypatch.setattr(sys, "excepthook", before)
    assert agent.heard() == [{"rank": 0, "ranks": 1, "error": PLANTED}]


def test_a_copy_of_a_kept_launcher_does_not_search_for_a_silent_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher hears the error, and the server knows which node was lost."""
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    lost = RuntimeError("[/pytorch/third_party/gloo/pair.cc:1] closed")
    for is_forked in (True, False):
        if is_forked:
            monkeypatch.setitem(sys.modules, LAUNCHER, world)
        else:
            monkeypatch.delitem(sys.modules, LAUNCHER)
            monkeypatch.setattr(world, "ANSWER_S", 0.1)
        store = dist.HashStore()
        watch = world.FailureWatch(store, 1, 2)
        sys.excepthook(RuntimeError, lost, None)
        assert store.check([world.SEARCH]) != is_forked
        assert store.check([world.FIRST]) != is_forked
        watch.close()


def test_an_error_is_described_by_its_first_line() -> None:
    assert describe(ValueError("one\ntwo")) == "ValueError: one"
    assert describe(ValueError()) == "ValueError"
    assert len(describe(ValueError("x" * 1000))) == world.LONGEST


def test_errors_of_collectives_may_be_the_result_of_another_error() -> None:
    assert not is_lost_connection(ValueError("gloo"))
    assert is_lost_connection(dist.DistBackendError("NCCL"))
    assert is_lost_connection(RuntimeError("[/pytorch/third_party/gloo/pair.cc:1] closed"))
    assert not is_lost_connection(RuntimeError("planted"))


def test_errors_of_collectives_are_found_by_a_pytorch_without_a_type_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(dist, "DistError")
    assert is_lost_connection(RuntimeError("[/pytorch/third_party/gloo/pair.cc:1] closed"))
    assert not is_lost_connection(RuntimeError("planted"))
