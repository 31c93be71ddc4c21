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
from cavvy.train.trainers.order import RankBatches
from cavvy.train.trainers.watch import TrainerWatch, find_newest

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
        batches.position = found.facts["position"]
        return str(found.path / FILE)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.accumulate_grad_batches = self._batches.count
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

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._watch.end()
