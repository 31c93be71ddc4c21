"""What the real libraries write is read back exactly, and what we write by them; skipped where one
is not installed.

To run all of it: `pip install webdataset tfrecord h5py datasets`, and `pip install --no-deps
litdata mosaicml-streaming` with what these two then ask for (with their dependencies they exchange
PyTorch).
"""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from cavvy.readers import open_samples, write_shards
from cavvy.train import Data

pytestmark = [
    pytest.mark.system,
    pytest.mark.filterwarnings("ignore"),  # theirs
]
COUNT, BATCH = 29, 6


def real(name: str) -> Any:
    return pytest.importorskip(
        name, reason=f"{name} is not installed: what it writes was not read here"
    )


def pixels(number: int) -> Any:
    return np.random.default_rng(number).integers(0, 256, (4, 5, 3), np.uint8)


def same(found: Any, written: Any) -> None:
    if isinstance(written, dict):
        assert set(found) == set(written)
        for name in written:
            same(found[name], written[name])
    elif isinstance(written, np.ndarray):
        assert (np.asarray(found).dtype, np.shape(found)) == (written.dtype, written.shape)
        assert (np.asarray(found) == written).all()
    else:
        assert type(found) is type(written)
        assert found == written


def check(source: Any, written: list[Any]) -> None:
    """By any index, in any order, in another process, and in training on ranks that change on
    the way.
    """
    assert len(source) == len(written)
    for number in (*reversed(range(len(written))), 3, 11):
        same(source[number], written[number])
    moved = pickle.loads(pickle.dumps(source))
    same(moved[len(written) - 1], written[-1])
    numbers = {pickle.dumps(source[n]): n for n in range(len(written))}
    data = Data(
        source, global_batch=BATCH, seed=3, transform=lambda sample: numbers[pickle.dumps(sample)]
    )
    alone = [
        data.fetch(range(n, n + BATCH)).tolist() for n in range(0, 2 * len(written) - BATCH, BATCH)
    ]
    for step, ids in enumerate(alone):
        ranks = (4, 2, 1, 3)[step * 4 // len(alone)]
        shares = [(rank * BATCH // ranks, (rank + 1) * BATCH // ranks) for rank in range(ranks)]
        got = [
            data.fetch(range(step * BATCH + low, step * BATCH + high)).tolist()
            for low, high in shares
            if low < high
        ]
        assert [number for part in got for number in part] == ids
    assert sorted([number for ids in alone for number in ids][: len(written)]) == list(
        range(len(written))
    )


def test_webdataset(tmp_path: Path) -> None:
    wds = real("webdataset")
    with wds.ShardWriter(str(tmp_path / "%03d.tar"), maxcount=10, verbose=0) as out:
        for n in range(COUNT):
            out.write(
                {
                    "__key__": f"a/{n:04}",
                    "png": pixels(n),
                    "cls": n,
                    "json": {"n": [n]},
                    "npy": pixels(n) / 255,
                }
            )
    theirs = list(wds.WebDataset(sorted(map(str, tmp_path.glob("*.tar"))), shardshuffle=False))
    assert len(theirs) == COUNT
    written = [
        {
            "__key__": f"a/{n:04}",
            "png": pixels(n),
            "cls": n,
            "json": {"n": [n]},
            "npy": pixels(n) / 255,
        }
        for n in range(COUNT)
    ]
    check(open_samples(f"webdataset:{tmp_path}"), written)
    raw = open_samples(f"webdataset:{tmp_path}", decoded=False)
    for n in range(COUNT):
        names = ("__key__", "png", "cls", "json", "npy")
        same(raw[n], {name: theirs[n][name] for name in names})


EXAMPLES: list[dict[str, list[Any]]] = [
    {"n": [n, -n, 1 << 40], "x": [n / 8, -0.5], "t": [b"a%d" % n, b""], "none": []}
    for n in range(COUNT)
]


def test_tfrecord_by_tensorflow(tmp_path: Path) -> None:
    tf = real("tensorflow")

    def feature(values: list[Any]) -> Any:
        if not values:
            return tf.train.Feature()
        if isinstance(values[0], bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
        if isinstance(values[0], float):
            return tf.train.Feature(float_list=tf.train.FloatList(value=values))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as out:
        for row in EXAMPLES:
            features = {name: feature(values) for name, values in row.items()}
            out.write(
                tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()
            )
    check(open_samples(f"tfrecord:{tmp_path}"), EXAMPLES)


def test_tfrecord_by_tfrecord(tmp_path: Path) -> None:
    writer = real("tfrecord").TFRecordWriter(str(tmp_path / "a.tfrecord"))
    rows = [{name: values for name, values in row.items() if values} for row in EXAMPLES]
    kinds = {"n": "int", "x": "float", "t": "byte"}
    for row in rows:
        writer.write({name: (values, kinds[name]) for name, values in row.items()})
    writer.close()
    check(open_samples(f"tfrecord:{tmp_path}"), rows)


def test_hdf5(tmp_path: Path) -> None:
    h5py = real("h5py")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["pixels"] = np.stack([pixels(n) for n in range(COUNT)])
        file.create_dataset(
            "labels", data=np.arange(COUNT, dtype="int16"), chunks=(4,), compression="gzip"
        )
        file.create_dataset("text", data=[f"ä{n}" for n in range(COUNT)], dtype=h5py.string_dtype())
        file.create_group("about")["by"] = "us"
    written = [
        {"pixels": pixels(n), "labels": np.int16(n), "text": f"ä{n}".encode()} for n in range(COUNT)
    ]
    check(open_samples(f"hdf5:{tmp_path / 'a.h5'}"), written)


def test_parquet(tmp_path: Path) -> None:
    pa, pq = real("pyarrow"), real("pyarrow.parquet")
    written = [
        {"n": n, "x": n / 8, "t": "ä" * n, "raw": b"%d" % n, "list": [n, n + 1]}
        for n in range(COUNT)
    ]
    pq.write_table(
        pa.Table.from_pylist(written[:20]),
        tmp_path / "0.parquet",
        row_group_size=7,
        compression="zstd",
    )
    pq.write_table(pa.Table.from_pylist(written[20:]), tmp_path / "1.parquet")
    check(open_samples(f"parquet:{tmp_path}"), written)


def test_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    datasets = real("datasets")
    written = [{"n": n, "x": n / 8, "t": "ä" * n, "list": [n] * (n % 3)} for n in range(COUNT)]
    both = datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_list(written),
            "test": datasets.Dataset.from_list(written[:5]),
        }
    )
    both.save_to_disk(tmp_path / "both", num_shards={"train": 3, "test": 1})
    both["train"].save_to_disk(tmp_path / "one")
    check(open_samples(f"huggingface:{tmp_path / 'both'}"), written)
    check(open_samples(f"huggingface:{tmp_path / 'one'}"), written)
    assert len(open_samples(f"huggingface:{tmp_path / 'both'}", split="test")) == 5


def row(number: int) -> dict[str, Any]:
    return {
        "n": number,
        "x": number / 8,
        "t": "ä" * number,
        "raw": b"%d" % number,
        "pixels": pixels(number),
    }


def test_litdata(tmp_path: Path) -> None:
    litdata = real("litdata")
    options = {
        "inputs": list(range(COUNT)),
        "output_dir": str(tmp_path / "out"),
        "chunk_size": 8,
        "num_workers": 1,
    }
    litdata.optimize(fn=row, start_method="fork", **options)
    check(open_samples(f"litdata:{tmp_path / 'out'}"), [row(n) for n in range(COUNT)])


COLUMNS = {
    **{"n": "int", "small": "uint8", "x": "float32", "t": "str", "raw": "bytes", "json": "json"},
    **{
        "png": "png",
        "fixed": "ndarray:uint8:4,5,3",
        "typed": "ndarray:float32",
        "free": "ndarray",
        "long": "str_int",
    },
}


def mds_row(n: int) -> dict[str, Any]:
    return {
        **{
            "n": -n,
            "small": np.uint8(n),
            "x": np.float32(n / 8),
            "t": "ä" * n,
            "raw": b"x" * n,
            "json": {"n": [n]},
        },
        **{"png": Image.fromarray(pixels(n)), "fixed": pixels(n), "long": 10**30 + n},
        "typed": np.full((n % 3 + 1, 300), n, np.float32),
        "free": np.full((2, n % 4 + 1, 1), n, ("int16", "float64", "uint8")[n % 3]),
    }


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return real("streaming")


def test_mds_of_mosaicml(streaming: Any, tmp_path: Path) -> None:
    with streaming.MDSWriter(out=str(tmp_path / "out"), columns=COLUMNS, size_limit=9000) as out:
        for n in range(COUNT):
            out.write(mds_row(n))
    assert len(list((tmp_path / "out").glob("*.mds"))) > 2
    written = [
        {**mds_row(n), "small": n, "x": n / 8, "png": pixels(n)} for n in range(COUNT)
    ]  # scalars come as Python's, pictures as pixels
    check(open_samples(f"mds:{tmp_path / 'out'}"), written)


def test_our_mds_by_mosaicml(streaming: Any, tmp_path: Path) -> None:
    written = [{**row(n), "list": [n], "yes": n % 2 == 0} for n in range(COUNT)]
    write_shards(written, tmp_path / "out", shard_bytes=900)
    theirs = streaming.LocalDataset(local=str(tmp_path / "out"))
    assert len(theirs) == COUNT
    for n in range(COUNT):
        same(theirs[n], {**written[n], "yes": int(written[n]["yes"]), "x": np.float64(n / 8)})
