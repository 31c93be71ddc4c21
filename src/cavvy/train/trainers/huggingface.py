"""Adds Cavvy's resuming, data order and handling of notices to the `Trainer` of Hugging Face
transformers.
"""

import logging
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from cavvy.train.data import open_source
from cavvy.train.trainers.watch import SampleOrder, TrainerWatch, count_batches, find_newest

log = logging.getLogger("cavvy.train")
REFUSED = {
    "auto_find_batch_size": "the size of the global batch would change",
    "ignore_data_skip": "a resumed run would repeat samples",
    "save_only_model": "checkpoints would lack the state of the optimizer",
}


def follow(trainer: Any, *, save_every: "float | str" = "auto") -> str | None:
    """Prepare a `transformers.Trainer`. Returns the newest complete checkpoint, or None:

        trainer.train(resume_from_checkpoint=follow(trainer))

    On a preemption notice, all ranks save after the same step and exit with code 75. Global batches
    have the same samples on any number of processes: `gradient_accumulation_steps` is set so that
    the size of the global batch does not change. The order is random, or that of the data if
    `train_sampling_strategy` is "sequential".

    Raises: TypeError: the training data has no length or cannot return a sample by its index.
    ValueError: the data or the global batch does not match the checkpoint, or an option of the
    trainer prevents an exact resume.
    """
    for name, result in REFUSED.items():
        if getattr(trainer.args, name, False):
            raise ValueError(f"follow() does not support {name}=True, because {result}: remove it")
    args, found = trainer.args, find_newest(trainer.args.output_dir)
    total = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
    if found is not None:
        total = found.facts["global_batch"]
        count = count_batches(total, args.train_batch_size, args.world_size)
        args.gradient_accumulation_steps = count
    seed = args.seed if args.data_seed is None else args.data_seed
    strategy = getattr(args, "train_sampling_strategy", "random")
    if strategy not in ("random", "sequential"):
        log.warning("train_sampling_strategy=%r has no effect: the order is random", strategy)
    samples, shuffle = len(open_source(trainer.train_dataset)), strategy != "sequential"
    order = SampleOrder(samples, global_batch=total, seed=seed, shuffle=shuffle)
    if found is not None:
        order.data.resume(found.step * total, found.facts["order"])
    trainer._get_train_sampler = lambda dataset=None: order
    trainer.add_callback(HuggingFaceCallback(order, save_every))
    return None if found is None else str(found.path)


# transformers may not be installed
class HuggingFaceCallback(TrainerCallback):  # type: ignore[misc]
    """Saves when a save is due, and exits after a preemption notice. See `follow`."""

    def __init__(self, order: SampleOrder, save_every: "float | str") -> None:
        self._order, self._watch = order, TrainerWatch(save_every)

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._watch.begin(args.output_dir)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._order.set_epoch(state.global_step * self._order.data.global_batch // len(self._order))

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> Any:
        control.should_save |= self._watch.is_save_due()
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._watch.start_clock()  # The trainer evaluates after `on_step_end`, before it saves.

    def on_epoch_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._watch.start_clock()

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        data = self._order.data
        facts = {"global_batch": data.global_batch, "order": data.order}
        self._watch.saved(path, state.global_step, facts)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._watch.end()
