"""Readers give the sample that was written under each index, in any order, and refuse what is
damaged.
"""

import io
import json
import pickle
import struct
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image

from cavvy.cli.main import cli
from cavvy.readers import open_samples, write_shards
from cavvy.readers.records import masked_crc
from cavvy.train import Data

COUNT = 23


def pixels(number: int) -> Any:
    return np.full((4, 5, 3), number, np.uint8)


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(number)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    folder = tmp_path / "tars"
    folder.mkdir()
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as file:
            for number in range(shard * 10, COUNT if shard else 10):
                for ending, data in (("cls", str(number).encode()), ("seen.png", png(number))):
                    member = tarfile.TarInfo(f"some/{number:03}.{ending}")
                    member.size = len(data)
                    file.addfile(member, io.BytesIO(data))
    return folder


def test_webdataset(tars: Path) -> None:
    found = open_samples(f"webdataset:{tars}")
    assert len(found) == COUNT
    for number in (22, 0, 10, 9):
        sample = found[number]
        assert (sample["__key__"], sample["cls"]) == (f"some/{number:03}", number)
        assert (sample["seen.png"] == pixels(number)).all()
    assert pickle.loads(pickle.dumps(found))[3]["cls"] == 3  # as worker processes get it


def field(number: int, data: bytes) -> bytes:
    assert len(data) < 128
    return bytes([number << 3 | 2, len(data)]) + data


def example(number: int) -> bytes:
    kinds = {
        "name": field(1, field(1, b"n%d" % number)),
        "parts": field(2, field(1, struct.pack("<2f", number, 0.5))),
        "none": b"",
        "minus": field(3, field(1, b"\xff" * 9 + b"\x01" + bytes([number]))),
    }
    return field(
        1,
        b"".join(
            field(1, field(1, name.encode()) + field(2, value)) for name, value in kinds.items()
        ),
    )


def test_tfrecord(tmp_path: Path) -> None:
    assert (
        masked_crc(b"123456789")
        == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF
    )
    file = tmp_path / "some.tfrecord"
    with file.open("wb") as out:
        for number in range(COUNT):
            data, size = example(number), struct.pack("<Q", len(example(number)))
            out.write(
                size
                + struct.pack("<I", masked_crc(size))
                + data
                + struct.pack("<I", masked_crc(data))
            )
    found = open_samples(f"tfrecord:{file}")
    assert len(found) == COUNT
    assert found[7] == {"name": [b"n7"], "parts": [7.0, 0.5], "none": [], "minus": [-1, 7]}
    whole = file.read_bytes()
    file.write_bytes(whole[:-10] + bytes([whole[-10] ^ 1]) + whole[-9:])
    with pytest.raises(ValueError, match="damaged"):
        open_samples(f"tfrecord:{file}")[COUNT - 1]
    file.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match="ends within"):
        open_samples(f"tfrecord:{file}")


def test_mds_gives_back_what_was_written(tmp_path: Path) -> None:
    samples = [
        {"pixels": pixels(n), "label": n, "share": n / 8, "text": "ä" * n, "raw": b"x" * n}
        for n in range(COUNT)
    ]
    assert write_shards(iter(samples), tmp_path / "out", shard_bytes=500) == COUNT
    assert len(json.loads((tmp_path / "out/index.json").read_text())["shards"]) > 3
    found = open_samples(f"mds:{tmp_path / 'out'}")
    assert len(found) == COUNT
    for number in reversed(range(COUNT)):
        sample = found[number]
        assert (sample.pop("pixels") == pixels(number)).all()
        assert sample == {
            "label": number,
            "share": number / 8,
            "text": "ä" * number,
            "raw": b"x" * number,
        }
    with pytest.raises(ValueError, match="already"):
        write_shards(samples, tmp_path / "out")
    with pytest.raises(ValueError, match="all samples need the same columns"):
        write_shards([(np.zeros(2),), (np.zeros(2, "uint8"),)], tmp_path / "other")
    with pytest.raises(FileNotFoundError):  # nothing half written counts
        open_samples(f"mds:{tmp_path / 'other'}")


def test_mds_has_arrays_of_any_shape(tmp_path: Path) -> None:
    shapes = [(4, 3, 3), (4, 3, 3), (5, 2, 3), (300, 1), (1, 7, 3), (1, 7, 3)]
    samples = [
        (np.random.default_rng(n).integers(0, 255, shape, "uint8"), n)
        for n, shape in enumerate(shapes)
    ]
    write_shards(samples, tmp_path / "out", shard_bytes=70)
    shards = json.loads((tmp_path / "out/index.json").read_text())["shards"]
    kinds = [shard["column_encodings"][0] for shard in shards]
    assert kinds == ["ndarray:uint8:4,3,3", "ndarray:uint8", "ndarray:uint8:1,7,3"]
    found = open_samples(f"mds:{tmp_path / 'out'}")
    for number, (array, label) in enumerate(samples):
        assert (found[number]["0"] == array).all()
        assert found[number]["0"].shape == array.shape
        assert found[number]["1"] == label


def test_parquet(tmp_path: Path) -> None:
    for shard in range(2):
        table = pa.table(
            {"n": range(shard * 20, shard * 20 + 20), "t": [str(n) for n in range(20)]}
        )
        pq.write_table(table, tmp_path / f"{shard}.parquet", row_group_size=3)
    found = open_samples(f"parquet:{tmp_path}", columns=["n"])
    assert [found[n]["n"] for n in (39, 0, 20, 19, 5)] == [39, 0, 20, 19, 5]
    assert len(found) == 40
    assert pickle.loads(pickle.dumps(found))[21] == {"n": 21}
    with pytest.raises(IndexError):
        found[40]


def test_picture_folders_of_any_sizes_are_converted(tmp_path: Path) -> None:
    shapes = [(8, 5, 3), (3, 9, 3), (8, 5, 3), (1, 1, 3)]
    for number, shape in enumerate(shapes):
        folder = tmp_path / "in" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full(shape, number, "uint8")).save(folder / f"{number}.png")
    said = CliRunner().invoke(
        cli, ["data", "convert", f"images:{tmp_path / 'in'}", str(tmp_path / "out")]
    )
    assert said.exit_code == 0, said.output
    shards = open_samples(f"mds:{tmp_path / 'out'}")
    for place, number in enumerate((0, 2, 1, 3)):
        picture, label = shards[place]["0"], shards[place]["1"]
        assert (picture.shape, label) == (shapes[number], number % 2)
        assert (picture == number).all()


def test_picture_folders_are_converted_and_read_faster(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / "in" / f"class{number % 2}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / f"class{number % 2}" / f"{number}.png").write_bytes(png(number))
    said = CliRunner().invoke(
        cli, ["data", "convert", f"images:{tmp_path / 'in'}", str(tmp_path / "out")]
    )
    assert said.exit_code == 0, said.output
    assert "wrote 6 samples" in said.output
    assert "samples/s before" in said.output
    shards = open_samples(f"mds:{tmp_path / 'out'}")
    assert [int(shards[n]["0"][0, 0, 0]) for n in range(6)] == [0, 2, 4, 1, 3, 5]
    assert [shards[n]["1"] for n in range(6)] == [0, 0, 0, 1, 1, 1]
    again = CliRunner().invoke(
        cli, ["data", "convert", f"images:{tmp_path / 'in'}", str(tmp_path / "out")]
    )
    assert again.exit_code != 0
    assert "empty folder" in str(again.output) + str(again.exception)


def test_training_reads_them_in_any_order_and_goes_on(tars: Path) -> None:
    def label(sample: dict[str, Any]) -> int:
        return int(sample["cls"])

    data = Data(open_samples(f"webdataset:{tars}"), global_batch=5, transform=label)
    whole = data.fetch(range(COUNT)).tolist()
    assert sorted(whole) == list(range(COUNT))
    assert data.fetch(range(11, COUNT)).tolist() == whole[11:]


def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean webdataset:"):
        open_samples(f"webdatasets:{tmp_path}")
    with pytest.raises(FileNotFoundError):
        open_samples("mds:/nowhere/at/all")
    with pytest.raises(FileNotFoundError, match=r"\.tar"):
        open_samples(f"webdataset:{tmp_path}")
