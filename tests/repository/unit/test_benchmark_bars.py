"""`benchmarks/bars.py` prints one table of all bars, and fails if one is missed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"

PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
import bars
from pathlib import Path
bars.__file__ = str(Path({place!r}, "bars.py"))
bars.PROGRAMS.clear()
bars.PROGRAMS["one"] = ()
sys.argv += {words!r}
bars.main()
"""


@pytest.mark.parametrize(
    ("body", "told", "code"),
    [
        ("record('a', 3.0, 4, 'ms'); record('b', 9.0, 4, 'per s', least=True)", ["ok", "ok"], 0),
        ("record('a', 5.0, 4, 'ms'); record('b', 4, 4, 'ms')", ["MISSED", "ok"], 1),
        ("record('a', 3.0, 4, 'ms'); sys.exit(3)", ["ok", "FAILED"], 1),
        ("pass", ["FAILED"], 1),
    ],
)
def test_a_missed_bar_and_a_failed_program_are_told(
    tmp_path: Path, body: str, told: list[str], code: int
) -> None:
    path = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); from measure import record\n"
    (tmp_path / "one.py").write_text(path + body)
    program = PROGRAM.format(folder=str(FOLDER), place=str(tmp_path), words=[])
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=os.environ
    )
    rows = ended.stdout.strip().splitlines()[3:]
    assert ([row.split()[-1] for row in rows], ended.returncode) == (told, code), ended.stderr


def test_saved_figures_replace_those_of_the_same_program_only(tmp_path: Path) -> None:
    path = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); from measure import record\n"
    saved = tmp_path / "results" / "bars.csv"
    saved.parent.mkdir()
    saved.write_text(
        "program,what,figure,bar,unit,verdict,measured\n"
        "one,old,1,<= 4,ms,ok,2026-01-01\nother,b,2,<= 4,ms,ok,2026-01-01\n"
    )
    program = PROGRAM.format(folder=str(FOLDER), place=str(tmp_path), words=["--save"])
    for figure in (3.0, 5.0):
        (tmp_path / "one.py").write_text(f"{path}record('a, b', {figure}, 4, 'ms')")
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    lines = saved.read_text().splitlines()
    assert lines[1] == "other,b,2,<= 4,ms,ok,2026-01-01"
    assert lines[2].startswith('one,"a, b",5,<= 4,ms,MISSED,20')
    assert len(lines) == 3


def test_each_program_of_the_table_records_its_bars() -> None:
    sys.path.insert(0, str(FOLDER))
    try:
        from bars import PROGRAMS  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(FOLDER))
    for name in PROGRAMS:
        assert "record(" in (FOLDER / f"{name}.py").read_text(), name
