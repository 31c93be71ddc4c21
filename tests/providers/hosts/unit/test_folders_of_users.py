"""What users other than root need: folders that the work has made read-only are deleted with
everything else, and unreadable folders are named.
"""

import io
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cavvy.agent.work.trees import remove_tree
from cavvy.providers.batch.login_helper import LoginHelper
from cavvy.spec.workdir import FreezeError, freeze
from cavvy.trees import remove_tree as remove_deep_tree

NOBODY = 65534


def empty(path: str) -> None:
    """What the helper on the login node does with a folder that contains the trash."""
    LoginHelper(io.BufferedReader(io.BytesIO()), io.BytesIO())._empty(os.path.dirname(path))


def run_as_user(folder: Path, act: Callable[[str], None]) -> int:
    """Run `act` on the folder `all/gang` in a process that is not root's. Returns the process's
    exit code, which is 1 if `act` raises FreezeError.
    """
    child = os.fork()
    if child == 0:
        code = 0
        try:
            os.chdir(folder)  # the user may not pass the folders above this one
            if os.geteuid() == 0:
                os.setgroups([])
                os.setuid(NOBODY)
            act("all/gang")
        except FreezeError as error:
            code = int(f"cannot read {folder}/all/gang/locked: Permission denied" in str(error))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("act", [remove_tree, remove_deep_tree, empty])
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


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("git", [False, True])
def test_a_folder_that_cannot_be_read_is_not_left_out_silently(git: bool, ignored: bool) -> None:
    with TemporaryDirectory() as name:  # every user can reach it
        folder = Path(name)
        gang = folder / "all" / "gang"
        (gang / "locked" / "below").mkdir(parents=True)
        (gang / ".cavvyignore").write_text("locked\n" if ignored else "")
        if git:
            subprocess.run(["git", "init", "-q", gang], check=True)
        for path in (folder, *folder.rglob("*")):
            os.chown(path, NOBODY if os.geteuid() == 0 else -1, -1)
        (gang / "locked").chmod(0)
        try:
            assert run_as_user(folder, freeze_in(folder)) == (0 if ignored else 1)
        finally:
            (gang / "locked").chmod(0o700)


def freeze_in(home: Path) -> Callable[[str], None]:
    def act(path: str) -> None:
        os.environ["HOME"] = str(home)  # git must be able to read its settings
        freeze(Path(path))

    return act
