"""Update the lists of provider modules in `.importlinter`.

    python scripts/contracts.py    # a test fails if the lists do not match the folder `providers`

The contract `seam`: `control`, `api`, `server`, `cli` and `spec` import no provider, and no module
that only providers share. The contract `places`: providers do not import each other.
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
    """The modules of each list, by (contract, key)."""
    folder = ROOT / "src" / "cavvy" / "providers"
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    own = {known.module for known in list_known().values() if known.module.startswith("cavvy.")}
    hidden = own | {f"cavvy.providers.{name}" for name in packages - SEAMS}
    return {("seam", "forbidden_modules"): sorted(hidden), ("places", "modules"): sorted(own)}


def render(text: str) -> str:
    """The text of `.importlinter`, with updated lists."""
    for (contract, key), modules in list_modules().items():
        head = rf"(\[importlinter:contract:{contract}\]\n(?:[^\[]*\n)?{key} =\n)(?:    .*\n)*"
        lines = "".join(f"    {module}\n" for module in modules)
        text, count = re.subn(head, rf"\g<1>{lines}", text)
        assert count == 1, f"{FILE.name} has no list {key} in {contract}"
    return text


if __name__ == "__main__":
    FILE.write_text(render(FILE.read_text()))
