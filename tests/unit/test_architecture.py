"""ARCHITECTURE.md shows the house as it is."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_lists_exactly_the_rooms() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    listed = re.findall(r"^\| `(\w+)/?` \|", page, re.MULTILINE)
    source = ROOT / "src" / "remuda"
    rooms = {p.name for p in source.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    rooms |= {p.stem for p in source.glob("*.py") if p.stem != "__init__"}
    assert set(listed) == rooms
    assert len(listed) == len(rooms)


def test_the_page_lists_rooms_in_the_order_of_the_import_contract() -> None:
    contract = (ROOT / ".importlinter").read_text().split("layers =\n", 1)[1].split("\n\n", 1)[0]
    floors = [re.findall(r"\w+", re.sub(r"\(\w+\)", "", line)) for line in contract.splitlines()]
    depth = {room: floor for floor, rooms in enumerate(floors) for room in rooms}
    listed = re.findall(r"^\| `(\w+)/?` \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    assert [depth[room] for room in listed] == sorted(depth[room] for room in listed)
