"""A setup tells how much it writes, also to the jobs that wait for it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.agent.work import setup_meter
from cavvy.agent.work.setup_meter import SetupMeter, count_written, end_turn, take_turn

MIB = 1 << 20


def make_meter(kept: Path, gang: str, said: list[dict[str, float]]) -> SetupMeter:
    def say(kind: str, **fields: Any) -> None:
        assert kind == "telemetry"
        said.append(fields["values"])

    config: Any = SimpleNamespace(gang=gang, rank=0)
    return SetupMeter(say, config, str(kept), os.getpid())


def test_what_a_setup_has_written_is_told_to_the_jobs_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(setup_meter.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(setup_meter, "count_written", lambda root: 3 * MIB)
    own: list[dict[str, float]] = []
    other: list[dict[str, float]] = []
    runs, waits = make_meter(tmp_path, "a", own), make_meter(tmp_path, "b", other)
    config: Any = SimpleNamespace(gang="a", rank=0)
    take_turn(str(tmp_path), config)
    for meter in (runs, waits):
        meter.tick()  # too early
        now[0] += 4
        meter.tick()
    assert own == [{"setup_written_mib": 3.0}]
    assert other == [{"setup_other_s": 4.0, "setup_written_mib": 3.0}]
    (tmp_path / "turn").write_text(json.dumps({"gang": "c", "seconds": "x", "mib": 1e300}))
    now[0] += 4
    waits.tick()
    assert len(other) == 1  # what is damaged is not passed on
    end_turn(str(tmp_path))
    end_turn(str(tmp_path))
    assert not [*tmp_path.iterdir()]


def test_what_ended_processes_have_written_counts(tmp_path: Path) -> None:
    before = count_written(os.getpid())
    path = tmp_path / "file"
    code = f"import os; f = open({str(path)!r}, 'wb'); f.write(bytes(2 << 20)); os.fsync(f)"
    subprocess.run([sys.executable, "-c", code], check=True)
    grown = count_written(os.getpid()) - before
    assert grown >= 2 * MIB or not before + grown  # a system without these counters has 0
