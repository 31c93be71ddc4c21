"""Checkpoints: whole or not there, never torn, local and remote, as often as they are worth."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.programs import Normed, Say, attempt, make_samples
from tests.train.ranks import run
from torch.nn import functional as F

from cavvy import train
from cavvy.train.checkpoint import store as stores
from cavvy.train.checkpoint.async_saver import (
    FIRST_S,
    LEAST_LOSSES,
    QUIET_H,
    SAVE,
    AsyncSaver,
    SaveInterval,
    told,
)
from cavvy.train.checkpoint.store import (
    FILES,
    MARK,
    CheckpointStore,
    StoredCheckpoint,
    commit,
    find_latest,
)
from cavvy.train.world import RankWorld

NEVER = 1e9


def make_run(folder: Any, **options: Any) -> tuple[train.Run, Any, Any, train.Data]:
    made = train.Run(
        folder, plan=train.Plan(), device="cpu", seed=3, **{"save_every": NEVER, **options}
    )
    model = made.model(Normed)
    optimizer = made.optimizer(torch.optim.AdamW, lr=1e-2)
    x, y, _ = make_samples()
    return made, model, optimizer, made.data(train.Tensors(x, y), global_batch=24)


def weights(model: Any) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def slow_copies(say: Say) -> None:
    """Saves while the copy of the state takes as long as several steps."""
    from torch.distributed.checkpoint.staging import DefaultStager

    stage = DefaultStager._stage

    def slowly(self: Any, state: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return stage(self, state, **options)

    DefaultStager._stage = slowly  # type: ignore[method-assign]
    made, model, optimizer, data = make_run("checkpoints")
    kept: dict[int, Any] = {}
    for batch in made.batches(data, epochs=2):
        made.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch)
        made.step(optimizer)
        made.save()
        kept[made.steps] = weights(model)
        if made.steps == 3:
            break
    made.close()
    for step in (2, 3):
        found = stores.StoredCheckpoint(Path(f"checkpoints/step-{step:012d}"), step, {})
        state = {"model": weights(model)}
        made.keeper.store.load(found, state)
        for name, value in kept[step].items():
            assert torch.equal(state["model"][name], value), (step, name)


def test_a_checkpoint_is_of_one_step_however_long_its_copy_takes(tmp_path: Path) -> None:
    run(1, slow_copies, folder=tmp_path)


def saves_beside_steps(say: Say) -> list[int]:
    """run.save() after run.step() has the next step's number; before it, the step comes again."""
    made, model, optimizer, data = make_run("checkpoints")
    steps = []
    for batch in made.batches(data, epochs=1):
        made.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch)
        if made.steps == 1:
            assert made.save(wait=True)
            steps.append(find_latest(Path("checkpoints")).step)  # type: ignore[union-attr]
        made.step(optimizer)
        if made.steps == 3:
            assert made.save(wait=True)
            found = find_latest(Path("checkpoints"))
            assert found is not None
            steps += [found.step, found.facts["positions"][0]]
    made.close()
    return steps


def test_a_save_has_the_number_of_the_step_that_comes_next(tmp_path: Path) -> None:
    assert run(1, saves_beside_steps, folder=tmp_path) == [[1, 3, 72]]


def saves_first(say: Say, first: bool) -> list[float]:
    made, model, optimizer, data = make_run("checkpoints")
    if first:
        assert made.save(wait=True)
    losses = []
    for batch in made.batches(data, epochs=1):
        losses.append(
            float(made.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch))
        )
        made.step(optimizer)
    made.close()
    return losses


def test_a_save_before_the_first_step_changes_nothing(tmp_path: Path) -> None:
    """Torch makes the state of an optimizer that has none by a step of its own, which must not
    count.
    """
    (tmp_path / "saved").mkdir()
    (expected,) = run(1, saves_first, False, folder=tmp_path)
    assert run(1, saves_first, True, folder=tmp_path / "saved") == [expected]


def keeps_things(say: Say, stop: int) -> tuple[float, int]:
    made, model, optimizer, data = make_run("checkpoints")
    schedule = made.keep(
        "schedule", torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    )
    for batch in made.batches(data, epochs=3):
        made.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch)
        made.step(optimizer)
        schedule.step()
        if made.steps == stop:
            made.save(wait=True)
            break
    made.close()
    return schedule.get_last_lr()[0], made.steps


def test_a_scheduler_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    run(1, keeps_things, 3, folder=tmp_path)
    assert run(1, keeps_things, 7, folder=tmp_path) == run(
        1, keeps_things, 7, folder=tmp_path / "whole"
    )


def remotely(say: Say, stop: int | None) -> dict[str, Any]:
    return attempt_at("file://" + str(Path("remote").absolute()), say, stop)


def attempt_at(where: str, say: Say, stop: int | None) -> dict[str, Any]:
    from tests.train.programs import learn

    return learn(say, train.Plan(), steps=5, stop=stop, folder=where, normed=True)


@pytest.mark.parametrize("size", [1, 2])
def test_another_machine_goes_on_from_remote_storage(size: int, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = run(size, attempt, train.Plan(), 5, None, True, 24, folder=tmp_path / "whole")
    first = run(size, remotely, 2, folder=tmp_path, env={"XDG_CACHE_HOME": str(tmp_path / "here")})
    second = run(
        size, remotely, None, folder=tmp_path, env={"XDG_CACHE_HOME": str(tmp_path / "there")}
    )
    assert first[0]["losses"] + second[0]["losses"] == whole[0]["losses"]
    marked = sorted(path.parent.name for path in (tmp_path / "remote").glob(f"*/{MARK}"))
    assert marked == ["step-000000000002", "step-000000000005"]


def test_a_remote_checkpoint_without_its_mark_is_none(tmp_path: Path) -> None:
    run(1, remotely, 2, folder=tmp_path, env={"XDG_CACHE_HOME": str(tmp_path / "here")})
    (tmp_path / "remote" / "step-000000000002" / MARK).unlink()
    (found,) = run(
        1, remotely, None, folder=tmp_path, env={"XDG_CACHE_HOME": str(tmp_path / "there")}
    )
    assert len(found["losses"]) == 5


def test_only_a_marked_folder_is_a_checkpoint(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    for step in (1, 2, 3):
        (tmp_path / f"step-{step:012d}").mkdir()
    whole = StoredCheckpoint(tmp_path / "step-000000000001", 1, {"step": 1, FILES: {}})
    commit(whole)
    (tmp_path / "step-000000000002" / MARK).write_text('{"step"')
    (tmp_path / "step-000000000003" / (MARK + ".half")).write_text("{}")
    assert find_latest(tmp_path) == whole


def test_a_complete_checkpoint_without_checksums_is_not_written_again(tmp_path: Path) -> None:
    done = StoredCheckpoint(tmp_path / "step-000000000001", 1, {"step": 1})
    done.path.mkdir()
    (done.path / ".metadata").touch()
    commit(done)
    finished: list[tuple[Any, list[str]]] = []
    store = CheckpointStore(
        tmp_path, RankWorld("cpu"), True, lambda done, own: finished.append((done.facts, own))
    )
    assert not store.save(1, lambda: pytest.fail("the state is collected for another write"))
    assert store.wait()
    assert finished == [({"step": 1, FILES: {".metadata": None}}, [".metadata"])]


def cannot_save(say: Say) -> tuple[bool, bool, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cavvy.train").addHandler(handler)
    made, model, optimizer, data = make_run("checkpoints")
    safe = []
    for batch in made.batches(data, epochs=1):
        made.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch)
        made.step(optimizer)
        if made.steps == 1:
            Path("checkpoints/step-000000000001").write_text("in the way")
        if made.steps <= 2:
            safe.append(made.save(wait=True))
    made.close()
    return safe[0], safe[1], said


def test_a_save_that_fails_is_told_and_training_goes_on(tmp_path: Path) -> None:
    ((first, second, said),) = run(1, cannot_save, folder=tmp_path)
    assert (first, second) == (False, True)
    assert "could not be saved; the previous checkpoint is kept" in said[0]
    assert find_latest(tmp_path / "checkpoints") is not None


def cannot_copy(say: Say) -> tuple[list[bool], int, list[str]]:
    """The second of three copies of the state fails, as where there is no memory for it."""
    from torch.distributed.checkpoint.staging import DefaultStager

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cavvy.train").addHandler(handler)
    stage, copies = DefaultStager._stage, [0]

    def fail(self: Any, state: Any, **options: Any) -> Any:
        copies[0] += 1
        time.sleep(0.1)  # the next step asks for it before it has failed
        if copies[0] == 2:
            raise RuntimeError("no memory for a copy")
        return stage(self, state, **options)

    DefaultStager._stage = fail  # type: ignore[method-assign]
    made, model, optimizer, data = make_run("checkpoints")
    safe = []
    for batch in made.batches(data, epochs=1):
        made.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch)
        made.step(optimizer)
        if made.steps <= 3:
            safe.append(made.save(wait=made.steps != 2))
    made.close()
    return safe, made.steps, said


def test_a_copy_that_fails_beside_the_computation_is_told_and_training_goes_on(
    tmp_path: Path,
) -> None:
    ((safe, steps, said),) = run(1, cannot_copy, folder=tmp_path)
    assert (safe[0], safe[2]) == (True, True)
    assert steps > 3
    assert [text for text in said if "could not be saved" in text] == [
        "a checkpoint could not be saved; the previous checkpoint is kept: no memory for a copy"
    ]
    assert (
        sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*/complete.json"))
        == [MARK] * 2
    )


def one_cannot_copy(say: Say) -> str:
    """The second of four copies of the state fails on one of the ranks."""
    from torch.distributed.checkpoint.staging import DefaultStager

    stage, copies = DefaultStager._stage, [0]

    def fail(self: Any, state: Any, **options: Any) -> Any:
        copies[0] += 1
        if copies[0] == 2:
            raise RuntimeError("no memory for a copy")
        return stage(self, state, **options)

    made, model, optimizer, data = make_run("checkpoints")
    if made.world.rank == 1:
        DefaultStager._stage = fail  # type: ignore[method-assign]
    said = "all steps"
    try:
        for batch in made.batches(data, epochs=2):
            made.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch)
            made.step(optimizer)
            if made.steps <= 4:
                made.save()
    except RuntimeError as error:
        said = str(error)
    made.world.leave()
    return said


def test_where_one_rank_of_several_cannot_copy_no_checkpoint_mixes_two_steps(
    tmp_path: Path,
) -> None:
    """The others are in that save's collectives already: this rank's next save would answer
    them.
    """
    first, second = run(2, one_cannot_copy, folder=tmp_path)
    assert second == "no memory for a copy"
    assert first != "all steps", "it does not wait for the other one for ever"
    assert [path.parent.name for path in (tmp_path / "checkpoints").glob(f"step-*/{MARK}")] == [
        "step-000000000001"
    ]


def test_the_interval_follows_from_cost_and_losses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert SaveInterval().seconds == FIRST_S
    learned = SaveInterval(losses_per_hour=0.5)
    learned.measured(2.0, 5.0)
    assert learned.seconds == pytest.approx(
        (2 * 2.0 * 7200) ** 0.5 if (2 * 2.0 * 7200) ** 0.5 > 200 else 200
    )
    dear = SaveInterval(losses_per_hour=60, stall_s=1.0)
    assert dear.seconds == 100  # a stall of 1 % at most
    assert (
        SaveInterval(losses_per_hour=60, stall_s=1e-6, write_s=40).seconds == 80
    )  # half of the time at most writing
    assert told(12.5).seconds == 12.5
    for said_rate, rate in (
        ("0.5", 0.5),
        ("0", LEAST_LOSSES),
        ("often", 1 / QUIET_H),
        ("", 1 / QUIET_H),
    ):
        monkeypatch.setenv("CAVVY_LOSSES_PER_HOUR", said_rate)
        interval = told("auto")
        interval.measured(0.5, 1.0)
        assert interval.seconds == pytest.approx((2 * 0.5 * 3600 / rate) ** 0.5)
    monkeypatch.setenv("CAVVY_CHECKPOINT_EVERY_S", "90")
    assert told("auto").seconds == 90
    said = tmp_path / "every"
    monkeypatch.setenv("CAVVY_CHECKPOINT_EVERY_FILE", str(said))
    assert told("auto").seconds == 90
    said.write_text(json.dumps(45.5))
    assert told("auto").seconds == 45.5
    said.write_text("soon")
    assert told("auto").seconds == FIRST_S


def test_a_machine_said_to_be_at_risk_saves_once_at_once_and_works_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    advice = tmp_path / "advice.json"
    monkeypatch.setenv("CAVVY_ADVICE_FILE", str(advice))
    keeper = AsyncSaver(str(tmp_path / "checkpoints"), RankWorld("cpu"), 3600.0)
    try:
        assert keeper.wish() == 0
        advice.write_text("{}")
        assert [keeper.wish(), keeper.wish()] == [SAVE, 0]
    finally:
        keeper.close()


def test_a_completion_mark_that_has_changed_is_not_read() -> None:
    facts = {"step": 5, "positions": [120], "things": {1: None}, "name": "ä", FILES: {"a": 7}}
    text = stores.dump_facts(facts)
    assert stores.parse_facts(text) == json.loads(json.dumps(facts))
    assert stores.parse_facts(text.replace("[120]", "[121]")) is None
    assert stores.parse_facts(json.dumps(facts)) is not None, "an earlier version wrote this mark"
    assert stores.parse_facts("[]") is None
