"""Measures windows of steps in one rank of the user's script. Each command starts one window."""

import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from time import perf_counter
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from cavvy.capabilities.tuning.probe.levers import has_tensor_cores
from cavvy.capabilities.tuning.probe.look import (
    BusyLines,
    StackSampler,
    UserLoop,
    code_at_work,
    find_loop,
    look_at_data,
    traced,
)
from cavvy.capabilities.tuning.probe.modes import WindowModes
from cavvy.capabilities.tuning.probe.plain import FREE_STEPS, LEAST_STEPS, PlainLoop, PlainWindows
from cavvy.train import run as runs
from cavvy.train.clock import StepRecord
from cavvy.train.data.staging import count_staged
from cavvy.train.run import Run

NO_LOOP = (
    "the script has no loop over `run.batches` of cavvy.train, and no plain loop with at least "
    f"{FREE_STEPS + LEAST_STEPS + 2} steps of an optimizer; `cavvy estimate` works for any script"
)
LEVERS = "CAVVY_TUNE_LEVERS"  # the environment variable with the levers for a plain loop, in JSON
_CLOSE_S = 5.0  # maximum seconds that the script has to end by itself after the session has ended


class ProbeDone(BaseException):
    """Raised to end the script. This class is not an `Exception`, so the script's own
    `except Exception` does not catch it.
    """


class ProbeChannel:
    """The connection to the session, with one JSON object per line."""

    def __init__(self, path: str) -> None:
        self.folder = os.path.dirname(path)  # the session's temporary folder
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(path)
        self._file = self._socket.makefile("rw")
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """End the process group of the script when the session ends, even if the session was
        killed.
        """
        poll = select.poll()
        poll.register(self._socket, 0)  # POLLHUP is reported even if it is not requested.
        poll.poll()
        threading.Event().wait(_CLOSE_S)
        os.killpg(0, signal.SIGKILL)

    def say(self, message: dict[str, Any]) -> None:
        self._file.write(json.dumps(message) + "\n")
        self._file.flush()

    def hear(self) -> dict[str, Any]:
        line = self._file.readline()
        if not line:
            raise ProbeDone
        heard: dict[str, Any] = json.loads(line)
        return heard


class ScriptProbe:
    """Measures one rank. At the end of each window, the probe sends a report and waits for the next
    command.

    A command has the keys `mode` (see `WindowModes`), `skip` (number of steps to skip), `steps`
    (number of steps to measure), `trace` (a file for the trace, or "-" to discard it) and `watch`
    (whether to sample which lines run). A command that measures no window has one of three other
    keys. The key `look` contains the number of samples to read and time separately. The key `epoch`
    runs the script until its own loop begins its next pass (see `_came_back`). The key `end` ends
    the measurement.

    A report has the keys `rank`, `seconds` (mean per step), `steps`, `parts` (seconds of each step
    and of its parts) and `every`. The key `every` covers all steps since the previous window. It
    contains the seconds of saves, the seconds of transfers, and the seconds between the parts. With
    `trace`, the report also has `idle`, the seconds per step in which no operation ran. With
    `trace` or `watch`, the report has the result of `StackSampler.read`.
    """

    def __init__(self, channel: ProbeChannel) -> None:
        self._channel, self._modes = channel, WindowModes()
        levers = os.environ.pop(LEVERS, "")
        self.plain = (
            PlainWindows(channel, json.loads(levers))
            if levers
            else PlainLoop(channel.folder, self._report_plain)
        )
        self._run: Any = None
        self._records: list[StepRecord] = []
        self._every = _none()
        self._paused = 0.0  # seconds of the current step that the probe itself took
        self._command: dict[str, Any] = {}
        self._early = 0  # optimizer steps before the first `run.batches`
        self._left = 1  # number of steps left in the window; at first, one warm-up step
        self._began = 0.0
        self._tools: Any = None
        self._sampler: StackSampler | None = None
        self._lines = BusyLines()
        # the code objects of the script's own code around `run.batches`
        self._loop: UserLoop | None = None
        self._pass: tuple[Any, float] = (
            None,
            0.0,
        )  # the current pass of the loop: its data and its number of epochs

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Observe the runs of a script. While this context is active, runs save to a temporary
        folder, do not resume, and do not end on their own.
        """
        begin, resume, old_batches = Run.__init__, Run.resume, Run.batches

        def start(run: Any, folder: Any = None, **options: Any) -> None:
            place = tempfile.mkdtemp(dir=self._channel.folder)  # Each rank has a separate folder.
            begin(run, place, **options)

        def batches(run: Any, data: Any, *, epochs: float) -> Iterator[Any]:
            self._loop = find_loop(sys._getframe(1))
            return self._make_pass(
                old_batches(run, data, epochs=epochs + 1_000_000), run, (data, epochs)
            )

        watch, steps = self._attach, register_optimizer_step_pre_hook(self._count_early)
        runs.observers.append(watch)
        self.plain.install()
        with self._modes.installed():
            Run.__init__ = start  # type: ignore[method-assign, assignment]
            Run.batches = batches  # type: ignore[method-assign, assignment]
            Run.resume = lambda _: False  # type: ignore[method-assign, assignment]
            try:
                yield
            finally:
                Run.__init__, Run.batches = begin, old_batches  # type: ignore[method-assign]
                Run.resume = resume  # type: ignore[method-assign]
                runs.observers.remove(watch)
                steps.remove()
                self.plain.remove()

    def _count_early(self, *_: Any) -> None:
        """End a script that creates a run but trains in a loop of its own, because such a loop
        cannot be measured.
        """
        self._early += self._run is not None and self._pass[0] is None
        if self._early > FREE_STEPS:
            self._early = 0
            self._channel.say({"failed": NO_LOOP})
            raise ProbeDone

    def _report_plain(self, report: dict[str, Any]) -> None:
        self._channel.say(report)
        raise ProbeDone

    def _make_pass(self, batches: Any, run: Any, this: tuple[Any, float]) -> Iterator[Any]:
        """Yield batches without end until the command `epoch` arrives. On the command `epoch`, end
        the iteration, so that the script's own loop continues with its next pass.
        """
        before, self._pass = self._pass, this
        if self._command.get("epoch"):
            self._came_back(
                this[1] - before[1] if run is self._run and this[0] is before[0] else 0.0
            )
        with closing(batches):
            for batch in batches:
                yield batch
                if self._command.get("epoch"):
                    break
        if self._loop is None:
            raise ProbeDone
        self._loop.guard(ProbeDone)
        run.world.device.synchronize()
        self._sampler, self._began = StackSampler(run.clock, code_at_work()), perf_counter()
        run.save(wait=True)  # `Run.batches` does the same at the end of each pass.

    def _came_back(self, epochs: float) -> None:
        """Report that the script's own loop has reached its next pass. The report contains the time
        and the number of epochs since the previous pass.
        """
        self._run.world.device.synchronize()
        seconds = perf_counter() - self._began
        sys.settrace(None)
        if self._sampler is not None:
            self._sampler.stop()
            lines = self._sampler.read(self._lines, None, 1)["lines"].values()
            most = max(
                (each for kind in lines for each in kind),
                key=lambda each: each[1],
                default=("", 0.0),
            )
            self._sampler = None
            self._channel.say(
                {"rank": self._run.world.rank, "pause": seconds, "epochs": epochs, "most": most}
            )
            self._next()

    def _attach(self, run: Any) -> None:
        if self._run is None:
            self.plain.remove()
            self._run = self._modes.run = run
            run.clock.listeners[:] = [
                self._hear
                # This replaces other listeners, because measured steps must not be reported as
                # progress.
            ]

    def _hear(self, record: StepRecord) -> None:
        self._left -= 1
        begun = perf_counter()
        for name in ("checkpoint", "transfer"):
            self._every[name].append(record.parts[name])
        self._every["between"].append(record.seconds - self._paused - sum(record.parts.values()))
        steps = self._command.get("steps", 0)
        if self._left == steps and steps:
            self._run.world.device.synchronize()
            self._begin_tools()
            self._began = perf_counter()
        elif self._left < steps:
            self._records.append(record)
        if self._left <= 0:
            self._close()
        self._paused = perf_counter() - begun

    def _begin_tools(self) -> None:
        if self._command.get("trace"):
            self._tools = traced(self._command["trace"] if self._run.world.is_first else "-")
            self._tools.__enter__()
        if self._command.get("trace") or self._command.get("watch"):
            self._sampler = StackSampler(self._run.clock, code_at_work())

    def _close(self) -> None:
        """Report the window at its end, and wait for the next command."""
        self._run.world.device.synchronize()
        seconds = perf_counter() - self._began
        told: dict[str, Any] = (
            self._facts() if not self._command else {"rank": self._run.world.rank}
        )
        if self._records:
            told |= {
                "seconds": seconds / len(self._records),
                "steps": [r.seconds for r in self._records],
            }
            told["parts"] = {
                name: [r.parts[name] for r in self._records] for name in self._records[0].parts
            }
            told["every"] = self._every
            told["micro_batch"] = self._records[-1].micro_batch
            told["peak_bytes"] = self._run.world.device.peak_bytes()
        self._every = _none()
        if self._sampler is not None:
            self._sampler.stop()
            busy = None
            if self._tools is not None:
                self._tools.__exit__(None, None, None)
                busy, told["idle"] = self._tools.busy, self._tools.idle / max(len(self._records), 1)
            told |= self._sampler.read(self._lines, busy, len(self._records))
            self._tools = self._sampler = None
        self._channel.say(told)
        self._next()

    def _next(self) -> None:
        while True:
            command = self._channel.hear()
            if command.get("end"):
                raise ProbeDone
            if not command.get("look"):
                break
            self._channel.say(look_at_data(self._modes.data, command["look"], self._share()))
        self._modes.choose(command.get("mode", ""), command.get("skip", 0), command.get("reading"))
        self._command, self._records = command, []
        self._left = sys.maxsize if command.get("epoch") else command["skip"] + command["steps"]

    def _share(self) -> int:
        """Return the number of samples of a batch on one rank."""
        return int(max(self._modes.data.global_batch // self._run.world.size, 1))

    def _facts(self) -> dict[str, Any]:
        """Return facts about this rank and its run. The facts are valid once the model is built and
        a step has run.
        """
        run, data, device = self._run, self._modes.data, self._run.world.device
        return {
            "rank": run.world.rank,
            "ranks": run.world.size,
            "device": device.kind,
            "name": device.name,
            "plan": json.loads(run.plan.to_json()),
            "global_batch": data.global_batch,
            "samples": len(data.source),
            "micro_batch": run.micro_batch,
            "staged": count_staged(device.torch),
            "in_memory": data.is_in_memory,
            "interval": run.keeper.interval.fixed_s,
            "loop": self._loop is not None,
            "split": run.world.size > 1 and run._gradients.placed.reducer is None,
            "tensor_cores": has_tensor_cores(device.kind),
            "cores": len(os.sched_getaffinity(0)),
        }


def _none() -> dict[str, list[float]]:
    return {"checkpoint": [], "transfer": [], "between": []}
