"""A callback that adds Cavvy's resuming, data order and handling of notices to the `Trainer` of
Lightning.
"""

import os
from pathlib import Path
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from cavvy.train.checkpoint.store import make_name
from cavvy.train.trainers.watch import RankBatches, TrainerWatch, find_newest

FILE = "lightning.ckpt"


class LightningCallback(Callback):  # type: ignore[misc]  # Lightning may not be installed
    """Saves when a save is due, and exits with code 75 after a preemption notice:

        batches = RankBatches(len(dataset), batch=32, global_batch=256)
        cavvy = LightningCallback(batches, "checkpoints")
        trainer = Trainer(callbacks=[cavvy], use_distributed_sampler=False)
        loader = DataLoader(dataset, batch_sampler=batches)
        trainer.fit(model, loader, ckpt_path=cavvy.newest())

    `accumulate_grad_batches` is set so that the global batch is the same on any number of ranks.
    `folder` and `save_every` have the same meaning as in `Run`, but the folder must be a path.
    """

    def __init__(
        self,
        batches: RankBatches,
        folder: "str | Path | None" = None,
        *,
        save_every: "float | str" = "auto",
    ) -> None:
        self._batches, self._watch = batches, TrainerWatch(save_every)
        self._resumed = 0  # the position of the checkpoint from which the next training resumes
        self._folder = Path(folder or os.environ.get("CAVVY_CHECKPOINT_DIR") or "checkpoints")

    def newest(self) -> str | None:
        """Return the path of the newest complete checkpoint, or None.

        Raises: ValueError: the data or the global batch does not match the checkpoint.
        """
        found, batches = find_newest(self._folder), self._batches
        if found is None:
            return None
        batches.order.data.resume(found.facts["position"], found.facts["order"])
        if found.facts["global_batch"] != batches.global_batch:
            raise ValueError(
                f"the checkpoint has a global batch of {found.facts['global_batch']}, not "
                f"{batches.global_batch}: use the same global batch"
            )
        batches.position = self._resumed = found.facts["position"]
        return str(found.path / FILE)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.accumulate_grad_batches = self._batches.count

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Convert Lightning's counts of batches, because a batch of all ranks may have another size
        than in the checkpoint.
        """
        if not self._resumed:
            return
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        before = progress["total"]["ready"]
        now = self._resumed // (self._batches.batch * trainer.world_size)
        for counts in (progress["total"], progress["current"]):
            ready = counts["ready"] * now // before
            counts.update(ready=ready, started=ready, processed=ready, completed=ready - 1)

    # Lightning sets its signal handlers between `on_fit_start` and these hooks, and restores the
    # handlers of the script after `on_train_end` or `on_exception`. On SIGTERM, Lightning's handler
    # would end the training with exit code 0 and without a checkpoint.
    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self._watch.begin(self._folder)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._resumed = 0
        self._watch.begin(self._folder)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        batches = self._batches
        batches.position += batches.batch * trainer.world_size
        if batches.position % batches.global_batch or not self._watch.is_save_due():
            return
        step = batches.position // batches.global_batch
        path = self._folder / make_name(step)
        trainer.save_checkpoint(path / FILE)
        facts = {"global_batch": batches.global_batch, "order": batches.order.data.order}
        self._watch.saved(path, step, {"position": batches.position, **facts})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._watch.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._watch.end()
