"""Measures windows of steps in a rank of the user's script, as told: one window after the other."""

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from remuda.train import run as runs
from remuda.train.clock import StepRecord
from remuda.train.run import Run
from remuda.tuning.probe.look import Sampler, look_at_data, traced
from remuda.tuning.probe.modes import Modes


class Done(BaseException):
    """Ends the script; no `except Exception` of it stops that."""


class Channel:
    """Lines of JSON to whoever measures."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._file = self._socket.makefile("rw")

    def say(self, message: dict[str, Any]) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def hear(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise Done
        heard: dict[str, Any] = json.loads(line)
        return heard


class Probe:
    """One rank. At the end of each window it tells what it measured and waits for the next command.

    A command: `mode` (see `Modes`), `skip` and `steps` to make, `trace` (a file for the trace, or empty), `sample`,
    `look` (how many samples to read and time alone), or `end`.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self._modes = channel, Modes()
        self._run: Any = None
        self._records: list[StepRecord] = []
        self._command: dict[str, Any] = {}
        self._left = 1  # the first step compiles, and finds the micro-batch
        self._began = 0.0
        self._tools: Any = None
        self._sampler: Sampler | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While a script runs: its runs are watched, save nowhere of the user's, and do not end by themselves."""
        begin, resume, old_batches = Run.__init__, Run.resume, Run.batches

        def start(run: Any, folder: Any = None, **options: Any) -> None:
            begin(run, tempfile.mkdtemp(prefix="remuda-probe-"), **options)  # the same for all ranks is not needed

        def batches(run: Any, data: Any, *, epochs: float) -> Iterator[Any]:
            return old_batches(run, data, epochs=epochs + 1_000_000)

        watch = self._attach
        runs.observers.append(watch)
        with self._modes.installed():
            Run.__init__, Run.resume, Run.batches = start, lambda _: False, batches  # type: ignore[method-assign, assignment]
            try:
                yield
            finally:
                Run.__init__, Run.resume, Run.batches = begin, resume, old_batches  # type: ignore[method-assign]
                runs.observers.remove(watch)

    def _attach(self, run: Any) -> None:
        if self._run is None:
            self._run = self._modes.run = run
            run.clock.listeners[:] = [self._hear]  # no progress is told of steps that do not count

    def _hear(self, record: StepRecord) -> None:
        self._left -= 1
        steps = self._command.get("steps", 0)
        if self._left == steps and steps:
            self._run.world.device.synchronize()
            self._begin_tools()
            self._began = perf_counter()
        elif self._left < steps:
            self._records.append(record)
        if self._left <= 0:
            self._close()

    def _begin_tools(self) -> None:
        if self._command.get("trace"):
            self._tools = traced(self._command["trace"])
            self._tools.__enter__()
        if self._command.get("sample"):
            self._sampler = Sampler()

    def _close(self) -> None:
        """The window is over: tell, and hear what comes next."""
        self._run.world.device.synchronize()
        seconds = perf_counter() - self._began
        told: dict[str, Any] = self._facts() if not self._command else {}
        if self._records:
            count = len(self._records)
            parts = {name: sum(r.parts[name] for r in self._records) / count for name in self._records[0].parts}
            told |= {"seconds": seconds / count, "parts": parts, "steps": [r.seconds for r in self._records[1:]]}
            told["own"] = [r.seconds - r.parts["communication"] for r in self._records[1:]]
            told["micro_batch"] = self._records[-1].micro_batch
            told["peak_bytes"] = self._run.world.device.peak_bytes()
        if self._sampler is not None:
            told["lines"], self._sampler = self._sampler.close(), None
        if self._tools is not None:
            tools, self._tools = self._tools, None
            tools.__exit__(None, None, None)
            told["idle"] = tools.idle / max(len(self._records), 1)
        self._channel.say(told)
        self._next()

    def _next(self) -> None:
        while True:
            command = self._channel.hear()
            if command.get("end"):
                raise Done
            if not command.get("look"):
                break
            self._channel.say(look_at_data(self._modes.data, command["look"]))
        self._modes.choose(command.get("mode", ""), command["skip"], command.get("reading"))
        self._command, self._records = command, []
        self._left = command["skip"] + command["steps"]

    def _facts(self) -> dict[str, Any]:
        """Of this rank, once the model is built and a step is made."""
        run, data, device = self._run, self._modes.data, self._run.world.device
        return {
            "rank": run.world.rank, "ranks": run.world.size, "device": device.kind, "name": device.name,
            "plan": json.loads(run.plan.to_json()), "global_batch": data.global_batch, "samples": len(data.source),
            "micro_batch": run.micro_batch, "in_memory": data.is_in_memory, "interval": run.keeper.interval.fixed_s,
            "tensor_cores": _has_tensor_cores(device), "cores": len(os.sched_getaffinity(0)),
        }  # fmt: skip


def _has_tensor_cores(device: Any) -> bool:
    import torch

    return device.kind == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
