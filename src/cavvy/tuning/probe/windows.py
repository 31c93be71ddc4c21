"""Measures a plain training loop in windows of steps, for `cavvy tune`. Each command starts one
window.
"""

import os
from contextlib import ExitStack
from time import perf_counter
from typing import Any, Protocol

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from cavvy.tuning.probe.kept_files import KeptFiles
from cavvy.tuning.probe.levers import PlainLevers, describe_device

# the number of the step in which the loop is observed; the levers of the computation are applied
# after it
LOOKED = 2
READY = 4  # the number of the step after which the facts are reported


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
