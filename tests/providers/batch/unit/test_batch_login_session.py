"""A seat on the login node: what it lacks is told with what to do."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from cavvy.domain.values import replace
from cavvy.providers import pbs, slurm
from cavvy.providers.base import ProviderContext, Refused, TryAgain
from cavvy.providers.batch import login_helper
from cavvy.providers.batch.login_session import LoginNode, LoginSession, read_where
from cavvy.providers.hosts.supervisor.frames import encode_frame
from cavvy.providers.registry import make_from


def make_where(folder: Path) -> LoginNode:
    return LoginNode(
        host="", ssh_options=(), python=sys.executable, folder=str(folder), tools=("id",)
    )


async def test_a_command_that_is_not_there_is_told_with_what_to_do(tmp_path: Path) -> None:
    login_session = LoginSession(make_where(tmp_path / "shared"))
    assert (await login_session.run(["id", "-u"])).code == 0
    with pytest.raises(
        TryAgain, match="this machine has no no-such-sbatch; set `host` to the cluster's login node"
    ):
        await login_session.run(["no-such-sbatch", "--parsable"])
    await login_session.close()


async def test_a_folder_that_cannot_be_used_is_told_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    for name, told, problem in (
        (
            "file/inner",
            "file/inner cannot be created: Not a dir",
            TryAgain,
        ),  # it may be a mount that is not there yet
        ("open", "run `chmod 700` on it", Refused),
    ):
        login_session = LoginSession(make_where(tmp_path / name))
        with pytest.raises(problem, match=f"{told}.*`folder`"):
            await login_session.hello()
        await login_session.close()


def test_options_that_no_shell_could_read_are_told(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"ssh_options = .*: No closing quotation"):
        read_where({"ssh_options": "-i 'x"}, ())


async def test_a_login_node_whose_name_has_no_address_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\necho 'ssh: Could not resolve hostname login: unknown' >&2; exit 255\n"
    )
    ssh.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    where = replace(make_where(tmp_path / "shared"), host="login")
    with pytest.raises(Refused, match="login: the name has no address"):
        await LoginSession(where).hello()


async def test_a_seat_that_is_closed_says_nothing_of_its_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(10):
        login_session = LoginSession(make_where(tmp_path / "shared"))
        await login_session.hello()
        await login_session.close()
    assert caplog.text == ""


@pytest.mark.parametrize(("package", "name"), [(slurm, "sbatch_options"), (pbs, "qsub_options")])
def test_options_are_read_before_a_job_needs_them(
    package: ModuleType, name: str, tmp_path: Path
) -> None:
    settings = {name: "--comment='x"}
    context = ProviderContext(installation="i", home=tmp_path, settings=settings)
    with pytest.raises(Refused, match=f"{name} = "):
        make_from(package, context)


def test_a_server_that_dies_leaves_no_unfinished_folder(tmp_path: Path) -> None:
    """The helper reads the request and the end of its input in one go."""
    path = tmp_path / "gangs" / "g"
    asked = {"id": 1, "do": "make", "path": str(path), "unless": []}
    files = [[f"file{n}", 1] for n in range(300)]
    request = encode_frame({**asked, "files": files}, b"x" * len(files))
    command = [sys.executable, login_helper.__file__]
    subprocess.run(command, input=request, check=True, stdout=subprocess.DEVNULL, timeout=60)
    assert [each.name for each in path.parent.iterdir()] == ["g"]
    assert len(list(path.iterdir())) == len(files)


async def test_an_unfinished_folder_of_a_killed_helper_is_deleted_after_an_hour(
    tmp_path: Path,
) -> None:
    for name, minutes in ((".new-old", 61), (".new-running", 59), ("other", 61)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("a token")
        at = time.time() - 60 * minutes
        os.utime(tmp_path / name, (at, at))
    login_session = LoginSession(make_where(tmp_path / "shared"))
    assert await login_session.make(str(tmp_path / "g"), {"file": b"x"})
    await login_session.close()
    assert {each.name for each in tmp_path.iterdir()} == {".new-running", "g", "other", "shared"}
