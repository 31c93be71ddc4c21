"""A kill at any moment: the newest checkpoint is whole, bit by bit, and never older than was
said to be safe.
"""

import random
import signal
from pathlib import Path

import pytest
from tests.train.programs import saving_all_the_time
from tests.train.ranks import Ranks, run

from cavvy.train.checkpoint.store import find_latest


@pytest.mark.parametrize(("size", "kills"), [(1, 90), (2, 10)])
def test_a_hundred_kills_never_leave_a_checkpoint_that_is_not_whole(
    size: int, kills: int, tmp_path: Path
) -> None:
    source = random.Random(5)
    resumed: dict[int, str] = {}
    for _ in range(kills):
        kill_once(size, source, tmp_path, resumed)
    assert len(resumed) > kills / 2  # most attempts came further than the one before
    (tmp_path / "whole").mkdir()
    states = run(size, saving_all_the_time, max(resumed), 1e9, folder=tmp_path / "whole")[0]
    assert resumed == {step: states[step] for step in resumed}


def kill_once(size: int, source: random.Random, folder: Path, resumed: dict[int, str]) -> None:
    ranks = Ranks(size, saving_all_the_time, 10**6, 0.0, folder=folder)
    _, (kind, step, state) = ranks.heard(0)
    assert kind == "resumed"
    assert resumed.setdefault(step, state) == state
    if source.random() < 0.8:
        step = ranks.heard(0)[1][1]  # a first save is done, others follow without a pause
    ranks.pause(source.uniform(0, 0.08))
    for rank in source.choice([[0], [1], [0, 1]]) if size == 2 else [0]:
        ranks.kill(rank)
    ranks.pause(0.01)
    for rank in range(size):
        ranks.kill(rank)
    safe = max([step, *(said[1] for said in ranks.rest(0))])
    assert -signal.SIGKILL in ranks.end()
    found = find_latest(folder / "checkpoints")
    assert (found.step if found else 0) >= safe
