"""Stand-ins for the trainers of transformers and Lightning: they call the documented hooks in the
documented order, and record which samples each step trains.
"""

import json
import os
import signal
import sys
from pathlib import Path
from time import sleep
from types import ModuleType, SimpleNamespace
from typing import Any

import torch.distributed as dist
from tests.train.programs import Say
from torch.utils.data import BatchSampler, DataLoader

SAMPLES, EPOCHS = 22, 3
EVALUATION_S = 0.3
HOOKS = ("train_begin", "epoch_begin", "step_end", "evaluate", "save", "epoch_end", "train_end")


class TrainerCallback:
    """Has each hook, as that of transformers does."""


for hook in HOOKS:
    setattr(TrainerCallback, f"on_{hook}", lambda self, args, state, control, **more: None)


class HuggingFaceTrainer:
    """Deals the batches of its sampler to the ranks in turn, as transformers does by accelerate."""

    def __init__(self, folder: str, batch: int, ranks: int, rank: int, accumulate: int) -> None:
        self.args = SimpleNamespace(
            output_dir=folder,
            train_batch_size=batch,
            gradient_accumulation_steps=accumulate,
            world_size=ranks,
            seed=3,
            data_seed=None,
        )
        self.train_dataset, self.rank = range(SAMPLES), rank
        self.state, self.control = (
            SimpleNamespace(global_step=0),
            SimpleNamespace(should_save=False),
        )
        self.callbacks: list[Any] = []
        self.evaluates = False
        self.seen: list[list[int]] = []

    def add_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        raise AssertionError("the sampler of Cavvy is used instead")

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        args = self.args
        if resume_from_checkpoint is not None:
            path = Path(resume_from_checkpoint) / "trainer_state.json"
            self.state.global_step = json.loads(path.read_text())["global_step"]
        sampler = self._get_train_sampler(self.train_dataset)
        batches = BatchSampler(sampler, args.train_batch_size, drop_last=False)
        count = args.gradient_accumulation_steps
        per_epoch = len(batches) // args.world_size // count
        self._call("train_begin")
        for _ in range(self.state.global_step // per_epoch, EPOCHS):
            self._call("epoch_begin")
            own = list(batches)[self.rank :: args.world_size]
            for step in range(self.state.global_step % per_epoch, per_epoch):
                part = own[step * count : (step + 1) * count]
                self.seen.append([number for batch in part for number in batch])
                self.state.global_step += 1
                self._call("step_end")
                if self.evaluates:
                    sleep(EVALUATION_S)
                    self._call("evaluate")
                if self.control.should_save:
                    self._save()
                    self._call("save")
                self.control.should_save = False
            self._call("epoch_end")
        self._call("train_end")

    def _call(self, event: str) -> None:
        for callback in self.callbacks:
            answer = getattr(callback, f"on_{event}")(
                self.args, self.state, self.control, model=None
            )
            self.control = self.control if answer is None else answer

    def _save(self) -> None:
        path = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        path.mkdir(parents=True, exist_ok=True)
        (path / f"rng_state_{self.rank}.pth").write_text("r")
        if self.rank == 0:
            (path / "trainer_state.json").write_text(json.dumps(vars(self.state)))


class Callback:
    """Has each hook, as that of Lightning does."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_train_start(self, trainer: Any, pl_module: Any) -> None: ...
    def on_train_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None: ...
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None: ...
    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None: ...


class LightningTrainer:
    """Ends without an exit code after SIGTERM and the next batch, as that of Lightning does."""

    def __init__(self, callback: Any, ranks: int, rank: int) -> None:
        self.world_size, self.rank, self.callback = ranks, rank, callback
        self.accumulate_grad_batches = 1
        self.seen: list[list[int]] = []
        self._progress = {"total": {"ready": 0}, "current": {"ready": 0}}
        self._is_told = False

    def fit(self, model: Any, loader: Any, ckpt_path: str | None = None) -> None:
        if ckpt_path is not None:
            saved = json.loads(Path(ckpt_path).read_text())
            self.callback.on_load_checkpoint(self, model, saved)
            self._progress = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        self.callback.on_fit_start(self, model)
        before = signal.signal(signal.SIGTERM, self._hear)
        try:
            self._train(model, loader)
        except BaseException as error:
            self.callback.on_exception(self, model, error)
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
        self.callback.on_fit_end(self, model)

    def _hear(self, number: int, frame: object) -> None:
        self._is_told = True

    def _train(self, model: Any, loader: Any) -> None:
        self.callback.on_sanity_check_start(self, model)
        self.callback.on_train_start(self, model)
        total, current = self._progress["total"], self._progress["current"]
        while total["ready"] < EPOCHS * len(loader):
            if current["ready"] == len(loader):
                current["ready"] = 0
            for batch in loader:
                if current["ready"] % self.accumulate_grad_batches == 0:
                    self.seen.append([])
                self.seen[-1] += batch.tolist()
                total["ready"] += 1
                current["ready"] += 1
                self.callback.on_train_batch_end(self, model, None, batch, current["ready"] - 1)
                if self._is_told:
                    raise SystemExit
        self.callback.on_train_end(self, model)

    def save_checkpoint(self, path: Path) -> None:
        loops = {"fit_loop": {"epoch_loop.batch_progress": self._progress}}
        if self.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"loops": loops}))
        if self.world_size > 1:
            dist.barrier()


def install() -> None:
    """Make the stand-ins importable as the packages that they stand in for."""
    for name, attributes in (
        ("transformers", {"TrainerCallback": TrainerCallback}),
        ("lightning", {}),
        ("lightning.pytorch", {"Callback": Callback}),
    ):
        module = ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module


def start(kind: str, ranks: int, rank: int, batch: int, accumulate: int) -> Any:
    """A trainer that follows Cavvy, and the function that trains."""
    install()
    if kind == "huggingface":
        from cavvy.train.trainers.huggingface import follow

        guest = HuggingFaceTrainer("out", batch, ranks, rank, accumulate)
        newest = follow(guest, save_every=0)
        return guest, lambda: guest.train(resume_from_checkpoint=newest)
    from cavvy.train.trainers.lightning import LightningCallback
    from cavvy.train.trainers.watch import RankBatches

    batches = RankBatches(SAMPLES, batch=batch, global_batch=batch * ranks * accumulate, seed=3)
    cavvy = LightningCallback(batches, "out", save_every=0)
    trainer = LightningTrainer(cavvy, ranks, rank)
    loader = DataLoader(range(SAMPLES), batch_sampler=batches)  # type: ignore[arg-type]
    newest = cavvy.newest()
    return trainer, lambda: trainer.fit(None, loader, ckpt_path=newest)


def train(
    say: Say,
    kind: str,
    batch: int,
    accumulate: int,
    leave_at: int,
    rank_told: int,
    by_signal: bool = False,
) -> tuple[list[list[int]], int | None, list[str]]:
    """The samples of each step of this rank, the exit code, and the complete checkpoints. The rank
    `rank_told` gets a notice at the step `leave_at`, in a file or by SIGTERM.
    """
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    os.environ["CAVVY_NOTICE_FILE"] = f"notice-{rank}"
    if ranks > 1:
        dist.init_process_group("gloo")
    guest, work = start(kind, ranks, rank, batch, accumulate)
    code: Any = None

    class Steps(list[list[int]]):
        def append(self, step: list[int]) -> None:
            super().append(step)
            if len(self) == leave_at and rank == rank_told and by_signal:
                os.kill(os.getpid(), signal.SIGTERM)
            elif len(self) == leave_at and rank == rank_told:
                Path(f"notice-{rank}").touch()

    guest.seen = Steps()
    try:
        work()
    except SystemExit as leaving:
        code = leaving.code
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    complete = sorted(path.parent.name for path in Path("out").glob("*/complete.json"))
    Path(f"notice-{rank}").unlink(missing_ok=True)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()
    return list(guest.seen), code, complete
