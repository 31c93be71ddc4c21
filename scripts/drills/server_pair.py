"""What the drills of two servers on one PostgreSQL share: their place, and their ends."""

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.system.replica_site import ReplicaSite, replica_site  # noqa: E402

_MANY = "SELECT j.name, COUNT(*) FROM attempts a JOIN jobs j ON j.id = a.job_id GROUP BY 1"
_SHOWN = 40  # faults that are shown


def run_drill(prefix: str, drill: Callable[[ReplicaSite], list[str]], settings: str = "") -> int:
    """Run a drill with a new place for both servers, which have these settings. Show the faults
    that it returns, and return the exit code.
    """
    root = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    root.chmod(0o755)
    try:
        with replica_site(root, settings) as site:
            wrong = drill(site)
        print(f"{len(wrong)} faults")
        for each in wrong[:_SHOWN]:
            print("  ", each)
        return 1 if wrong else 0
    finally:
        shutil.rmtree(root, ignore_errors=True) if not __import__("os").environ.get(
            "KEEP"
        ) else None


def find_repeated(site: ReplicaSite) -> list[str]:
    """The jobs that were not attempted exactly once."""
    return [f"{name} has {count} attempts" for name, count in site.ask(_MANY) if count != 1]
