"""The numbers of requests that outlive the gateway's process."""

import fcntl
from pathlib import Path

import pytest

from cavvy.capabilities.serving.gateway import kept_counts
from cavvy.capabilities.serving.gateway.kept_counts import KeptCounts, read_work


def add(kept: KeptCounts, replica: str, key: str = "", requests: int = 1, work_us: int = 0) -> None:
    count = kept.find("chat", replica, key)
    count[0] += requests
    count[1] += work_us


def total(kept: KeptCounts, service: str = "chat") -> dict[str, dict[str, tuple[int, int]]]:
    return {
        replica: {key: (count[0], count[1]) for key, count in counts.items()}
        for replica, counts in kept.resume(service).items()
    }


def drop(kept: KeptCounts) -> None:
    """Leave the file as a killed process does: only its lock is released."""
    fcntl.flock(kept._file, fcntl.LOCK_UN)


def test_the_next_process_continues_the_counts_of_a_killed_one(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    first = KeptCounts(path)
    add(first, "r1", "k1", 3, 500)
    add(first, "r1", "", 1)
    drop(first)
    assert read_work(path)["chat"][first.epoch]["r1"]["k1"].requests == 3
    second = KeptCounts(path)
    assert (second.epoch, second.kept) == (first.epoch, True)
    assert total(second) == {"r1": {"k1": (3, 500), "": (1, 0)}}
    assert total(second, "other") == {}
    add(second, "r1", "k1", 2)
    second.close()
    (work,) = read_work(path)["chat"].values()
    assert work["r1"]["k1"].requests == 5


def test_slots_are_reused_and_their_number_grows(tmp_path: Path) -> None:
    kept = KeptCounts(tmp_path / "counts")
    for number in range(600):
        add(kept, f"r{number}")
    size = (tmp_path / "counts").stat().st_size
    for number in range(600):
        kept.forget("chat", f"r{number}")
        add(kept, f"s{number}", requests=2)
    assert (tmp_path / "counts").stat().st_size == size
    kept.find("other", "r1", "")[0] = 9
    drop(kept)
    kept = KeptCounts(tmp_path / "counts")
    assert total(kept) == {f"s{number}": {"": (2, 0)} for number in range(600)}
    kept.keep_only({"chat": None})
    assert total(kept, "other") == {}
    drop(kept)
    assert "other" not in read_work(tmp_path / "counts")


def test_a_file_from_before_a_restart_of_the_machine_is_used_only_if_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, boot = tmp_path / "counts", tmp_path / "boot_id"
    monkeypatch.setattr(kept_counts, "_BOOT_FILE", boot)
    boot.write_text("one\n")
    kept = KeptCounts(path)
    add(kept, "r1")
    kept.close()
    boot.write_text("two\n")
    again = KeptCounts(path)
    assert (again.epoch, total(again)) == (kept.epoch, {"r1": {"": (1, 0)}})
    drop(again)
    boot.write_text("three\n")
    assert read_work(path) == {}
    new = KeptCounts(path)
    assert new.epoch != kept.epoch
    assert total(new) == {}


def test_counts_without_a_usable_file_end_with_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_counts, "_LOCK_S", 0.0)
    path = tmp_path / "counts"
    first = KeptCounts(path)
    add(first, "r1")
    other, nowhere = KeptCounts(path), KeptCounts(tmp_path / "none" / "counts")
    for each in (other, nowhere, KeptCounts()):
        add(each, "r1", requests=7)
        assert not each.kept
        assert each.epoch != first.epoch
        assert each.find("chat", "r1", "")[0] == 7
        each.close()
    add(first, "r" * 300)  # a name that is too long
    assert [*read_work(path)["chat"][first.epoch]] == ["r1"]


@pytest.mark.parametrize(
    "content", [b"", b"x", b"x" * 70_000, b"cavvy-counts-1\n\0" + b"\xff" * 70_000]
)
def test_a_damaged_file_is_replaced_or_read_as_far_as_possible(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "counts"
    path.write_bytes(content)
    assert read_work(path) == {}
    kept = KeptCounts(path)
    assert kept.kept
    add(kept, "r1")
    assert read_work(path)["chat"][kept.epoch]["r1"][""].requests == 1
