"""Records the origin of a run (commit, uncommitted changes and versions), so that the run can be
repeated and compared.
"""

import platform
import re
from pathlib import Path

from cavvy import __version__
from cavvy.domain.jobs import RunOrigin
from cavvy.spec.repository import GitFolder, open_repository

MOST_DIFF_BYTES = 1 << 20
# a name that is absolute or contains `.` or `..`, in a list in which a NUL precedes each name
_OUTSIDE = re.compile(rb"[\0/]\.{0,2}/")


def capture(folder: Path, *, task_text: str = "", snapshot: str | None = None) -> RunOrigin:
    """Return the origin of a run whose working folder is `folder`. The folder need not be in a
    repository.
    """
    with open_repository(folder) as repository:
        commit = _ask(repository, "rev-parse", "--verify", "HEAD") if repository else None
        diff = _diff(repository) if repository and commit else None
    return RunOrigin(
        task_text=task_text,
        commit=commit.decode().strip() if commit else None,
        diff=diff,
        snapshot=snapshot,
        versions={
            "cavvy": __version__,
            "python": platform.python_version(),
            "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
    )


def _diff(repository: GitFolder) -> str | None:
    """Return the uncommitted changes of tracked files in and below the folder, or None if there are
    none. A long diff is truncated.
    """
    # For uncommitted changes in a submodule, git would run itself there with settings of the
    # submodule.
    options = ("--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")
    diff = _ask(repository, "diff", *options, "--relative", "--find-renames", "HEAD", "--", ".")
    if not diff:
        return None
    names = _ask(repository, "ls-files", "-z", "--cached", "--full-name")
    if names is None or _OUTSIDE.search(b"\0" + names):
        # another program than git has written the index
        return "# left out by Cavvy: the repository's index names files outside of the repository\n"
    if len(diff) <= MOST_DIFF_BYTES:
        return diff.decode(errors="replace")
    kept = diff[: diff.rfind(b"\n", 0, MOST_DIFF_BYTES) + 1]
    note = f"# cut here by Cavvy: {len(diff):,} bytes of changes, of which {len(kept):,} are kept\n"
    return kept.decode(errors="replace") + note


def _ask(repository: GitFolder, *arguments: str) -> bytes | None:
    """Return the output of git, or None if git fails or takes too long."""
    done = repository.run(*arguments)
    return done.stdout if done is not None and done.returncode == 0 else None
