"""What the agents of one machine share: swept by age and size, never under the feet of who uses
it.
"""

import errno
import fcntl
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.agent.step_runner import StepRunner
from cavvy.agent.work import cache
from cavvy.agent.work.cache import AGE_S, DAY_S, EVERY_S, is_due, sweep, touch
from cavvy.agent.work.checkpoint_files import born_ns, written
from cavvy.agent.work.checkpoint_upload import FileEntry


def need(**given: object) -> Any:
    """Some of a configuration, a work or both."""
    return SimpleNamespace(**{"image": None, "setup": None, "workdir": None, "git": None, **given})


@pytest.fixture(autouse=True)
def polite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "nice", lambda _: 0)  # the test's own process stays as it is


def put(path: Path, days: float, size: int = 4096) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    at = time.time() - days * DAY_S
    os.utime(path, (at, at))
    return path


def setup(cache: Path, name: str, days: float) -> Path:
    kept = cache / "setups" / name
    put(kept / "tree" / "sub" / "file", days)
    put(kept / "dir" / "env", days)
    (kept / "lock").touch()
    return put(kept / "finished", days)


def test_what_nobody_has_used_for_long_goes_and_the_rest_stays(tmp_path: Path) -> None:
    old, new = AGE_S / DAY_S + 1, AGE_S / DAY_S - 1
    parts = [
        put(tmp_path / "blobs" / name, days)
        for name, days in (("old", old), ("new", new), ("used", old))
    ]
    sif, mount = put(tmp_path / "sif" / "a.sif", old), put(tmp_path / "mounts" / "m" / "file", old)
    setups = [
        setup(tmp_path, name, days) for name, days in (("old", old), ("new", new), ("made", old))
    ]
    assert touch(str(parts[2]))
    with open(setups[2].parent / "lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert sweep(str(tmp_path), limit=1e18) == 0
    assert [part.exists() for part in (*parts, sif, mount)] == [False, True, True, False, True]
    assert [mark.exists() for mark in setups] == [False, True, True]
    assert sorted(left.name for left in setups[0].parent.iterdir()) == ["lock"], (
        "who waits for it finds its lock"
    )


def test_a_cache_that_is_too_large_loses_what_was_used_longest_ago_but_nothing_used_today(
    tmp_path: Path,
) -> None:
    third, second, first = (put(tmp_path / "blobs" / str(days), days, 1000) for days in (3, 2, 0.1))
    sweep(str(tmp_path), limit=2500)
    assert [part.exists() for part in (third, second, first)] == [False, True, True]
    sweep(str(tmp_path), limit=0)
    assert [part.exists() for part in (third, second, first)] == [False, False, True]


def test_a_sweep_is_due_a_day_after_the_last_and_never_in_a_new_cache(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert not is_due(str(cache))
    put(cache / "swept", EVERY_S / DAY_S)
    assert is_due(str(cache))
    sweep(str(cache))
    assert not is_due(str(cache))


def test_a_checkpoint_of_one_file_took_from_its_making_to_its_last_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path / "model.pt", 0, 1000)
    born = born_ns(str(path))
    if born is None:
        pytest.skip("this file system does not remember when a file was made")
    os.utime(path, ns=(born, born + 2_500_000_000))
    monkeypatch.setattr(time, "time_ns", lambda: born + 3_000_000_000)
    seen = os.stat(path)
    entry = FileEntry("model.pt", seen.st_size, seen.st_mtime_ns, seen.st_ino, seen.st_mode, "")
    assert written(str(tmp_path), [entry], 0, born - 1) == (1000, 2.5)
    assert written(str(tmp_path), [entry], born + 1, 0) == (1000, 0.0), (
        "an old file that was written over"
    )
    assert written(str(tmp_path), [entry], 0, born + 1) == (1000, 0.0), (
        "or one that was brought back"
    )
    assert written(str(tmp_path), [entry], seen.st_mtime_ns, 0) == (0, 0.0)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ESTALE, errno.EDQUOT, errno.EIO])
def test_a_disk_that_takes_no_marks_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = put(tmp_path / "blob", 1)

    def refuse(path: str) -> None:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "utime", refuse)
    assert touch(str(path))
    assert not touch(str(tmp_path / "none"))


def test_what_came_into_use_while_the_rest_was_measured_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = AGE_S / DAY_S + 1
    blob, idle = (put(tmp_path / "blobs" / name, old) for name in ("used", "idle"))
    marks = [setup(tmp_path, name, old) for name in ("used", "idle")]
    fresh = tmp_path / "setups" / "fresh"
    put(fresh / "dir" / "env", old)
    os.utime(fresh, (time.time() - old * DAY_S,) * 2)
    measure = cache._measure

    def slow(folder: str) -> int:
        for path in (blob, marks[0]):
            assert touch(str(path))
        (fresh / "finished").touch()
        return measure(folder)

    monkeypatch.setattr(cache, "_measure", slow)
    sweep(str(tmp_path), limit=1e18)
    assert [blob.exists(), idle.exists()] == [True, False]
    assert [(mark.parent / "dir").exists() for mark in marks] == [True, False]
    assert (fresh / "dir").exists()


def test_the_image_file_of_running_work_is_in_use_as_its_setup_is(tmp_path: Path) -> None:
    sif, cache = put(tmp_path / "cache" / "sif" / "a.sif", 30), str(tmp_path / "cache")
    (tmp_path / "sif").write_text(str(sif))
    kept = setup(tmp_path / "cache", f"key@{os.uname().nodename}", 30)
    for work in (need(image="docker.io/alpine"), need(setup="make", setup_key="key")):
        steps = StepRunner.__new__(StepRunner)
        steps._touched = float("-inf")
        steps._config = need(cache=cache, caches=cache, private=str(tmp_path))
        steps._work = work
        steps._use_cache()
    assert [time.time() - os.stat(path).st_mtime < DAY_S for path in (sif, kept)] == [True, True]
    (tmp_path / "sif").unlink()  # where another engine runs the image
    steps._touched, steps._work = float("-inf"), need(image="docker.io/alpine")
    steps._use_cache()
