"""Check that files, functions and rooms stay small; called by `make check`.

A file stops at 600 lines, a function at 60, a room at 15 files (`providers` is exempt from the last); `train`, which
users read, at 3,500 lines in files of 250. Tables of facts, generated code and migrations are exempt and listed here;
the list may only shrink.
"""

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "cavvy"
FILE_LINES, FUNCTION_LINES, ROOM_FILES = 600, 60, 15
TRAIN_LINES, TRAIN_FILE_LINES = 3500, 250
TABLES = {"catalog/accelerators.py"}  # facts, one row a line
MANY_FILES = {"providers", "cli"}  # one file per place, one per command


def list_faults() -> list[str]:
    faults, train = [], 0
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name in TABLES or "/migrations/" in f"/{name}":
            continue
        text = path.read_text()
        lines = text.count("\n")
        in_train = name.startswith("train/")
        train += lines if in_train else 0
        if lines > (most := TRAIN_FILE_LINES if in_train else FILE_LINES):
            faults.append(f"{name}: {lines} lines, at most {most}")
        faults += _long_functions(name, text)
    if train > TRAIN_LINES:
        faults.append(f"train: {train} lines, at most {TRAIN_LINES}")
    for room in sorted(p for p in SOURCE.rglob("*") if p.is_dir() and p.name != "__pycache__"):
        files = len([p for p in room.glob("*.py") if p.name != "__init__.py"])
        if files > ROOM_FILES and room.name not in MANY_FILES:
            faults.append(f"{room.relative_to(SOURCE)}: {files} files, at most {ROOM_FILES}; give it a sub-room")
    return faults


def _long_functions(name: str, text: str) -> list[str]:
    return [
        f"{name}:{node.lineno} {node.name}: {size} lines, at most {FUNCTION_LINES}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (size := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES
    ]


if __name__ == "__main__":
    found = list_faults()
    print("\n".join(found) or "sizes: all within bounds")
    sys.exit(1 if found else 0)
