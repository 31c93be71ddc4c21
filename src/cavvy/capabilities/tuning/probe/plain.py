"""Measures the training loop of a script that does not use cavvy.train. Each `step` of the script's
first optimizer ends a step.

Measures a plain training loop in windows of steps, for `cavvy tune`. Each command starts one
window.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from math import inf
from statistics import fmean
from time import monotonic, perf_counter
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.modules import module as modules
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from torch.utils.data.dataloader import _BaseDataLoaderIter

from cavvy.capabilities.tuning.probe.kept_files import KeptFiles
from cavvy.capabilities.tuning.probe.levers import PlainLevers, describe_device
from cavvy.capabilities.tuning.probe.look import BusyLines, StackSampler, code_at_work
from cavvy.train.clock import StepClock, StepRecord
from cavvy.train.device import TrainDevice

# number of optimizer steps that are not measured, for example because they belong to a warm-up
FREE_STEPS = 10
MOST_STEPS, MOST_S = 100, 30.0  # limits of the measurement: number of steps, and seconds
LEAST_STEPS = 5
UNTIL = "CAVVY_TUNE_UNTIL"  # environment variable: the time limit on the monotonic clock
SPARE_S = 2.0  # seconds before the time limit in which a report is sent
Timed = Callable[..., Any]

# the number of the step in which the loop is observed; the levers of the computation are applied
# after it
LOOKED = 2
READY = 4  # the number of the step after which the facts are reported


class PlainLoop:
    """Measures the loop of one rank. `done` is called with the report and ends the script.

    The report contains the facts of the rank, `steps` (the seconds of each step), `parts` (the mean
    seconds of each part of a step), and `lines` (the script's lines that run most often, with their
    shares of all time). The part `prepare` is the script's own code before the first forward pass
    of a step. Code that runs before a DataLoader returns the batch is left out. The part `own` is
    all other time that the script's own code uses.
    """

    def __init__(self, folder: str, done: Callable[[dict[str, Any]], None]) -> None:
        self._files, self._done = KeptFiles(folder), done
        self._rank = int(os.environ.get("RANK", "0"))
        self.clock = StepClock(self._rank)
        self.clock.listeners.append(self._hear)
        self._records: list[StepRecord] = []
        self._main: Any = None  # the first parameter of the optimizer whose steps are counted
        self._model: Any = None  # the first module that is called in a step
        self._count, self._began, self._step_began = 0, 0.0, 0.0
        # Seconds of the script's own code in this step: before a DataLoader returned the batch, and
        # from then until the first forward pass.
        self._own_before = 0.0
        self._prepared: float | None = None
        # Samples of this step: in the model's input, and in the batches of DataLoaders.
        self._samples = self._loaded = 0
        self._workers = self._length = 0
        self._sampler: StackSampler | None = None
        self._depth = 0  # depth of nested calls of modules
        self._device: TrainDevice | None = None
        self._most = MOST_STEPS  # number of steps to measure
        self._stack = ExitStack()

    def install(self) -> None:
        """Observe the loops of a script until `remove` is called. Also protect the script's
        existing files from changes (see `KeptFiles`).
        """
        handles = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
            modules.register_module_forward_pre_hook(self._before_forward),
            modules.register_module_forward_hook(self._after_forward, always_call=True),
        )
        for handle in handles:
            self._stack.callback(handle.remove)
        self._stack.callback(self._files.remove)
        self._files.install()
        changes: list[tuple[Any, str, Any]] = [
            (_BaseDataLoaderIter, "__next__", self._watch_loader(_BaseDataLoaderIter.__next__)),
            (torch.autograd, "backward", self._timed("compute", torch.autograd.backward)),
            (torch.Tensor, "to", self._timed("transfer", torch.Tensor.to)),
            (torch.Tensor, "cuda", self._timed("transfer", torch.Tensor.cuda)),
            (torch, "save", self._timed("checkpoint", torch.save)),
        ]
        for where, name, new in changes:
            self._stack.enter_context(patch.object(where, name, new))

    def remove(self) -> None:
        """Stop observing. Later calls do nothing."""
        self._stack.close()

    def finish(self) -> bool:
        """Report the measured steps if there are at least LEAST_STEPS. Returns whether the steps
        were reported.
        """
        if self._sampler is None or self._device is None or len(self._records) < LEAST_STEPS:
            return False
        self._sampler.stop()
        seen = self._sampler.read(BusyLines(), None, len(self._records))["lines"]
        device = self._device
        report = {
            "plain": True,
            "rank": self._rank,
            "ranks": int(os.environ.get("WORLD_SIZE", "1")),
            "device": device.kind,
            "name": device.name,
            "cores": len(os.sched_getaffinity(0)),
            "batch": self._mean("samples"),
            "samples": self._length,
            "workers": self._workers,
            "steps": [record.seconds for record in self._records],
            "parts": self._parts(),
            "lines": sorted(
                (each for lines in seen.values() for each in lines), key=lambda each: -each[1]
            ),
        }
        self._sampler = None
        self._done(report)
        return True

    def _parts(self) -> dict[str, float]:
        """Return the mean seconds per step of each part."""
        names = self._records[0].parts
        parts = {name: fmean(each.parts[name] for each in self._records) for name in names}
        prepare = self._mean("prepare")
        own = fmean(each.seconds - sum(each.parts.values()) for each in self._records) - prepare
        return {**parts, "prepare": prepare, "own": max(own, 0.0)}

    def _mean(self, name: str) -> float:
        return fmean(float(str(each.values[name])) for each in self._records)

    def _begin(self) -> None:
        """Begin to measure. All ranks measure the same number of steps."""
        on = self._main.device
        name = "cpu" if on.type == "cpu" else str(torch.get_device_module(on).get_device_name(on))
        self._device = TrainDevice(on, on.type, name)
        seconds = (perf_counter() - self._began) / (FREE_STEPS - 1)
        left = float(os.environ.get(UNTIL, inf)) - monotonic() - SPARE_S
        count = int(min(MOST_S, max(left, 0.0)) / seconds)
        most = torch.tensor(min(max(count, LEAST_STEPS), MOST_STEPS), device=on)
        if dist.is_initialized():
            dist.all_reduce(most, dist.ReduceOp.MIN)
        self._most = int(most)
        self._sampler = StackSampler(self.clock, code_at_work())

    def _hear(self, record: StepRecord) -> None:
        if self._count > FREE_STEPS + 1:  # The step in which the measurement begins is not counted.
            self._records.append(record)
        if len(self._records) >= self._most:
            self.finish()

    def _is_main(self, optimizer: Any) -> bool:
        first = optimizer.param_groups[0]["params"][0]
        self._main = first if self._main is None else self._main
        return self._main is first

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        if self._is_idle():
            self.clock.part("optimizer").__enter__()

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        part, is_main = self.clock.part("optimizer"), self._is_main(optimizer)
        if is_main and self._device is not None:
            self._device.synchronize()
        if part.begun:
            part.__exit__()
        if not is_main:
            return
        self._count += 1
        if self._count == 1:
            self._began = perf_counter()
        if self._count == FREE_STEPS:
            self._begin()
        if self._count >= FREE_STEPS:
            # The input of a model may have more rows than samples, such as the nodes of graphs.
            samples = min(self._samples, self._loaded or self._samples)
            self.clock.note(prepare=self._prepared or 0.0, samples=samples)
            self.clock.begin(self._count, 0)
            self._step_began, self._own_before = perf_counter(), 0.0
            self._prepared, self._samples, self._loaded = None, 0, 0

    def _before_forward(self, module: Any, values: Any) -> None:
        if self._prepared is None:
            self._prepared = max(self._own() - self._own_before, 0.0)
        self._model = self._model or module
        if module is self._model:
            first = next((v for v in tree_leaves(values) if isinstance(v, torch.Tensor)), None)
            self._samples += len(first) if first is not None and first.dim() else 0
        if not self._depth and self._is_idle():
            self.clock.part("compute").__enter__()
            self._depth = 1
        elif self._depth:
            self._depth += 1

    def _after_forward(self, module: Any, values: Any, output: Any) -> None:
        if self._depth:
            self._depth -= 1
            if not self._depth:
                self.clock.part("compute").__exit__()

    def _own(self) -> float:
        """Return the seconds of this step that the script's own code has used so far."""
        return perf_counter() - self._step_began - sum(self.clock.parts.values())

    def _is_idle(self) -> bool:
        return not any(self.clock.part(name).begun for name in self.clock.parts)

    def _timed(self, name: str, work: Timed) -> Timed:
        """Wrap a function so that the time of its calls counts toward this part of a step. A call
        that happens during a measured part counts only toward that part.
        """

        def call(*given: Any, **options: Any) -> Any:
            with self.clock.part(name) if self._is_idle() else nullcontext():
                return work(*given, **options)

        return call

    def _watch_loader(self, work: Timed) -> Timed:
        timed = self._timed("data", work)

        def read(loader: Any) -> Any:
            self._workers, data = loader._num_workers, loader._dataset
            self._length = len(data) if hasattr(data, "__len__") else 0
            self._own_before = self._own()
            batch = timed(loader)
            self._loaded += getattr(loader._index_sampler, "batch_size", None) or 0
            return batch

        return read


class CommandChannel(Protocol):
    """The connection to the session. `hear` raises an exception when the session has ended."""

    folder: str

    def say(self, message: dict[str, Any]) -> None: ...

    def hear(self) -> dict[str, Any]: ...


class PlainWindows:
    """Measures the loop of one rank with `levers` (see `PlainLevers`). Each `step` of the script's
    first optimizer ends a step.

    The first report, after `READY` steps, contains the facts of the rank. After the first report,
    the script waits for commands. A command has the keys `skip` and `steps`: the numbers of steps
    to skip and to measure. The report on a window contains `seconds`, the mean time per step, or
    `ended` if the script's loop ended before the window was complete.
    """

    def __init__(self, channel: CommandChannel, levers: dict[str, Any]) -> None:
        self._channel, self._levers = channel, PlainLevers(levers)
        self._files = KeptFiles(channel.folder)
        self._facts: dict[str, Any] = {}
        self._main: Any = None  # the first parameter of the optimizer whose steps are counted
        self._count = self._left = self._steps = 0
        self._began = 0.0
        self._stack = ExitStack()

    def install(self) -> None:
        """Observe and change the loop until `remove` is called, and protect the script's existing
        files (see `KeptFiles`).
        """
        for hook in (
            register_optimizer_step_pre_hook(lambda *_: self._levers.leave_autocast()),
            register_optimizer_step_post_hook(self._after_step),
        ):
            self._stack.callback(hook.remove)
        self._stack.callback(self._files.remove)
        self._stack.callback(self._levers.remove)
        self._files.install()
        self._levers.install()

    def remove(self) -> None:
        """Stop observing. Later calls do nothing."""
        self._stack.close()

    def finish(self) -> bool:
        """Report that the script has ended. Returns whether the script's loop had enough steps to
        report its facts.
        """
        if self._count >= READY:
            self._channel.say({"rank": self._facts["rank"], "ended": self._count})
        return self._count >= READY

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        first = optimizer.param_groups[0]["params"][0]
        self._main = first if self._main is None else self._main
        if self._main is not first:
            return
        self._count += 1
        if self._count < LOOKED:
            self._levers.restart_counts()
        elif self._count == LOOKED:
            self._facts = self._describe(self._levers.apply(optimizer))
        elif self._count == READY:
            self._channel.say(self._facts)
            self._next()
        elif self._count > READY:
            self._advance()

    def _advance(self) -> None:
        self._left -= 1
        if self._left in (0, self._steps):
            if self._main.device.type != "cpu":
                torch.accelerator.synchronize(self._main.device)
            now = perf_counter()
            if not self._left:
                seconds = (now - self._began) / self._steps
                self._channel.say({"rank": self._facts["rank"], "seconds": seconds})
                self._next()
            self._began = now

    def _next(self) -> None:
        command = self._channel.hear()
        self._steps = command["steps"]
        self._left = command["skip"] + self._steps

    def _describe(self, seen: dict[str, Any]) -> dict[str, Any]:
        loader, ranks = seen["loader"] or {}, int(os.environ.get("WORLD_SIZE", "1"))
        return {
            "plain": True,
            "rank": int(os.environ.get("RANK", "0")),
            "ranks": ranks,
            **describe_device(self._main.device),
            **seen,
            "global_batch": seen["batch"] * ranks,
            # the values that `count_ready` needs
            "plan": {
                "workers": loader.get("workers", 0),
                "prefetch": loader.get("prefetch", 0),
                "threads": 0,
            },
            "staged": 0,
        }
