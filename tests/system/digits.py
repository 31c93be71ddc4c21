"""The digits training as tests run it: slowed down, and telling a digest of the weights that it
ends with.
"""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ARGUMENTS = ("--epochs", "6", "--width", "8")
SLOW = """
import hashlib, os, sys, time
for name in [name for name in os.environ if name.startswith(("OPENBLAS_", "MKL_"))]:
    del os.environ[name]
import torch
torch.set_num_threads(1)
sys.path.insert(0, ".")
import train
tell = train.Training.tell
def slowly(self, loss):
    tell(self, loss)
    time.sleep(float(os.environ.get("PAUSE_S", "1")))
train.Training.tell = slowly
code = train.main()
if code == 0:
    model = torch.load(os.environ["CAVVY_CHECKPOINT_DIR"] + "/state.pt", weights_only=True)["model"]
    digest = hashlib.sha256(b"".join(model[name].numpy().tobytes() for name in sorted(model)))
    print("weights", digest.hexdigest(), flush=True)
sys.exit(code)
"""


def write_digits(work: Path, *, pytorch: bool = False) -> None:
    """Into a working folder, as `slow.py`: the training by NumPy, or the example with PyTorch, which
    takes ten times the time to start.
    """
    if not pytorch:
        training = Path(__file__).with_name("digits_training.py")
        (work / "slow.py").write_bytes(training.read_bytes())
        return
    example = Path(__file__).parents[2] / "examples/digits/train.py"
    (work / "train.py").write_bytes(example.read_bytes())
    (work / "slow.py").write_text(SLOW)


@functools.cache
def train_undisturbed(*, pytorch: bool = False) -> str:
    """The digest of the weights of the same training, run here in one piece, once a process."""
    with tempfile.TemporaryDirectory(prefix="cavvy-digits-") as folder:
        work, checkpoints = Path(folder, "work"), Path(folder, "checkpoints")
        work.mkdir()
        checkpoints.mkdir()
        write_digits(work, pytorch=pytorch)
        environ = {**os.environ, "CAVVY_CHECKPOINT_DIR": str(checkpoints), "PAUSE_S": "0"}
        command = [sys.executable, "slow.py", *ARGUMENTS]
        done = subprocess.run(
            command, cwd=work, env=environ, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("weights ")[1].split()[0]
