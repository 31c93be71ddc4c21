"""How processes end: a rank that fails leaves the others, and its own exit code, at once."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from tests.waits import PATIENCE_S

SCRIPT = """
import sys, torch
from cavvy import train

def main():
    run = train.Run("checkpoints", plan=train.Plan(), device="cpu")
    model = run.model(lambda: torch.nn.Linear(2, 1))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    data = run.data(train.Tensors(torch.ones(40, 2)), global_batch=4)
    for batch in run.batches(data, epochs=100):
        run.accumulate(lambda part: model(part[0]).mean(), batch)
        run.step(optimizer)
        if run.steps == 3 and run.world.rank == 1:
            raise KeyError("planted")

if __name__ == "__main__":
    main()
"""


def test_a_rank_that_fails_keeps_nobody_waiting(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(SCRIPT)
    store = dist.TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    ranks = []
    for rank in range(2):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1",
        }
        env |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        command = [sys.executable, "fails.py"]
        ranks.append(
            subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
        )
    try:
        said = [rank.communicate(timeout=PATIENCE_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert "KeyError: 'planted'" in said[1]
    assert [rank.returncode for rank in ranks] == [1, 1]
