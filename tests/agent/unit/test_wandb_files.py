"""Files of W&B runs, read as they grow. The file beside this one was written by wandb 0.31 with
WANDB_MODE=offline: 100 steps, a NaN at step 7, an infinity at step 8, and a result in the summary.
"""

import os
import shutil
import struct
import zlib
from collections.abc import Sequence
from math import inf, isnan
from pathlib import Path

import pytest
from tests.agent.unit.test_event_files import Reader

from cavvy.agent.work import wandb_files
from cavvy.agent.work.event_files import EventFileReader
from cavvy.agent.work.run_events import PIECE_BYTES, GrowingFile, RunEvent, RunFile
from cavvy.agent.work.wandb_files import (
    BLOCK,
    FIRST,
    HEAD,
    LARGEST,
    MIDDLE,
    PIECE_HEAD,
    WandbRecords,
)

FILE = Path(__file__).parent / "wandb_files" / "offline.wandb"
NAME = "run-abc.wandb"


class Run(RunFile):
    """A file of a run, with what is known of it meanwhile."""

    def __init__(self, path: Path, host: str = "") -> None:
        self.bytes = GrowingFile(os.open(path, os.O_RDONLY))
        self.records = WandbRecords(self.bytes, host)
        super().__init__("runs", self.bytes, self.records.take, self.records.parse)


def read(path: Path, host: str = "") -> Sequence[RunEvent]:
    file = Run(path, host)
    found = [each for each in file.read(10_000) if each.values or each.params]
    file.close()
    return found


def piece(kind: int, data: bytes) -> bytes:
    crc = zlib.crc32(data, zlib.crc32(bytes([kind])))
    return struct.pack("<IHB", crc, len(data), kind) + data


def field(number: int, data: bytes) -> bytes:
    key, size = number << 3 | 2, len(data)
    heads = [bytes([n & 127 | 128, n >> 7]) if n > 127 else bytes([n]) for n in (key, size)]
    return b"".join(heads) + data


def history(**values: str) -> bytes:
    items = [field(1, field(1, k.encode()) + field(16, v.encode())) for k, v in values.items()]
    return field(2, b"".join(items))


def test_a_run_of_wandb(tmp_path: Path) -> None:
    events = read(FILE)
    logged = [each for each in events if "loss" in each.values]
    assert [each.step for each in logged] == [*range(100)]
    assert [each.values["nested/a"] for each in logged] == [*range(100)]
    assert isnan(logged[7].values["loss"])
    assert logged[8].values["big"] == inf
    assert logged[3].values["train/acc"] == 0.03
    assert all(each.at > 1.7e9 for each in logged)
    params = {name: text for each in events for name, text in each.params.items()}
    assert params == {
        **{"lr": "0.1", "opt/name": "adam", "opt/betas": "[0.9, 0.999]"},
        **{"layers": "3", "amp": "true", "late": "yes"},
    }
    stated = [each.values for each in events if "best" in each.values]
    assert stated == [{"best": 0.5}], "what the history has is not told again by the summary"


@pytest.mark.parametrize(
    "nothing",
    [
        bytes(PIECE_HEAD),  # a broken block, as all of a sparse file are
        piece(FIRST, b""),
        piece(MIDDLE, b""),
        piece(FIRST, b"") + piece(MIDDLE, b"") * 9,
        piece(FIRST, bytes(20_000)) + piece(MIDDLE, bytes(12_000)),
    ],
)
def test_a_read_ends_where_no_piece_completes_a_record(tmp_path: Path, nothing: bytes) -> None:
    """The agent waits for it, and a file of the work may be of any length."""
    block = nothing * (BLOCK // len(nothing))
    path = tmp_path / NAME
    data = (block + bytes(BLOCK - len(block))) * 24
    path.write_bytes(HEAD + b"\0" + piece(0, b"") + data[2 * PIECE_HEAD :])
    file = Run(path)
    assert len([*file.read(10)]) == 10
    assert file.bytes._offset <= 2 * PIECE_BYTES, "the rest is for later"
    assert sum(len(each) for each in file.records._begun or ()) <= LARGEST
    found = [*file.read(1_000_000)]
    assert found, "and comes then"
    assert not any(each.values or each.params for each in found)
    file.close()


def test_a_record_of_many_empty_pieces_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / NAME
    blocks = (piece(MIDDLE, b"") * (BLOCK // PIECE_HEAD) + bytes(BLOCK % PIECE_HEAD)) * 20
    path.write_bytes(HEAD + b"\0" + piece(FIRST, b"") + blocks[2 * PIECE_HEAD :])
    file = Run(path)
    assert len([*file.read(LARGEST)]) > LARGEST // PIECE_HEAD
    assert file.records._begun is None
    file.close()


def test_the_agent_finds_runs_of_wandb_beside_event_files(tmp_path: Path) -> None:
    folder = tmp_path / "wandb" / "offline-run-1"
    folder.mkdir(parents=True)
    shutil.copy(FILE, folder / NAME)
    reader = Reader(tmp_path)
    found = reader.read(last=True)
    assert sum("loss" in values for _, values in found) == 100
    assert reader.params["late"] == "yes"


def test_a_run_is_read_as_it_grows(tmp_path: Path) -> None:
    data, path = FILE.read_bytes(), tmp_path / NAME
    path.touch()
    file, found = Run(path), 0
    with path.open("wb", buffering=0) as writes:
        for at in range(0, len(data), 997):
            writes.write(data[at : at + 997])
            found += sum("loss" in each.values for each in file.read(10_000))
    assert found == 100
    file.close()


def test_a_rank_reads_the_runs_of_its_own_host(tmp_path: Path) -> None:
    assert any("loss" in each.values for each in read(FILE, "node"))
    assert read(FILE, "other") == []


def test_a_broken_piece_costs_its_block_only(tmp_path: Path) -> None:
    data = bytearray(FILE.read_bytes())
    assert len(data) > BLOCK
    data[1000] ^= 1
    (tmp_path / NAME).write_bytes(data)
    steps = [each.step for each in read(tmp_path / NAME) if "loss" in each.values]
    assert steps == sorted(steps)
    assert steps[-10:] == [*range(90, 100)], "the next block is read"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b":W&B",
        b"GIF89a and more",
        HEAD + b"\0" + b"\xff" * 70_000,
        HEAD + b"\0" + piece(1, b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"),
        HEAD + b"\0" + piece(1, history(loss="[" * 10_000)),
        HEAD + b"\0" + piece(1, history(loss="{}", acc='"<b>"', x="1" + "0" * 5000)),
        HEAD + b"\0" + piece(3, b"middle") + piece(4, b"last"),
    ],
)
def test_hostile_files_give_no_values(tmp_path: Path, data: bytes) -> None:
    (tmp_path / NAME).write_bytes(data)
    found = [name for each in read(tmp_path / NAME) for name in each.values]
    assert found in ([], ["x"])


def test_large_records_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_files, "LARGEST", 1000)
    large = piece(2, b"x" * 600) + piece(3, b"x" * 600) + piece(4, b"x" * 600)
    small = piece(1, history(loss="0.5", _step="3", _timestamp="1.5"))
    (tmp_path / NAME).write_bytes(HEAD + b"\0" + large + small)
    [event] = read(tmp_path / NAME)
    assert (event.values, event.step, event.at) == ({"loss": 0.5}, 3.0, 1.5)


def test_links_to_runs_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    shutil.copy(FILE, tmp_path / "secret" / NAME)
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / NAME).symlink_to(tmp_path / "secret" / NAME)
    assert Reader(tmp_path / "shown").read(last=True) == []


def test_a_pipe_is_no_run(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    reader = EventFileReader([str(tmp_path)], {}.update)
    reader.read(lambda *_: None, last=True)
