"""Folders that the work has made read-only are deleted with everything else, as users other than
root need it.
"""

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cavvy.agent.work.trees import remove_tree
from cavvy.providers.batch.login_helper import LoginHelper
from cavvy.providers.local.trash import delete_folder

NOBODY = 65534


def empty(path: str) -> None:
    """What the helper on the login node does with a folder that contains the trash."""
    LoginHelper(io.BufferedReader(io.BytesIO()), io.BytesIO())._empty(os.path.dirname(path))


def delete(path: str) -> None:
    delete_folder(Path(path))


def run_as_user(folder: Path, act: Callable[[str], None]) -> None:
    """Run `act` on the folder `all/gang` in a process that is not root's."""
    child = os.fork()
    if child == 0:
        try:
            os.chdir(folder)  # the user may not pass the folders above this one
            if os.geteuid() == 0:
                os.setgroups([])
                os.setuid(NOBODY)
            act("all/gang")
        finally:
            os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.parametrize("act", [remove_tree, delete, empty])
def test_a_folder_that_the_work_made_read_only_is_deleted(
    tmp_path: Path, act: Callable[[str], None]
) -> None:
    gang, kept = tmp_path / "all" / "gang", tmp_path / "kept"
    (gang / "module" / "source").mkdir(parents=True)
    (gang / "module" / "source" / "a.go").write_text("package a")
    (gang / "hidden" / "below").mkdir(parents=True)
    kept.mkdir(mode=0o555)
    (gang / "module" / "link").symlink_to(kept)
    modes = {gang / "module" / "source": 0o555, gang / "module": 0o555, gang / "hidden": 0}
    if os.geteuid() == 0:
        for path in (tmp_path, *tmp_path.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    for path, mode in modes.items():
        path.chmod(mode)
    run_as_user(tmp_path, act)
    assert not gang.exists()
    assert kept.stat().st_mode & 0o777 == 0o555
