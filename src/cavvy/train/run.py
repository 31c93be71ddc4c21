"""A training run: the methods that a training script calls. Other files implement them.

The design of `Run` depends on three rules. Parameters change only in `step`, so a save can copy
them in the background until the next `step`. The run saves and stops only in `batches`, so all
ranks save and stop at the same step. The global batch is fixed but the micro-batch is not, so the
number and kind of devices can change between attempts without changing the result.
"""

import atexit
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cavvy.train import plan as plans
from cavvy.train import rejoin, seeds
from cavvy.train.build import Measure, ModelBuilder, RunState, evaluate, make_optimizer, update
from cavvy.train.checkpoint.async_saver import LEAVE, AsyncSaver, CheckpointNotSaved
from cavvy.train.checkpoint.notice import leave
from cavvy.train.clock import StepClock
from cavvy.train.data import Batch, BatchShare, Data, move, open_source
from cavvy.train.data.staging import BatchReader, open_batches
from cavvy.train.loss import spread
from cavvy.train.parallel.replicas import align_placed
from cavvy.train.parallel.shard import ShardOptions
from cavvy.train.plan import Plan
from cavvy.train.progress import ProgressReporter
from cavvy.train.step import Loss, PairLoss, StepGradients
from cavvy.train.trackers import name_run
from cavvy.train.world import RankWorld

log = logging.getLogger("cavvy.train")
observers: list[
    Callable[["Run"], None]
] = []  # functions that are called with each new run, for example by tuning


class Run:
    """One training run, whose checkpoints are in one folder.

    Args:
        folder: the folder of checkpoints: a path, or a URL that fsspec supports. The default is the
        checkpoint folder of the Cavvy job or, without a job, `checkpoints`. plan: a `Plan`, a file
        that `Plan.to_json` wrote, or "auto". If the variable
            CAVVY_TRAIN_PLAN names a file, that file is used instead.
        seed: determines initial parameters, the order of samples and augmentations.
        device: "auto", "cuda", "rocm", "mps", "xpu" or "cpu".
        save_every: seconds between saves, or "auto": derived from the cost of a checkpoint and the
            rate at which machines are lost.
    """

    def __init__(
        self,
        folder: "str | Path | None" = None,
        *,
        plan: "Plan | str | Path" = "auto",
        seed: int = 0,
        device: str = "auto",
        save_every: "float | str" = "auto",
    ) -> None:
        rejoin.stand_by()
        self._builder = ModelBuilder(plans.read(os.environ.get("CAVVY_TRAIN_PLAN") or plan), seed)
        self.seed, self._state = seed, RunState()
        self.world = RankWorld(device)
        self.keeper = AsyncSaver(
            folder or os.environ.get("CAVVY_CHECKPOINT_DIR") or "checkpoints",
            self.world,
            save_every,
        )
        self.keeper.objects = self._state.things
        before = self.keeper.store.latest()
        self.name: str = self.world.tell(
            name_run(before.facts.get("name") if before else None)
        )  # the name of the run, for trackers
        self.clock, self.progress = StepClock(self.world.rank), ProgressReporter(self.world)
        self.clock.listeners.append(self.progress.hear)
        self.optimizers: list[Any] = []
        self._gradients: StepGradients | None = None
        self._batch: Batch | None = None
        self._open: list[Data] = []  # the data of the loops that are running
        # the data whose gradients wait for a step
        self._pending: set[Data] = set()
        self._asked = 0  # the request (exit or save) that waits for a step
        self._read, self._resumed, self._used, self._counted = 0, False, False, False
        atexit.register(self._abandon)
        for observer in observers:
            observer(self)

    @property
    def steps(self) -> int:
        """The number of completed steps in all attempts together."""
        return self._state.steps

    @property
    def plan(self) -> Plan:
        """The plan of the run. The plan is final once the model is built."""
        return self._builder.plan

    @property
    def micro_batch(self) -> int:
        """The number of samples in one forward pass on one rank; 0 until it is found."""
        return self._state.micro.size

    def model(
        self,
        build: Callable[[], nn.Module] | None = None,
        *,
        stages: Sequence[Callable[[], nn.Module]] = (),
        blocks: Callable[[nn.Module], Sequence[nn.Module]] | None = None,
        tensor_plan: dict[str, Any] | None = None,
        meta: bool = False,
    ) -> Any:
        """Build the model and place it on the ranks. Returns the user's own module.

        Args:
            build: a function that creates the model. The function is called once, after random
                generators are seeded.
            stages: for a pipeline, instead of `build`: functions that create the consecutive parts
                of the model.
            blocks: a function that returns the repeated parts of the model. These parts are sharded
                and recomputed one by one. By default, the blocks are guessed.
            tensor_plan: how layers are split over tensor ranks, for torch's `parallelize_module`.
            meta: build the model without memory and initialize it with `reset_parameters` on the
                devices, for models larger than the memory of this machine.
        """
        if self._gradients is not None:
            raise RuntimeError(
                "a run has one model: combine several models into one with run.model(lambda: "
                "nn.ModuleDict({'a': A(), 'b': B()})), and give each optimizer its parameters"
            )
        options = ShardOptions(blocks=blocks, tensor_plan=tensor_plan, meta=meta)
        placed = self._builder.build(build, stages, self.world, options)
        micro = self._state.micro = self._builder.micro(self.world)
        self._gradients = StepGradients(
            self.world, placed, self._builder.numbers, micro, self.clock, self.keeper.wish
        )
        return placed.model

    def optimizer(self, make: Callable[..., Any], params: Any = None, **options: Any) -> Any:
        """Create an optimizer with `make(params, **options)`, by default for all parameters of the
        model. The optimizer's state is saved in checkpoints.
        """
        self._expect_before_resume("optimizer")
        chosen = self._ready().placed.model.parameters() if params is None else params
        self.optimizers.append(make_optimizer(make, chosen, options))
        return self.optimizers[-1]

    def data(
        self,
        source: Any,
        *,
        global_batch: int,
        transform: Any = None,
        collate: Any = None,
        sampler: Any = None,
        shuffle: bool = True,
        new_order: bool = False,
        **options: Any,
    ) -> Data:
        """Open the samples to train on: a dataset, or "NAME:path" for a registered reader, which
        receives the `options`.

        `transform(sample)` or `transform(sample, random)` is applied to each sample. `random` is a
        NumPy generator that depends only on the seed and on the sample's position in the order.

        `collate(samples)` builds a batch from a list of samples, by default torch's
        `default_collate`. The first dimension of each tensor of the batch must count samples.

        `sampler` is a torch sampler, or a batch sampler of global batches, that is used instead of
        `shuffle`. The sampler must always yield the same order for an epoch: it has a `generator`,
        the method `set_epoch`, or a fixed order.

        A checkpoint is refused if the number of samples, the seed or `shuffle` has changed since it
        was saved, unless `new_order` accepts that samples are repeated or left out.
        """
        self._expect_before_resume("data")
        opened = open_source(source, **options)
        made = Data(
            opened,
            global_batch=global_batch,
            transform=transform,
            collate=collate,
            sampler=sampler,
            seed=self.seed,
            shuffle=shuffle,
            new_order=new_order,
        )
        self._state.data.append(made)
        return made

    def keep(self, name: str, thing: Any) -> Any:
        """Add an object with state_dict() and load_state_dict() to checkpoints, and return it. The
        object's state may contain tensors, numbers, strings, lists and dicts.
        """
        if name not in self._state.things:
            self._expect_before_resume("keep")
        if self._state.things.setdefault(name, thing) is not thing:
            raise ValueError(f"run.keep({name!r}): another object already has this name")
        return thing

    def resume(self) -> bool:
        """Load the newest checkpoint. Returns whether a checkpoint existed. If the script does not
        call `resume`, `batches` calls `resume`. Later calls do nothing.
        """
        if self._resumed:
            return False
        self._resumed = True
        facts = self.keeper.resume(self._ready().placed.model, self.optimizers, self.plan.to_json())
        if facts is not None:
            self._state.from_facts(facts, self._builder.numbers)
            log.info("resumed at step %d", self.steps)
        self._ready().refresh()
        placed = self._ready().placed
        align_placed(placed.model, placed.mesh, self.world)
        self._state.micro.known.update(self.keeper.fits)
        return facts is not None

    def batches(self, data: Data, *, epochs: float) -> Iterator[Any]:
        """Yield this rank's batches until `epochs` passes over the data are complete, counting the
        passes of earlier attempts.

        Between two batches the run saves if a save is due, and exits with code 75 after a
        preemption notice.
        """
        self.resume()
        begin, until = self._find_span(data, epochs)
        share = BatchShare(
            self._ready().placed.data_rank, self._ready().placed.data_ranks, data.global_batch
        )
        self.progress.begin(begin, until, data.length)
        if begin + data.global_batch > until:
            self.progress.end()
            if self.steps:
                # An earlier attempt may have ended before it uploaded this checkpoint.
                self._save_last()
            return
        steps, stream = self.steps, self._open_stream(data, share, until)
        self._open.append(data)
        try:
            while (values := self._next(stream, data, share)) is not None:
                yield values
                if not self._used:
                    self._ready().skip(self._number)
                self._between()
        finally:
            stream.close()
            self.clock.end()
            self._open.remove(data)
        if self.steps > steps and data not in self._pending:
            data.use()  # The last batches had no step.
        self._save_last()

    def _find_span(self, data: Data, epochs: float) -> tuple[int, int]:
        """Return the positions between which a loop reads. All ranks must call this method.

        Raises: ValueError: the data is too small, or the ranks have opened different data.
        """
        if data not in self._pending:
            data.ahead = 0
        begin, until = data.position + data.ahead, int(epochs * data.length)
        if not begin and 0 < until < data.global_batch:
            raise ValueError(
                f"{until} samples are fewer than a global batch of {data.global_batch} samples: "
                "use a smaller global batch or more epochs"
            )
        # A remainder that is smaller than a global batch is not read.
        until -= (until - begin) % data.global_batch
        self._compare_orders(data, begin, until)
        return begin, until

    def _open_stream(self, data: Data, share: BatchShare, until: int) -> BatchReader:
        """Start to read the batches of this rank up to a position."""
        data.find_random()
        plan, device, threads = self.plan, self.world.device.torch, self.plan.threads
        if data.is_random and not plan.workers:
            log.warning(
                "the data set or its transform draws from the global random generators, so samples "
                "are not read ahead: use transform(sample, random) or Plan(workers=...)"
            )
            device, threads = torch.device("cpu"), 0
        batches = data.read(
            share, until, workers=plan.workers, threads=threads, prefetch=plan.prefetch
        )
        return open_batches(batches, self._move, device)

    def _compare_orders(self, data: Data, begin: int, until: int) -> None:
        """Check that all ranks are about to read the same samples.

        Raises: ValueError: the samples differ.
        """
        batch = range(begin, min(begin + data.global_batch, until))
        first = data.indices(batch).tolist() if batch and self.world.size > 1 else []
        facts = {
            "number of samples": data.length,
            "global batch": data.global_batch,
            "first sample": begin,
            "last sample": until,
            "order of samples": first,
        }
        every = self.world.gather(facts)
        for rank, name in product(range(self.world.size), facts):
            if every[rank][name] != every[0][name]:
                raise ValueError(
                    f"the {name} of rank {rank} differs from the {name} of rank 0. All ranks must "
                    "open the same data with the same epochs, and the sampler of each rank must "
                    "yield the samples of all ranks"
                )

    def _save_last(self) -> None:
        if not (self.save(wait=True) or self.save(wait=True)):
            raise CheckpointNotSaved(
                f"the final checkpoint, of step {self.steps}, could not be saved to "
                f"{self.keeper.store.folder}: the warnings above state the reason"
            )

    def _move(self, values: Any) -> Any:
        plan = self.plan
        return move(values, self.world.device.torch, pin=plan.pin, channels_last=plan.channels_last)

    def _next(self, stream: BatchReader, data: Data, share: BatchShare) -> Any:
        """Return the next batch of a stream, on this rank's device. Returns None at the end of the
        stream.
        """
        low, high = share.bounds
        self.clock.begin(self.steps, data.global_batch)
        with self.clock.part("data"):
            values = stream.read()
        if values is None:
            self.clock.forget()
            self._batch = None
            return None
        with self.clock.part("transfer"):
            values = stream.place(values)
        self._read, self._used, self._counted = self._read + 1, False, False
        self._batch = Batch(values, high - low, data.global_batch, share.largest)
        data.ahead += data.global_batch
        seeds.sow(seeds.mix(self.seed, self.steps + 1, share.rank, data.ahead))
        return values

    def accumulate(self, loss: Loss, batch: Any) -> Any:
        """Compute the gradients of the mean loss over the global batch. Returns the mean loss,
        which is the same on all ranks.

        `loss(part)` receives a part of the batch, with the same structure as the batch, and returns
        the mean loss of the part. A loss with several arguments receives the members of a part, as
        in `loss(images, labels)`. If a rank runs out of memory, `loss` can be called a second time
        for the same samples. If `loss` returns a mean over items other than samples, such as tokens
        without padding, the mean is weighted by the number of items. Cavvy determines the number of
        items automatically for torch's losses and for sums that are divided by a tensor. If `loss`
        computes the mean in any other way, it must return (mean, number of items).

        Gradients of earlier calls that no step has used yet are added to the new gradients.
        """
        return self._add(self._ready().add, spread(loss), batch)

    def pipeline(self, loss: PairLoss, batch: Any) -> Any:
        """Do the same as `accumulate`, also for plans with a pipeline. A batch is (input, target),
        and `loss(output, target)` returns the mean loss.
        """
        return self._add(self._ready().add_pipelined, loss, batch)

    def step(self, *optimizers: Any, clip: float | None = None) -> Any:
        """Clip the gradients to the norm `clip` (if it is set) and update the parameters. Returns
        the norm before clipping, or None if `clip` is None.

        Raises: ValueError: no optimizer was passed, or checkpoints do not contain its state.
        """
        known = (*self.optimizers, *self._state.things.values())
        if not optimizers or not all(any(each is one for one in known) for each in optimizers):
            raise ValueError(
                "run.step needs optimizers whose state is in checkpoints: create each optimizer "
                "with run.optimizer, or add it with run.keep"
            )
        with self.clock.part("checkpoint"):
            self.keeper.join()
        with self.clock.part("optimizer"):
            norm = update(
                optimizers, self._builder.numbers.scaler, clip, self._ready().placed.pipeline
            )
            self._builder.numbers.has_stepped = True
        if self._batch is not None and not self._counted:
            self._state.steps += 1
            self._counted = True  # A batch is counted once, even if `step` is called several times.
        for data in self._open:
            data.use()
        self._pending.clear()
        return norm

    def evaluate(self, measure: Measure, source: Any, *, global_batch: int, **options: Any) -> Any:
        """Return the mean of `measure` over a data set, in which each sample is used once. The
        result is the same on all ranks.

        `measure(part)` is called with a part of a batch and, like the loss of `accumulate`, returns
        a mean, or a mean and the number of values in it. The model is in evaluation mode during the
        call. All arguments except `measure` are the same as for `data`, but checkpoints do not save
        the position in this data set.
        """
        changes = {each: options.pop(each, None) for each in ("collate", "transform")}
        opened = open_source(source, **options)
        data = Data(opened, global_batch=global_batch, seed=self.seed, shuffle=False, **changes)
        return evaluate(spread(measure), data, self._ready(), self.plan, self.world.device.torch)

    def log(self, **values: Any) -> None:
        """Log values of this step for the progress line and for listeners. The `loss` of
        `accumulate` is logged automatically. A tensor is read from the device only when it is
        shown.
        """
        self.clock.note(**values)

    def save(self, *, wait: bool = False) -> bool:
        """Save now. If `wait` is true, wait until the save ends and return whether the save is
        durable. All ranks must call this method at the same step.
        """
        with self.clock.part("checkpoint"):
            self._ready().replicas.compare()
            return self.keeper.save(
                self.steps, self._ready().placed.model, self.optimizers, self._facts, wait=wait
            )

    def close(self) -> None:
        """Wait for the current save and close the process groups. If one rank calls this method,
        all ranks must call it.
        """
        atexit.unregister(self._abandon)
        self.clock.end()
        self.keeper.close()
        self.world.close()

    def _abandon(self) -> None:
        """Clean up at exit if `close` was not called. The method does not wait for other ranks,
        because they can be stuck.
        """
        self.close() if self.world.size == 1 else self.world.leave()

    def _between(self) -> None:
        """Exit, save a checkpoint or continue. All ranks do the same, because they have exchanged
        their requests after the last step. While accumulated gradients have not been applied yet,
        the exit or the save is postponed, because checkpoints do not contain gradients.
        """
        said = self._asked = max(self._asked, self._ready().said)
        if not said or self.world.agree([bool(self._pending) and not self._counted])[0]:
            return
        self._asked = 0
        if said == LEAVE:
            self.keeper.warn(self.steps)
            safe = self.save(wait=True)
            log.warning(
                "exiting at step %d after a notice: %s",
                self.steps,
                "saved" if safe else "could not save",
            )
            self.close()
            leave()
        self.save()

    def _expect_before_resume(self, method: str) -> None:
        if self._resumed:
            raise RuntimeError(
                f"run.{method} was called after the run resumed, so a checkpoint's state would be "
                f"lost: call run.{method} before run.resume and the first loop over run.batches"
            )

    def _ready(self) -> StepGradients:
        if self._gradients is None:
            raise RuntimeError("build the model first: model = run.model(...)")
        return self._gradients

    def _add(self, work: Callable[..., Any], loss: Any, values: Any) -> Any:
        if self._batch is None:
            raise RuntimeError(
                "use the batch that `for batch in run.batches(...)` yields, inside this loop"
            )
        mine, made = self._batch, self._ready()
        self._builder.numbers.settle()
        batch, self._used = replace(mine, values=values, number=self._number), True
        self._pending.update(self._open)
        seed = seeds.mix(self.seed, self.steps + 1, made.placed.data_rank)
        try:
            with made.apart():
                value = work(loss, batch, seed, self.optimizers)
            self.log(loss=value)
            return value
        except RuntimeError as error:
            self.keeper.part_ways(error, self.steps, made, self.optimizers, self._facts)
            raise

    @property
    def _number(self) -> int:
        """The position in the loop: the number of batches read in this process, and the number of
        steps.
        """
        return (self._read << 32) + self.steps

    def _facts(self) -> dict[str, Any]:
        return {"name": self.name, **self._state.to_facts(self._builder.numbers, self.plan)}
