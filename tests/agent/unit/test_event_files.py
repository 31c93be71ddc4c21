"""Event files of TensorBoard, read as they grow. The files beside this one were written by
SummaryWriter of PyTorch 2.13 and of tensorboardX 2.6, and by Lightning 2.6's TensorBoardLogger.
"""

import os
import shutil
import struct
from math import isnan
from pathlib import Path
from typing import Any

import pytest

from cavvy.agent.allowed_folders import AllowedFolders
from cavvy.agent.work import event_files, run_events
from cavvy.agent.work.event_files import EventFileReader, masked_crc, read_tensor
from cavvy.agent.work.meters import UsageMeter
from cavvy.agent.work.monitor import WorkMonitor

FILES = Path(__file__).parent / "event_files"
NAME = "events.out.tfevents.1.host.2.0"


class Reader:
    """Reads event files below a folder; the work began at the time 0."""

    def __init__(self, *folders: Path, **more: Any) -> None:
        self.values: list[tuple[float, dict[str, float]]] = []
        self.params: dict[str, str] = {}
        more.setdefault("clock", lambda: 0.0)
        names = [str(each) for each in folders]
        self.reader = EventFileReader(names, self.params.update, **more)
        self.reader._clock = lambda: 4e9

    def read(self, *, last: bool = False) -> list[tuple[float, dict[str, float]]]:
        self.values.clear()
        self.reader._search_at = 0.0
        self.reader.read(lambda values, step, age: self.values.append((step, values)), last=last)
        return [*self.values]


def field(number: int, kind: int, data: bytes) -> bytes:
    head = bytes([number << 3 | kind])
    return head + (bytes([len(data)]) if kind == 2 else b"") + data


def record(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    crcs = [struct.pack("<I", masked_crc(each)) for each in (head, data)]
    return head + crcs[0] + data + crcs[1]


def scalar(tag: str, value: float, step: int, at: float = 1.0) -> bytes:
    inner = field(1, 2, tag.encode()) + field(2, 5, struct.pack("<f", value))
    event = field(1, 1, struct.pack("<d", at)) + field(2, 0, bytes([step]))
    return record(event + field(5, 2, field(1, 2, inner)))


@pytest.fixture(autouse=True)
def stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_events, "PIECE_BYTES", 100)  # so that records lie across pieces


def test_the_checksum_is_the_one_of_tfrecord() -> None:
    """CRC-32C of 32 zeros is 0x8A9136AA (RFC 3720, appendix B.4)."""
    crc = 0x8A9136AA
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    assert masked_crc(b"\0" * 32) == masked


def test_scalars_of_pytorch(tmp_path: Path) -> None:
    shutil.copy(FILES / "torch.tfevents", tmp_path / NAME)
    found = Reader(tmp_path).read()
    assert found[:5] == [(step, {"loss": pytest.approx(1 / (step + 1))}) for step in range(5)]
    assert found[5:8] == [(7, {"acc": 0.25}), (8, {"acc": 0.5}), (8, {"exact": 0.1})]
    assert found[8][0] == 3
    assert isnan(found[8][1]["bad"])
    assert len(found) == 9, "histograms and texts are no scalars"


def test_settings_of_pytorch(tmp_path: Path) -> None:
    shutil.copy(FILES / "torch-hparams.tfevents", tmp_path / NAME)
    reader = Reader(tmp_path)
    assert reader.read() == [(0, {"best": 0.75})]
    assert reader.params == {"lr": "0.1", "opt": "adam", "depth": "3"}


def test_scalars_of_tensorboardx_and_lightning(tmp_path: Path) -> None:
    (tmp_path / "logs" / "version_0").mkdir(parents=True)
    shutil.copy(FILES / "lightning.tfevents", tmp_path / "logs" / "version_0" / NAME)
    reader = Reader(tmp_path / "logs")
    assert reader.read()[1:] == [(1, {"train/loss": 0.5}), (2, {"train/loss": 0.25})]
    assert reader.params == {"lr": "0.01", "layers": "3"}
    shutil.copy(FILES / "tensorboardx.tfevents", tmp_path / NAME)
    found = Reader(tmp_path).read()
    assert [step for step, values in found if "loss" in values] == [0, 1, 2]


def test_a_file_is_read_as_it_grows(tmp_path: Path) -> None:
    data = (FILES / "torch.tfevents").read_bytes()
    reader, found = Reader(tmp_path), []
    with (tmp_path / NAME).open("wb", buffering=0) as file:
        for at in range(0, len(data), 37):
            file.write(data[at : at + 37])
            found += reader.read()
    assert len(found) == 9
    assert reader.read(last=True) == []


def test_folders_are_runs(tmp_path: Path) -> None:
    for folder, tag in (("train", "loss"), ("validation", "loss"), ("a", "acc"), ("b", "acc")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / NAME).write_bytes(scalar(tag, 1, 3))
    names = {name for _, values in Reader(tmp_path).read() for name in values}
    assert {"train/loss", "validation/loss", "acc"} < names
    assert names - {"train/loss", "validation/loss", "acc"} in ({"a/acc"}, {"b/acc"})


def test_events_of_earlier_runs_are_left_out(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(scalar("loss", 1, 1, at=50.0) + scalar("loss", 2, 2, at=200.0))
    assert Reader(tmp_path, clock=lambda: 100.0).read() == [(2, {"loss": 2})]


def test_ranks_that_share_a_folder_read_only_their_own_files(tmp_path: Path) -> None:
    for host in ("one", "two"):
        (tmp_path / f"events.out.tfevents.1.{host}.2.0").write_bytes(scalar(host, 1, 1))
    assert Reader(tmp_path, host="two").read() == [(1, {"two": 1})]


@pytest.mark.parametrize(
    "broken",
    [
        b"not an event file at all",
        struct.pack("<Q", 1 << 62) + b"\0" * 40,
        record(b"\xff" * 50),
        record(field(5, 2, b"\x0a\x7f")),
        record(
            field(1, 1, b"\0" * 8) + field(5, 2, field(1, 2, field(8, 2, b"\x08\x01\x22\x03abc")))
        ),
        b"",
    ],
)
def test_a_broken_file_gives_nothing(tmp_path: Path, broken: bytes) -> None:
    (tmp_path / NAME).write_bytes(broken)
    (tmp_path / (NAME + "b")).write_bytes(scalar("loss", 1, 1))
    assert Reader(tmp_path).read(last=True) == [(1, {"loss": 1})]


def test_a_record_with_a_wrong_checksum_is_left_out(tmp_path: Path) -> None:
    wrong = bytearray(scalar("loss", 1, 1))
    wrong[-6] ^= 1
    (tmp_path / NAME).write_bytes(bytes(wrong) + scalar("loss", 2, 2))
    assert Reader(tmp_path).read() == [(2, {"loss": 2})]


def test_large_records_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "LARGEST", 1000)
    (tmp_path / NAME).write_bytes(record(b"x" * 5000) + scalar("loss", 2, 2))
    assert Reader(tmp_path).read() == [(2, {"loss": 2})]


def test_what_takes_long_is_read_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the agent's loop goes on, and a file with much in it does not keep the others waiting."""
    monkeypatch.setattr(event_files, "TICK_S", 0.0)
    for name in ("a", "b"):
        (tmp_path / f"{NAME}.{name}").write_bytes(b"".join(scalar(name, 1, n) for n in range(3)))
    reader = Reader(tmp_path)
    read = [reader.read() for _ in range(6)]
    assert [len(each) for each in read] == [1] * 6
    names = [next(iter(values)) for [(_, values)] in read]
    assert names in (["a", "b"] * 3, ["b", "a"] * 3)
    assert reader.read() == []


def test_no_long_checksum_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(event_files, "TICK_S", 600.0)  # a busy machine may need longer than usual
    (tmp_path / NAME).write_bytes(record(b"x" * 300_000) + scalar("loss", 2, 2))
    monkeypatch.setattr(
        event_files, "masked_crc", lambda data: (sizes.append(len(data)), masked_crc(data))[1]
    )
    assert Reader(tmp_path).read() == [(2, {"loss": 2})]
    assert max(sizes) <= 64 << 10


def test_links_and_pipes_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / NAME).write_bytes(scalar("loss", 1, 1))
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "folder").symlink_to(tmp_path / "secret")
    (shown / NAME).symlink_to(tmp_path / "secret" / NAME)
    os.mkfifo(shown / "tfevents.pipe")
    assert Reader(shown).read(last=True) == []


def test_a_folder_that_becomes_a_link_is_left(tmp_path: Path) -> None:
    """The work replaces its checkpoint folder, and a folder of another, by links."""
    for folder in ("other", "work/runs", "stored/runs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / NAME).write_bytes(scalar(folder, 1, 1))
    work, checkpoints = tmp_path / "work", tmp_path / "work" / "checkpoints"
    allowed = AllowedFolders([str(work)], [str(tmp_path / "stored")])
    reader = Reader(work, checkpoints, allowed=allowed)
    checkpoints.symlink_to(tmp_path / "other")
    assert reader.read() == [(1, {"work/runs": 1})]
    checkpoints.unlink()
    checkpoints.symlink_to(tmp_path / "stored")
    assert reader.read() == [(1, {"stored/runs": 1})], "the agent itself makes such a link"
    shutil.rmtree(work)
    work.symlink_to(tmp_path / "other")
    assert reader.read() == []


def test_a_search_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_files, "MOST_FILES", 3)
    monkeypatch.setattr(event_files, "MOST_ENTRIES", 40)
    deep = tmp_path / "/".join("d" * (event_files.DEEPEST + 1))
    deep.mkdir(parents=True)
    (deep / NAME).write_bytes(scalar("deep", 1, 1))
    assert Reader(tmp_path).read(last=True) == []
    for number in range(100):
        (tmp_path / f"{NAME}{number}").write_bytes(scalar(f"t{number}", 1, 1))
    assert len(Reader(tmp_path).read(last=True)) == 3


def test_a_tensor_of_each_type_is_a_number() -> None:
    def tensor(kind: int, content: bytes) -> bytes:
        return field(1, 0, bytes([kind])) + field(4, 2, content)

    assert read_tensor(tensor(2, struct.pack("<d", 0.1))) == 0.1
    assert read_tensor(tensor(9, struct.pack("<q", -5))) == -5
    assert read_tensor(tensor(14, b"\x80\x3f")) == 1.0, "bfloat16"
    assert read_tensor(tensor(1, struct.pack("<ff", 1, 2))) is None, "two elements"
    assert read_tensor(field(1, 0, b"\x03") + field(7, 2, b"\x05")) == 5
    assert read_tensor(field(1, 0, b"\x01") + field(5, 2, struct.pack("<f", 0.5))) == 0.5


def test_the_watch_of_the_work_sends_what_event_files_have(tmp_path: Path) -> None:
    sent: list[dict[str, Any]] = []

    def say(kind: str, **fields: Any) -> None:
        if kind == "points":
            sent.append(fields)

    usage = UsageMeter(None, b"")  # type: ignore[arg-type]
    watch = WorkMonitor(
        say, usage, progress="", checkpoints=None, idle_s=None, event_folders=[str(tmp_path)]
    )
    watch.tick()
    data = (FILES / "torch-hparams.tfevents").read_bytes()
    (tmp_path / NAME).write_bytes(data + scalar("loss", 0.5, 3, at=4e9))
    reader = watch._events
    assert reader is not None
    reader._began = 0.0
    watch.end()
    [fields] = sent
    assert fields["params"]["lr"] == "0.1"
    assert [each["names"] for each in fields["series"]] == [["best"]], "4e9 lies in the future"
