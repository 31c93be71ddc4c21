"""What a run sends to TensorBoard, W&B, MLflow, trackio and Aim is read back by their own means.

Skipped where one is not installed: `pip install tensorboard wandb mlflow trackio aim`.
"""

import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cavvy.train.trackers import open_tracker

pytestmark = [pytest.mark.system, pytest.mark.filterwarnings("ignore")]  # theirs
Values = dict[int, float]
SENT = {step: math.exp(-step) for step in range(7)}


def send(kind: str, folder: Path, steps: range) -> None:
    tracker = open_tracker(kind, name="a-run", folder=str(folder))
    for step in steps:
        tracker.log({"loss": SENT[step], "usd_per_step": 0.25}, step)
    tracker.close()


def real(name: str) -> Any:
    return pytest.importorskip(
        name, reason=f"{name} is not installed: what it was sent was not read here"
    )


def tensorboard(folder: Path) -> list[Values]:
    reading = real("tensorboard.backend.event_processing.event_accumulator")
    events = reading.EventAccumulator(str(folder / "a-run"))
    events.Reload()
    assert {event.value for event in events.Scalars("usd_per_step")} == {0.25}
    return [{event.step: event.value for event in events.Scalars("loss")}]


def wandb_records(data: bytes) -> Iterator[bytes]:
    """A file of W&B is 7 bytes and a log of LevelDB: blocks of 32 KiB; checksum, length and kind
    before each part.
    """
    place, held = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        size, kind = struct.unpack_from("<HB", data, place + 4)
        held, place = held + data[place + 7 : place + 7 + size], place + 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield held
            held = b""


def wandb(folder: Path) -> list[Values]:
    record = real("wandb.proto.wandb_internal_pb2").Record
    found: dict[str, Values] = {}
    for file in sorted(folder.rglob("*.wandb")):
        run = found.setdefault(
            file.stem, {}
        )  # run-NAME.wandb: parts of the same run in several folders
        for data in wandb_records(file.read_bytes()):
            items = record.FromString(data).history.item
            row = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items
            }
            if "loss" in row:
                run[row["_step"]] = row["loss"]
    return list(found.values())


def mlflow(folder: Path) -> list[Values]:
    client = real("mlflow").MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("cavvy")
    runs = client.search_runs([experiment.experiment_id])
    return [
        {m.step: m.value for m in client.get_metric_history(run.info.run_id, "loss")}
        for run in runs
    ]


def trackio(folder: Path) -> list[Values]:
    storage = real("trackio.sqlite_storage").SQLiteStorage
    runs = storage.get_runs("cavvy")
    names = [run if isinstance(run, str) else run["name"] for run in runs]
    return [{row["step"]: row["loss"] for row in storage.get_logs("cavvy", name)} for name in names]


def aim(folder: Path) -> list[Values]:
    repo = real("aim").Repo(str(folder))
    # as `aim storage reindex` and `aim up` do: what is not in the index is not found
    repo._recreate_index()
    found = []
    for run in real("aim").Repo(str(folder)).iter_runs():
        (loss,) = [metric for metric in run.metrics() if metric.name == "loss"]
        steps, (values, *_) = loss.data.numpy()
        found.append(dict(zip(steps.astype(int).tolist(), values.tolist(), strict=True)))
    return found


READ: dict[str, Callable[[Path], list[Values]]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
    "trackio": trackio,
    "aim": aim,
}


@pytest.mark.parametrize("kind", READ)
def test_values_come_back_and_a_run_goes_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real(kind)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("CAVVY_PROJECT", raising=False)
    folder = tmp_path / kind
    folder.mkdir()
    send(kind, folder, range(4))
    send(kind, folder, range(4, 7))  # of a process that came after the first was lost
    runs = READ[kind](folder)
    assert len(runs) == 1
    assert {step: value for run in runs for step, value in run.items()} == pytest.approx(
        SENT, rel=1e-6
    )
    assert sum(map(len, runs)) == len(SENT)


def test_aim_goes_on_where_another_machine_died_and_keeps_projects_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real("aim")
    monkeypatch.setenv("CAVVY_PROJECT", "one")
    send("aim", tmp_path, range(4))
    (name,) = [path.name for path in (tmp_path / ".aim/meta/chunks").iterdir()]
    (tmp_path / f".aim/locks/{name}.softlock").write_text(
        "1234-1-0"
    )  # a machine and a process of it
    send("aim", tmp_path, range(4, 7))
    monkeypatch.setenv("CAVVY_PROJECT", "two")
    send("aim", tmp_path, range(2))
    assert sorted(map(len, aim(tmp_path))) == [2, 7]


def test_aim_joins_no_trainings_that_were_given_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real("aim")
    monkeypatch.delenv("CAVVY_JOB_ID", raising=False)
    first, second = (open_tracker("aim", folder=str(tmp_path)) for _ in range(2))  # both at once
    for tracker in (first, second):
        tracker.log({"loss": 1.0}, 0)
        tracker.close()
    assert aim(tmp_path) == [{0: 1.0}, {0: 1.0}]
