"""Real trainers, each with data workers, save when they get a notice and go on at this step.

`scripts/drills/notice_trainers.py` does the same through a server, and with long saves.
"""

import re
import sys
from pathlib import Path

import pytest
from scripts.drills.notice_trainers import HEAD, TRAINERS
from tests.system.agent_server import make_rig
from tests.system.workload_packages import PACKAGES_OF_TESTS, find_folder, find_python, install
from tests.waits import PATIENCE_S

pytestmark = pytest.mark.system
SAVE_S = 3.0  # long for its helpers, which a signal to all would have ended by then
NEEDS = {
    "accelerate": ("accelerate",),
    "transformers": ("transformers", "accelerate"),
    "lightning": ("lightning",),
    "keras": ("keras",),
    "jax": ("jax",),
    "orbax": ("orbax", "jax"),
}


def find(trainer: str) -> str:
    """A Python that has the trainer; skips where there is none."""
    if trainer in ("plain", "stages", "script", "torchrun", "cavvy"):
        pytest.importorskip("torch")
        return sys.executable
    if trainer == "mpi":
        python = find_folder("workloads-mpi") / "bin" / "python"
        why = install("workloads-mpi")
    else:
        found, why = find_python(NEEDS[trainer])
        python = Path(found or "")
    if why:
        pytest.skip(
            f"{trainer} is not to be had: {why}; where pip reaches an index, this test installs it"
        )
    return str(python)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_trainer_saves_on_a_notice_and_goes_on_at_this_step(trainer: str, tmp_path: Path) -> None:
    python = find(trainer)
    _, program, command = TRAINERS[trainer]
    run = command.format(python=python, bin=Path(python).parent)
    work = {
        "run": f"cat >train.py <<'END'\n{HEAD}{program}END\n{run}; echo NEXT",
        "env": {**PACKAGES_OF_TESTS, "SAVE_S": str(SAVE_S), "OMP_NUM_THREADS": "1"},
        "checkpoint": {"path": "ckpt", "storage": str(tmp_path)},
    }
    saved = "0"
    for _ in range(2):  # the second attempt begins where the first one ended
        with make_rig(**work) as rig:
            rig.launch()
            rig.until(lambda rig=rig: "\nSTEP" in rig.output())
            rig.stub.give("notice", 600)
            assert rig.agents[-1].wait(PATIENCE_S) == 0, rig.said()
            output = rig.output()
            assert re.findall(r"(?m)^START (\d+)", output) == [saved], output
            [saved] = re.findall(r"(?m)^SAVED (\d+)", output)
            assert not {"NEXT", "three"} & {*output.splitlines()}
            assert rig.exited()["outcome"] == "preempted"
