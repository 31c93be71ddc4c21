"""A run that goes on: on the same ranks bitwise, on others within rounding, every sample exactly
once.
"""

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.train.programs import SAMPLES, attempt, slowly, until_killed
from tests.train.ranks import Ranks, run
from tests.train.ways import told_to_leave

from cavvy.train import AGAIN, Plan
from cavvy.train.checkpoint.store import find_latest

SPREADS = [Plan(), Plan(shards=0), Plan(pipeline=2, micro_batch=6), Plan(tensor=2)]


def name(plan: Plan) -> str:
    return f"shards{plan.shards}-tensor{plan.tensor}-pipeline{plan.pipeline}"


def read_ids(found: list[Any]) -> list[list[int]]:
    """The samples of each step, from the shares of all ranks."""
    steps = zip(*(rank["seen"] for rank in found), strict=True)
    return [sorted(number for share in shares for number in share) for shares in steps]


def test_one_rank_goes_on_bitwise(tmp_path: Path) -> None:
    (whole,) = run(
        1,
        attempt,
        Plan(),
        9,
        None,
        True,
        24,
        folder=tmp_path,
        env={"CAVVY_CHECKPOINT_DIR": "unused"},
    )
    for parts in ([4, 9], [1, 2, 9]):
        folder = tmp_path / str(len(parts))
        folder.mkdir()
        losses: list[float] = []
        for stop in parts:
            (found,) = run(1, attempt, Plan(), 9, stop, True, 24, folder=folder)
            losses += found["losses"]
        assert losses == whole["losses"]
        assert found["state"] == whole["state"]


@pytest.mark.parametrize("plan", SPREADS, ids=name)
def test_the_same_two_ranks_go_on_bitwise(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    normed = plan.pipeline == plan.tensor == 1
    whole = run(2, attempt, plan, 6, None, normed, 24, folder=tmp_path / "whole")
    first = run(2, attempt, plan, 6, 3, normed, 24, folder=tmp_path)
    rest = run(2, attempt, plan, 6, None, normed, 24, folder=tmp_path)
    for before, after, all_of_it in zip(first, rest, whole, strict=True):
        assert before["losses"] + after["losses"] == all_of_it["losses"]
        if plan.pipeline == 1:
            assert after["state"] == all_of_it["state"]


@pytest.mark.parametrize("batch", [24, 22], ids=["divisible", "odd"])
def test_four_two_one_and_three_ranks_read_every_sample_once(batch: int, tmp_path: Path) -> None:
    """24 samples a step can be shared evenly by 4, 2, 1 and 3 ranks; 22 cannot by 4 or 3."""
    steps = SAMPLES * 2 // batch
    (tmp_path / "whole").mkdir()
    (whole,) = run(1, attempt, Plan(), steps, None, False, batch, folder=tmp_path / "whole")
    ids: list[list[int]] = []
    losses: list[float] = []
    names: set[str] = set()
    for size, plan, stop in (
        (4, Plan(shards=0), 2),
        (2, Plan(), 4),
        (1, Plan(), 6),
        (3, Plan(shards=0), None),
    ):
        found = run(size, attempt, plan, steps, stop, False, batch, folder=tmp_path)
        ids += read_ids(found)
        losses += found[0]["losses"]
        names |= {each["name"] for each in found}
    assert ids == read_ids([whole])
    assert losses == pytest.approx(whole["losses"], rel=1e-6)
    assert len(names) == 1, "all ranks of all attempts are one run to whoever draws its curves"
    assert names != {whole["name"]}
    if batch == 24:
        epochs = [Counter(n for step in ids[e * 5 : e * 5 + 5] for n in step) for e in range(2)]
        assert epochs == [Counter(range(SAMPLES))] * 2


@pytest.mark.parametrize(
    ("before", "after"), [((2, SPREADS[2]), (1, Plan())), ((1, Plan()), (2, SPREADS[2]))]
)
@pytest.mark.parametrize("other", [SPREADS[1], SPREADS[3]], ids=name)
def test_a_checkpoint_fits_any_plan(
    before: tuple[int, Plan], after: tuple[int, Plan], other: Plan, tmp_path: Path
) -> None:
    (tmp_path / "whole").mkdir()
    (whole,) = run(1, attempt, Plan(), 6, None, False, 24, folder=tmp_path / "whole")
    losses: list[float] = []
    for (size, plan), stop in ((before, 2), ((2, other), 4), (after, None)):
        losses += run(size, attempt, plan, 6, stop, False, 24, folder=tmp_path)[0]["losses"]
    assert losses == pytest.approx(whole["losses"], rel=1e-6)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_notice_to_one_rank_makes_all_save_the_same_step_and_leave(
    size: int, tmp_path: Path
) -> None:
    ranks = Ranks(size, slowly, Plan(shards=0), 400, folder=tmp_path)
    while ranks.heard(0)[1][0] < 3:
        pass
    ranks.kill(size - 1, signal.SIGTERM)
    ranks.results(exit_code=AGAIN)
    saved = find_latest(tmp_path / "checkpoints")
    assert saved is not None
    step = saved.facts["step"]
    assert 3 <= step < 400
    again = run(size, attempt, Plan(shards=0), step + 1, None, False, 24, folder=tmp_path)
    assert [found["steps"] for found in again] == [step + 1] * size
    assert len(again[0]["losses"]) == 1


def test_the_notice_file_of_a_job_is_a_notice(tmp_path: Path) -> None:
    notice = tmp_path / "notice.json"
    ranks = Ranks(1, slowly, Plan(), 400, folder=tmp_path, env={"CAVVY_NOTICE_FILE": str(notice)})
    while ranks.heard(0)[1][0] < 3:
        pass
    notice.write_text('{"seconds": 30, "deadline": 0, "reason": "test"}')
    ranks.results(exit_code=AGAIN)
    assert find_latest(tmp_path / "checkpoints") is not None


@pytest.mark.parametrize(("left", "takes", "warned"), [(300.0, 600.0, True), (900.0, 600.0, False)])
def test_a_notice_that_is_shorter_than_the_last_save_is_said_and_saved_at_once(
    left: float, takes: float, warned: bool, tmp_path: Path
) -> None:
    env = {"CAVVY_NOTICE_FILE": str(tmp_path / "told")}
    (said,) = run(1, told_to_leave, left, takes, folder=tmp_path, env=env)
    assert said[0] == str(AGAIN)
    saved = find_latest(tmp_path / "checkpoints")
    assert saved is not None
    assert saved.step > 2
    assert f"exiting at step {saved.step} after a notice: saved" in said
    short = [each for each in said if "the machine is reclaimed in" in each]
    assert [
        f"a save takes {takes:.1f} s" in each
        and "the newest checkpoint is the checkpoint of step 2" in each
        for each in short
    ] == [True] * warned


def test_two_ranks_that_are_killed_go_on_bitwise(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = run(2, attempt, Plan(shards=0), 30, None, True, 24, folder=tmp_path / "whole")
    ranks = Ranks(2, until_killed, Plan(shards=0), 30, 0.0, folder=tmp_path)
    heard: dict[int, float] = {}
    while len(heard) < 12:
        step, loss = ranks.heard(0)[1]
        heard[step] = loss
    ranks.kill(0)
    ranks.kill(1)
    assert ranks.end() == [-signal.SIGKILL] * 2
    saved = find_latest(tmp_path / "checkpoints")
    assert saved is not None
    rest = run(2, attempt, Plan(shards=0), 30, None, True, 24, folder=tmp_path)
    assert rest[0]["losses"] == whole[0]["losses"][saved.step :]
    assert [heard[step] for step in sorted(heard)] == whole[0]["losses"][: len(heard)]
    assert rest[0]["state"] == whole[0]["state"]
