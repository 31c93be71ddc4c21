"""Pictures, texts and histograms of event files, and those that come in parts."""

import json
import os
import struct
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from tests.agent.unit.test_event_files import FILES, NAME, field, record

from cavvy.agent.config import BadConfig, ConfigFields
from cavvy.agent.outbox import MessageOutbox
from cavvy.agent.work import event_files, examples
from cavvy.agent.work.event_files import EventFileReader
from cavvy.agent.work.examples import ExampleBudget, ExampleParts, write_histogram
from cavvy.agent.work.step_values import MOST_EXAMPLE_NAMES, StepValueReader
from cavvy.sdk.examples import encode_png

PNG = encode_png(1, 1, 1, b"\x80")


@pytest.fixture(autouse=True)
def has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need longer than usual."""
    for name in ("TICK_S", "END_S"):
        monkeypatch.setattr(event_files, name, 600.0)


def read(folder: Path) -> list[tuple[str, str, bytes]]:
    found: list[tuple[str, str, bytes]] = []
    reader = EventFileReader(
        [str(folder)],
        lambda params: None,
        shown=lambda name, kind, data, step, age: found.append((name, kind, data)),
        clock=lambda: 0.0,
    )
    reader._clock = lambda: 4e9
    reader.read(lambda values, step, age: None, last=True)
    return found


def long_field(number: int, data: bytes) -> bytes:
    """Return a field whose length may need several bytes."""
    size, length = len(data), bytearray()
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2]) + bytes([*length, size]) + data


def event(value: bytes) -> bytes:
    head = field(1, 1, struct.pack("<d", 1.0)) + field(2, 0, b"\x07")
    return record(head + long_field(5, long_field(1, value)))


def metadata(plugin: bytes) -> bytes:
    return long_field(9, long_field(1, long_field(1, plugin)))


def test_histograms_and_texts_of_pytorch(tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes((FILES / "torch.tfevents").read_bytes())
    (weights, kind, bins), note = read(tmp_path)
    assert (weights, kind) == ("weights", "histogram")
    found = json.loads(bins)
    assert len(found["edges"]) == len(found["counts"]) + 1
    assert note == ("note", "text", b"some text")


def test_pictures_and_sound_of_tags_and_plugins(tmp_path: Path) -> None:
    torn = PNG[:-3]
    wav = b"RIFF\x04\0\0\0WAVE"
    tensor = b"".join(long_field(8, each) for each in (b"1", b"1", PNG, PNG, torn))
    values = [
        field(1, 2, b"x") + long_field(4, long_field(4, PNG)),
        field(1, 2, b"torn") + long_field(4, long_field(4, torn)),
        field(1, 2, b"two") + long_field(8, tensor) + metadata(b"images"),
        field(1, 2, b"tone") + long_field(6, long_field(4, wav)),
    ]
    (tmp_path / NAME).write_bytes(b"".join(map(event, values)))
    assert [(name, kind) for name, kind, _ in read(tmp_path)] == [
        ("x", "image"),
        ("two/0", "image"),
        ("two/1", "image"),
        ("tone", "audio"),
    ]


def test_a_picture_larger_than_a_checksummed_record_is_read(tmp_path: Path) -> None:
    large = encode_png(300, 300, 1, bytes(each * 7919 % 251 for each in range(90_000)))
    noisy = large[:-12] + b"\0" * 70_000 + large[-12:]
    huge = large[:-12] + b"\0" * (1 << 21) + large[-12:]
    whole = [field(1, 2, b"x") + long_field(4, long_field(4, each)) for each in (huge, noisy)]
    (tmp_path / NAME).write_bytes(b"".join(map(event, whole)))
    assert [data for _, _, data in read(tmp_path)] == [noisy]


def test_histograms_have_few_bins_and_keep_their_counts() -> None:
    made = json.loads(write_histogram([*map(float, range(1001))], [1.0] * 1000))
    assert len(made["counts"]) == examples.MOST_BINS
    assert sum(made["counts"]) == pytest.approx(1000, rel=1e-4)
    assert write_histogram([0.0, float("inf")], [1.0]) == b""


def part(data: bytes, key: str = "a", **more: Any) -> ConfigFields:
    return ConfigFields({"key": key, "part": b64encode(data).decode(), **more}, "a line")


def test_parts_are_put_together_and_bounded() -> None:
    parts = ExampleParts()
    assert parts.take(part(b"one ", more=True)) is None
    assert parts.take(part(b"other", key="b")) == b"other"
    assert parts.take(part(b"two")) == b"one two"
    for number in range(examples.MOST_PARTS + 5):
        parts.take(part(b"x", key=str(number), more=True))
    assert len(parts._parts) == examples.MOST_PARTS
    with pytest.raises(BadConfig, match="more than"):
        parts.take(part(b"x" * (examples.LARGEST + 1)))
    with pytest.raises(BadConfig, match="base64"):
        parts.take(ConfigFields({"key": "a", "part": "?"}, "a line"))


def test_a_rank_sends_no_more_than_its_budget() -> None:
    now = [0.0]
    budget = ExampleBudget(lambda: now[0])
    assert budget.take(examples.BURST_BYTES)
    assert not budget.take(1)
    now[0] = 2.0
    assert budget.take(2 * examples.BYTES_PER_S)
    assert not budget.take(1)


def test_unknown_kinds_and_too_many_names_are_left_out() -> None:
    sent: list[dict[str, Any]] = []
    reader = StepValueReader(lambda kind, **fields: sent.append(fields))
    reader.show("page", "html", b"<script>")
    reader.show("empty", "text", b"")
    for number in range(MOST_EXAMPLE_NAMES + 3):
        reader.show(f"n{number}", "text", b"t", float(number))
    assert len(sent) == MOST_EXAMPLE_NAMES
    [first] = sent[0]["examples"]
    assert (first["name"], first["kind"], first["step"]) == ("n0", "text", 0)


def test_pictures_neither_fill_a_batch_nor_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of more than 16 MiB would be refused forever."""
    monkeypatch.setattr("cavvy.agent.outbox.BATCH_CHARACTERS", 250)
    monkeypatch.setattr("cavvy.agent.outbox.MOST_WAITING", 1000)
    outbox = MessageOutbox(str(tmp_path / "outbox"))
    for _ in range(50):
        outbox.put("points", examples=["x" * 100])
    outbox.put("points", series=[])
    assert len(json.loads(outbox.batch())) == 2
    outbox.acknowledge(2)
    assert json.loads(outbox.batch())[0]["seq"] == 3
    waiting = [json.loads(line) for line in outbox.finish({})]
    assert len(waiting) < 10, "pictures wait only while there is room"
    assert "series" in waiting[-2], "values always do"


def test_pictures_that_were_logged_to_mlflow_are_read_once_each_time(tmp_path: Path) -> None:
    found: list[tuple[str, float]] = []
    reader = EventFileReader(
        [str(tmp_path)],
        lambda params: None,
        shown=lambda name, kind, data, step, age: found.append((name, step)),
        clock=lambda: 0.0,
    )
    reader._clock = lambda: 4e9
    run = tmp_path / "mlartifacts" / "0" / "run" / "artifacts"
    (run / "images").mkdir(parents=True)
    (tmp_path / "other.png").write_bytes(PNG)

    def read() -> list[tuple[str, float]]:
        found.clear()
        reader._search_at = 0.0
        reader.read(lambda values, step, age: None)
        return sorted(found)

    (run / "plot.png").write_bytes(PNG)
    end = "%timestamp%1700000000000%0f1c"
    (run / "images" / f"dog%step%7{end}.png").write_bytes(PNG)
    (run / "images" / f"dog%step%7{end}%compressed.webp").write_bytes(PNG)
    (run / "huge.png").write_bytes(PNG + b"\0" * examples.LARGEST)
    (run / "link.png").symlink_to("/etc/passwd")
    assert read() == [("images/dog", 7.0), ("plot", 0.0)]
    assert read() == []
    (run / "plot.png").write_bytes(PNG)
    os.utime(run / "plot.png", (1.0, 1e9))
    assert read() == [("plot", 1.0)]
