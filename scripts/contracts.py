"""Write the lists of modules in `.importlinter` that follow from the folder of providers.

    python scripts/contracts.py    # a test fails when the lists are not those of the folder

`control`, `api`, `cli` and `spec` name no provider and nothing that only providers share
(contract `seam`); providers do not know each other (contract `places`).
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from cavvy.providers.registry import list_known

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / ".importlinter"
# packages of `providers` that other modules may import
SEAMS = {"contract", "formats", "hosts", "prices"}


def list_modules() -> Mapping[tuple[str, str], Sequence[str]]:
    """By contract and key: the modules of that list."""
    folder = ROOT / "src" / "cavvy" / "providers"
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    own = {known.module for known in list_known().values() if known.module.startswith("cavvy.")}
    hidden = own | {f"cavvy.providers.{name}" for name in packages - SEAMS}
    return {("seam", "forbidden_modules"): sorted(hidden), ("places", "modules"): sorted(own)}


def render(text: str) -> str:
    """The file's text with these lists."""
    for (contract, key), modules in list_modules().items():
        head = rf"(\[importlinter:contract:{contract}\]\n(?:[^\[]*\n)?{key} =\n)(?:    .*\n)*"
        lines = "".join(f"    {module}\n" for module in modules)
        text, count = re.subn(head, rf"\g<1>{lines}", text)
        assert count == 1, f"{FILE.name} has no list {key} in {contract}"
    return text


if __name__ == "__main__":
    FILE.write_text(render(FILE.read_text()))
