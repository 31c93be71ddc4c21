"""benchmarks/adrs.py reads traces as ADRS's simulators do, and means what its evaluators mean."""

import json
from pathlib import Path

import pytest
from benchmarks import adrs

HOURS = 93  # one tick an hour


def write(path: Path, unavailable: int, **more: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"metadata": {"gap_seconds": 3600}, "data": [unavailable] * HOURS, **more}
    path.write_text(json.dumps(data))


def test_a_one_means_unavailable_and_the_first_price_lasts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for zone in adrs.SINGLE_ZONES:
        for overhead in ("0.02", "0.20", "0.40"):
            part = f"real/ddl=search+task=48+overhead={overhead}/real/{zone}/traces/random_start"
            write(tmp_path / part / "0.json", unavailable=int("k80" in zone))
    root = tmp_path / "converted_multi_region_aligned"
    for zone in adrs.NINE:
        for index in range(8):
            prices = [0.5, *[9.0] * (HOURS - 1)]
            write(root / f"{zone}_v100_1" / f"{index}.json", unavailable=0, prices=prices)
    adrs.main(["--traces", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in lines}
    hours = 48 + (0.02 + 0.2 + 0.4) / 3  # work and one start
    single = hours * (3.06 + 0.9731) / 2
    greedy, least = float(cells["one market"][3]), pytest.approx(single, abs=0.01)
    assert greedy == least
    assert "< 95.07" in lines[2]
    assert float(cells["several markets"][1]) == pytest.approx(48.2 * 0.5, abs=0.01)
    assert lines[-1] == "0 deadlines of `auto` missed"


def test_a_folder_without_long_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(adrs.TraceError, match="expected traces of at least 92 hours"):
        adrs.main(["--traces", str(tmp_path)])
