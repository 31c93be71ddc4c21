"""Runs the tests without a capability: `python scripts/drills/without.py NAME [PYTEST…]`.

The tree that git knows is copied, without the folder of the capability and that of its tests, and
pytest runs there: the whole suite, or what its arguments choose. The pages still describe what was
taken out, so tests that compare pages with the code are left out.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_USUAL = ["-q", "tests"]
_OF_PAGES = ("tests/repository", "tests/cli/unit/test_commands_named.py")


def copy_without(name: str, target: Path) -> None:
    """Copy the tree without a capability and its tests."""
    gone = (f"src/cavvy/capabilities/{name}/", f"tests/{name}/")
    if not (ROOT / gone[0]).is_dir():
        sys.exit(f"{gone[0]} does not exist; the capabilities are the folders beside it")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for file in filter(None, listed.stdout.split("\0")):
        source = ROOT / file
        if file.startswith(gone) or not source.is_file():
            continue
        path = target / file
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, path, follow_symlinks=False)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    name, *chosen = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix=f"without-{name}-") as folder:
        target = Path(folder)
        copy_without(name, target)
        paths = os.pathsep.join((str(target / "src"), str(target)))
        of_pages = [f"--ignore={path}" for path in _OF_PAGES]
        run = [sys.executable, "-m", "pytest", *of_pages, *(chosen or _USUAL)]
        environment = {**os.environ, "PYTHONPATH": paths}
        sys.exit(subprocess.run(run, cwd=target, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
