"""Checkpoints that cannot work are named before the task is submitted, and by the agent."""

from datetime import timedelta
from pathlib import Path

import pytest

from cavvy.agent.documents import CheckpointConfig
from cavvy.agent.work.folder import CannotBuild, link_checkpoint
from cavvy.cli.task.checkpoint_notes import list_checkpoint_notes, object_to_checkpoint
from cavvy.domain.elastic import NodeRange
from cavvy.domain.tasks import CheckpointPolicy, ResourceSpec, SpotPolicy, TaskSpec
from cavvy.domain.values import replace

SAVES = CheckpointPolicy(path="out/ck", every=timedelta(minutes=10), size_mib=40_960)
TASK = TaskSpec(name="t", run="true", resources=ResourceSpec(spot=SpotPolicy.ONLY))


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (TASK, "add `checkpoint: {path: checkpoints}`"),
        (replace(TASK, resources=ResourceSpec(spot=SpotPolicy.AUTO)), ""),
        (replace(TASK, checkpoint=SAVES), ""),
        (
            TaskSpec(name="t", run="true", nodes=2, elastic=NodeRange(least=2, most=4)),
            "a job on 2..4 nodes starts again from its beginning whenever their number changes",
        ),
        (
            replace(TASK, checkpoint=replace(SAVES, every=timedelta(seconds=30))),
            "needs 34 s for one; state a longer `checkpoint.every`",
        ),
    ],
)
def test_what_cannot_work_is_noted(task: TaskSpec, said: str) -> None:
    notes = list_checkpoint_notes(task)
    assert said in " ".join(notes)
    assert len(notes) == bool(said)


@pytest.mark.parametrize("file", ["out/ck", "out"])
def test_a_file_at_the_path_of_the_checkpoints_is_refused(tmp_path: Path, file: str) -> None:
    task = replace(TASK, checkpoint=SAVES)
    (tmp_path / "out" / "ck").mkdir(parents=True)
    assert object_to_checkpoint(task, {"": tmp_path}) == ""
    (tmp_path / "out" / "ck").rmdir()
    (tmp_path / "out").rmdir()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("mine")
    assert f"{tmp_path / file} is a file" in object_to_checkpoint(task, {"": tmp_path})


@pytest.mark.parametrize("stored", [True, False])
def test_the_agent_hides_no_file_behind_the_checkpoint_folder(tmp_path: Path, stored: bool) -> None:
    (tmp_path / "ck").write_text("mine")
    config = CheckpointConfig(path="ck", storage=str(tmp_path / "storage") if stored else None)
    with pytest.raises(CannotBuild, match="ck is a file of the working folder"):
        link_checkpoint(config, str(tmp_path))
    assert (tmp_path / "ck").read_text() == "mine"
