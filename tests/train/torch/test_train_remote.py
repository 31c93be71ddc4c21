"""Checkpoints in remote storage that fails, and on nodes that each have a folder of their own."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from tests.train.cases import cut_file, flip_bit
from tests.train.programs import Say, learn
from tests.train.ranks import run
from tests.train.storage import UnreliableStorage, use_unreliable_storage

from cavvy import train
from cavvy.train.checkpoint.remote import CheckpointLocation
from cavvy.train.checkpoint.store import FILES, MARK, StoredCheckpoint
from cavvy.train.world import RankWorld

NAMES = [".metadata", "__0_0.distcp"]


def work(say: Say, steps: int, failures: dict[str, int], nodes: bool) -> Any:
    """Train and save each step. Transfers of the last step fail on some ranks. Returns the first
    step and the number of downloads, or the error."""
    rank = os.environ.get("RANK", "0")
    if nodes:
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", XDG_CACHE_HOME=f"node-{rank}")
    use_unreliable_storage()

    def fail_at_the_end(each: train.Run) -> None:
        if each.steps < steps:
            assert each.save(wait=True)
        else:
            UnreliableStorage.failures = failures.get(rank, 0)

    if steps == 0:
        UnreliableStorage.failures = failures.get(rank, 0)
    try:
        found = learn(
            say,
            train.Plan(),
            steps=steps or 3,
            folder=f"file://{Path('remote').absolute()}",
            normed=True,
            each=fail_at_the_end,
        )
    except (train.CheckpointNotSaved, RuntimeError) as error:
        return str(error)
    return [found["steps"] - len(found["losses"]), UnreliableStorage.downloads]


def attempt(folder: Path, steps: int, *, nodes: bool = True, **failures: int) -> list[Any]:
    by_rank = {rank[-1]: number for rank, number in failures.items()}
    return run(2, work, steps, by_rank, nodes, folder=folder)


def local(folder: Path, rank: int, name: str = "") -> Path:
    (found,) = folder.glob(f"node-{rank}/cavvy/train/*")
    return found / name


def list_complete(folder: Path) -> list[int]:
    return sorted(
        int(path.parent.name[-12:])
        for path in folder.glob(f"step-*/{MARK}")
        if path.stat().st_size and path.parent.name[-1].isdigit()
    )


def name(step: int, file: str) -> str:
    return f"step-{step:012d}/{file}"


def test_a_final_upload_that_fails_is_completed_or_an_error_on_all_ranks(tmp_path: Path) -> None:
    """After an error the next attempt, with fewer ranks, uploads the files of all ranks."""
    assert attempt(tmp_path, 2, nodes=False, rank_1=1) == [[0, 0], [0, 0]]
    assert list_complete(tmp_path / "remote") == [1, 2]
    for said in attempt(tmp_path, 3, nodes=False, rank_0=2):
        assert said.startswith("the final checkpoint, of step 3, could not be saved to ")
    assert list_complete(tmp_path / "remote") == [1, 2]
    assert run(1, work, 3, {}, False, folder=tmp_path) == [[3, 0]]
    assert list_complete(tmp_path / "remote") == [2, 3]
    shutil.rmtree(tmp_path / "cache")
    assert attempt(tmp_path, 3, nodes=False) == [[3, 2], [3, 1]]


def test_nodes_download_what_is_missing_or_damaged_and_set_aside_what_is_damaged_everywhere(
    tmp_path: Path,
) -> None:
    attempt(tmp_path, 3)
    assert attempt(tmp_path, 3) == [[3, 1], [3, 2]]
    cut_file(local(tmp_path, 1, name(3, "__0_0.distcp")))
    assert attempt(tmp_path, 0, rank_1=1) == ["rank 1: the storage does not answer"] * 2
    assert attempt(tmp_path, 3) == [[3, 0], [3, 1]]
    remote, file = tmp_path / "remote", name(3, "__1_0.distcp")
    copies = [remote / file, local(tmp_path, 0, file), local(tmp_path, 1, file)]
    for copy in copies[:2]:
        flip_bit(copy)
    assert attempt(tmp_path, 3) == [[3, 2], [3, 0]]
    for copy in copies:
        flip_bit(copy)
    assert [first for first, _ in attempt(tmp_path, 4)] == [2, 2]
    assert list_complete(remote) == [3, 4]
    for rank in range(2):
        assert list_complete(local(tmp_path, rank)) == [3, 4]
        assert local(tmp_path, rank, "step-000000000003.damaged").exists()
        shutil.rmtree(tmp_path / f"node-{rank}")
    assert [first for first, _ in attempt(tmp_path, 4)] == [4, 4]


def test_nodes_upload_what_other_nodes_lack_before_a_checkpoint_counts_as_damaged(
    tmp_path: Path,
) -> None:
    """The upload of the only checkpoint has failed on all nodes."""
    for said in attempt(tmp_path, 1, rank_0=2, rank_1=2):
        assert said.startswith("the final checkpoint, of step 1, could not be saved to ")
    assert attempt(tmp_path, 0, rank_1=1) == ["rank 1: the storage does not answer"] * 2
    assert attempt(tmp_path, 1) == [[1, 1], [1, 2]]
    assert list_complete(tmp_path / "remote") == [1]


@pytest.fixture
def location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointLocation]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "node-0"))
    for attribute in ("failures", "uploads", "downloads", "keeps_all"):
        monkeypatch.setattr(UnreliableStorage, attribute, 0)
    use_unreliable_storage()
    yield CheckpointLocation(f"file://{tmp_path}/remote", RankWorld("cpu"))
    fsspec.register_implementation("file", LocalFileSystem, clobber=True)


def write(location: CheckpointLocation, step: int) -> StoredCheckpoint:
    """A checkpoint of one rank in the local folder."""
    facts = {"step": step, FILES: dict.fromkeys(NAMES)}
    done = StoredCheckpoint(location.local / f"step-{step:012d}", step, facts)
    done.path.mkdir(parents=True)
    for file in NAMES:
        (done.path / file).write_text(f"{file} of step {step}")
    return done


def test_a_checkpoint_is_uploaded_once(location: CheckpointLocation) -> None:
    done = write(location, 1)
    location.send(done, NAMES)
    location.send(done, NAMES)
    assert UnreliableStorage.uploads == 2
    location.set_aside(1)
    location.send(done, NAMES)
    assert UnreliableStorage.uploads == 4


def test_a_checkpoint_with_files_that_no_node_has_is_not_complete(
    location: CheckpointLocation,
) -> None:
    with pytest.raises(FileNotFoundError, match=r"no node has the files __0_0\.distcp"):
        location.send(write(location, 1), NAMES[:1])
    assert location.latest(9) is None


def test_an_upload_removes_old_checkpoints_and_incomplete_uploads(
    location: CheckpointLocation, tmp_path: Path
) -> None:
    for step in (1, 2, 3, 4):
        UnreliableStorage.failures = int(step == 2)
        done = write(location, step)
        if step == 2:
            with pytest.raises(OSError, match="does not answer"):
                location.send(done, NAMES)
        else:
            location.send(done, NAMES)
    assert sorted(path.name[-1] for path in (tmp_path / "remote").iterdir()) == ["3", "4"]


def test_a_bucket_that_forbids_removal_still_receives_checkpoints(
    location: CheckpointLocation, caplog: pytest.LogCaptureFixture
) -> None:
    UnreliableStorage.keeps_all = True
    for step in (1, 2, 3):
        location.send(write(location, step), NAMES)
    newest = location.latest(9)
    assert newest is not None
    assert newest.step == 3
    assert "old checkpoints could not be removed" in caplog.text


def test_a_remote_checkpoint_without_checksums_is_downloaded_whole(
    location: CheckpointLocation,
) -> None:
    done = write(location, 1)
    location.send(done, NAMES)
    mark = location.local.parents[3] / "remote" / name(1, MARK)
    mark.write_text('{"step": 1}')
    shutil.rmtree(location.local)
    found = location.latest(9)
    assert found is not None
    assert location.repair(found) == ""
    assert sorted(path.name for path in found.path.iterdir()) == NAMES
    assert location.latest(1) is None
    location.send(found, NAMES)
    assert UnreliableStorage.uploads == 2, "the complete copy is not uploaded again"


def test_a_damaged_remote_mark_does_not_count(location: CheckpointLocation, tmp_path: Path) -> None:
    for step in (1, 2):
        location.send(write(location, step), NAMES)
    cut_file(tmp_path / "remote" / name(2, MARK))
    found = location.latest(9)
    assert found is not None
    assert found.facts["step"] == 1


def test_a_damaged_remote_mark_is_not_among_the_kept_checkpoints(
    location: CheckpointLocation, tmp_path: Path
) -> None:
    for step in (2, 3):
        location.send(write(location, step), NAMES)
    cut_file(tmp_path / "remote" / name(3, MARK))
    location.send(write(location, 4), NAMES)
    found = location.latest(4)
    assert found is not None
    assert found.step == 2
