"""Records the origin of a run (commit, uncommitted changes and versions), so that the run can be
repeated and compared.
"""

import os
import platform
import subprocess
from pathlib import Path

from cavvy import __version__
from cavvy.domain.jobs import RunOrigin
from cavvy.spec.ignore import git_environment

MOST_DIFF_BYTES = 1 << 20
_GIT_TIMEOUT_S = 60


def capture(folder: Path, *, task_text: str = "", snapshot: str | None = None) -> RunOrigin:
    """Return the origin of a run whose working folder is `folder`. The folder need not be in a
    repository.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    return RunOrigin(
        task_text=task_text,
        commit=commit.decode().strip() if commit else None,
        diff=_diff(folder) if commit else None,
        snapshot=snapshot,
        versions={
            "cavvy": __version__,
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
    )


def _diff(folder: Path) -> str | None:
    """Return the uncommitted changes of tracked files in and below `folder`, or None if there are
    none. A long diff is truncated.
    """
    options = ("--no-color", "--no-ext-diff", "--no-textconv", "--relative", "--find-renames")
    diff = _git(folder, "diff", *options, "HEAD", "--", ".")
    if not diff:
        return None
    if len(diff) <= MOST_DIFF_BYTES:
        return diff.decode(errors="replace")
    kept = diff[: diff.rfind(b"\n", 0, MOST_DIFF_BYTES) + 1]
    note = f"# cut here by Cavvy: {len(diff):,} bytes of changes, of which {len(kept):,} are kept\n"
    return kept.decode(errors="replace") + note


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Return the output of git, or None if git fails, is missing or takes too long."""
    command = ["git", "-C", os.fspath(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False, env=git_environment()
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
