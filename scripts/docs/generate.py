"""Writes every generated page and part of a page again. Tests fail if one is out of date. Called by
`make docs`.
"""

import subprocess
import sys
from pathlib import Path

import cli
import decisions
import pictures
import providers
import python
import states
import task_file

_FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
# Pages that a module prints.
_PRINTED = {
    "api.md": "cavvy.api.reference",
    "errors.md": "cavvy.api.errors",
    "settings.md": "cavvy.settings",
}


def main() -> None:
    task_file.main()
    states.main()
    cli.main()
    python.main()
    providers.main()
    decisions.main()
    pictures.main()
    for name, module in _PRINTED.items():
        done = subprocess.run(
            [sys.executable, "-m", module], capture_output=True, text=True, check=True
        )
        (_FOLDER / name).write_text(done.stdout)
        print(f"wrote docs/reference/{name}")


if __name__ == "__main__":
    main()
