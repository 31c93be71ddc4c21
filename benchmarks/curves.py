"""Measures what curves cost: the CPU time in which an agent reads printed values, the bytes of a
value on disk, and the CPU time in which a server stores and returns them. All in this process, so
other work on the machine changes little.

    python benchmarks/curves.py
"""

import argparse
import struct
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from math import exp
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from cavvy.agent.work.event_files import EventFileReader, masked_crc
from cavvy.agent.work.step_values import StepValueReader
from cavvy.capabilities.curves.briefs import BriefTable, shorten
from cavvy.capabilities.curves.packing import Columns, join, pack, unpack
from cavvy.capabilities.curves.reduce import Piece, make_curves

_ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of a long run")
    rows = parser.parse_args().rows
    print(f"{'':48}{'median':>10}  bar")
    show("agent, CPU of 1,000 printed values a second", "% of a core", 1, read_printed)
    show("agent, CPU of 1,000 events a second", "% of a core", 1, read_events)
    show("agent, CPU of 10,000 lines without values", "ms", None, read_plain)
    for name, noise in (("smooth", 0.0), ("noisy", 0.05)):
        bar = None if noise else 2
        show(f"disk, a value of a {name} curve", "bytes", bar, partial(measure_size, noise))
    piece = [make_columns(1000, 0.05)]
    show("server, CPU to pack 1,000 rows of 3 values", "ms", None, lambda: cpu_ms(pack, piece))
    columns = [make_columns(20_000, 0.05)]
    pieces = [
        Piece(each, pack(columns), BriefTable(shorten(columns))) for each in range(rows // 20_000)
    ]
    names = frozenset(["loss"])
    show(
        f"server, CPU of one curve of {rows:,} values",
        "ms",
        800,
        lambda: cpu_ms(lambda each: make_curves(each, 1, 0, names, 600), pieces),
    )
    show("server, CPU to join 64 pieces of 60 rows", "ms", None, join_pieces)


def show(what: str, unit: str, bar: float | None, measure: Callable[[], float]) -> None:
    found = median(measure() for _ in range(_ROUNDS))
    print(f"{what:48}{found:10.2f}  {unit}{'' if bar is None else f' (at most {bar:g})'}")


def measure_size(noise: float) -> float:
    return len(pack([make_columns(20_000, noise)])) / (20_000 * 3)


def cpu_ms(work: Callable[[list[Columns]], object], data: object) -> float:
    began = time.process_time()
    work(data)  # type: ignore[arg-type]
    return (time.process_time() - began) * 1000


def make_columns(count: int, noise: float) -> Columns:
    """Return rows as a training loop prints them: four digits, 100 lines a second."""
    random, begin = Random(1), datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1000
    steps = range(count)
    loss = [round(2 * exp(-3 * each / count) + random.random() * noise, 4) for each in steps]
    acc = [round(1 - exp(-3 * each / count) + random.random() * noise, 3) for each in steps]
    rate = [float(f"{1e-3 * (1 - each / count):.3g}") for each in steps]
    times = [begin + 10 * each + random.randrange(2) for each in steps]
    return Columns(("loss", "acc", "lr"), [*map(float, steps)], times, [loss, acc, rate])


def read_printed() -> float:
    """Return the share of a core for 1,000 values a second, in lines of three: of a minute."""
    lines = [
        f"step {each} loss={2 / (each + 1):.4f} acc={1 - 1 / (each + 1):.3f} lr=1.0e-04\n".encode()
        for each in range(60 * 333)
    ]
    now = [0.0]
    values = StepValueReader(lambda kind, **fields: None, lambda: now[0])
    began = time.process_time()
    for number, line in enumerate(lines):
        values.feed(line)
        if number % 333 == 0:
            now[0] += 1
            values.tick()
    return (time.process_time() - began) / 60 * 100


def read_events() -> float:
    """Return the share of a core for 1,000 values a second in an event file of TensorBoard."""
    with TemporaryDirectory() as folder:
        now, count = time.time(), 10_000
        events = (make_event(f"train/loss{each % 3}", each // 3, now) for each in range(count))
        Path(folder, "events.out.tfevents.1.host").write_bytes(b"".join(events))
        values = StepValueReader(lambda kind, **fields: None)
        reader = EventFileReader([folder], values.describe)
        began = time.process_time()
        reader.read(lambda found, step, age: values.log(found, step, age_s=age), last=True)
        return (time.process_time() - began) / (count / 1000) * 100


def make_event(tag: str, step: int, at: float) -> bytes:
    """Return a record with one number, as SummaryWriter of PyTorch writes it."""
    name = tag.encode()
    value = b"\n" + bytes([len(name)]) + name + b"\x15" + struct.pack("<f", 1 / (step + 1))
    summary = b"\n" + bytes([len(value)]) + value
    number = bytes([step & 127 | 128, step >> 7]) if step > 127 else bytes([step])
    data = b"\t" + struct.pack("<d", at) + b"\x10" + number + b"*" + bytes([len(summary)]) + summary
    head = struct.pack("<Q", len(data))
    return b"".join(each + struct.pack("<I", masked_crc(each)) for each in (head, data))


def read_plain() -> float:
    text = b"".join(b"request %d took a while, and was answered\n" % each for each in range(10_000))
    values = StepValueReader(lambda kind, **fields: None)
    began = time.process_time()
    for at in range(0, len(text), 65_536):
        values.feed(text[at : at + 65_536])
    return (time.process_time() - began) * 1000


def join_pieces() -> float:
    pieces = [pack([make_columns(60, 0.05)]) for _ in range(64)]
    return cpu_ms(lambda each: pack(join(map(unpack, each))), pieces)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
