"""Scripts that `cavvy profile` and `tune` measure, forked from the process of `tests.train.ranks`
that has PyTorch imported: most of such a script's CPU time is its imports, of each rank and of
torchrun itself.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.train.ranks import Script, warm_up

from cavvy.capabilities.tuning.session import TuningSession

FORKED = (
    ["-m", "cavvy.capabilities.tuning.probe"],
    ["-m", "torch.distributed.run"],
)


@contextmanager
def warm_probes() -> Iterator[None]:
    """While the block runs, sessions fork their script, and torchrun its ranks."""
    warm_up()  # now: a test may have another folder of temporary files
    usual = TuningSession._start

    def start(session: TuningSession, command: list[str]) -> Any:
        if command[1:3] in FORKED:
            return Script(command[1:], session._environment(), os.getcwd(), session._log)
        return usual(session, command)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TuningSession, "_start", start)
        yield
