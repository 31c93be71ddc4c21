"""Jobs of batch systems as the Unix users of their users: the mapping, and what a helper says that
runs as a user."""

import asyncio
import json
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import cast

import pytest

from cavvy.providers.base import GangSpec, ProviderContext, Refused
from cavvy.providers.batch import become_user
from cavvy.providers.batch.commands import BatchCommands, BatchJobRow, BatchPhase
from cavvy.providers.batch.login_session import LoginNode, LoginSession
from cavvy.providers.batch.provider import UserGangs, read_unix_users
from cavvy.providers.batch.system import BatchSystem
from cavvy.providers.slurm import MANIFEST
from cavvy.providers.slurm.system import DIALECT

_USER = "games"  # a user of every Debian
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def test_each_user_is_named_with_a_unix_user() -> None:
    text = "ann=amueller, bob@example.org=bob\na=b=c"
    assert read_unix_users({"unix_users": text, "folder": "/scratch/%u"}, "slurm") == {
        "ann": "amueller",
        "bob@example.org": "bob",
        "a=b": "c",
    }
    assert read_unix_users({"folder": "/scratch"}, "slurm") == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ann", "form USER=UNIX_USER"),
        ("=ann", "form USER=UNIX_USER"),
        ("ann=", "form USER=UNIX_USER"),
        ("ann=root", "no job runs as root"),
        ("ann=0", "form USER=UNIX_USER"),
        ("ann=#0", "form USER=UNIX_USER"),
        ("ann=-x", "form USER=UNIX_USER"),
        ("ann=$(id)", "form USER=UNIX_USER"),
        ("ann=a;b", "form USER=UNIX_USER"),
        ("ann=../a", "form USER=UNIX_USER"),
        ("ann=a ann=b", "named twice"),
    ],
)
def test_a_wrong_mapping_is_refused(text: str, told: str) -> None:
    with pytest.raises(Refused, match=re.escape(told)):
        read_unix_users({"unix_users": text}, "slurm")


def test_users_do_not_share_a_folder() -> None:
    with pytest.raises(Refused, match="%u"):
        read_unix_users({"unix_users": "ann=ann", "folder": "/scratch/cavvy"}, "slurm")


@contextmanager
def exits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], told: str
) -> Iterator[None]:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit, match="126"):
        yield
    assert told in capsys.readouterr().err


def test_another_name_of_root_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toor = pwd.struct_passwd(("toor", "x", 0, 0, "", "/root", "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwnam", lambda name: toor)
    with exits(monkeypatch, capsys, "toor is root"):
        become_user.become("toor")


def test_an_unknown_user_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("no-such-user", "0", "#0", "", "a b"):
        with exits(monkeypatch, capsys, "has no user"):
            become_user.become(name)


@needs_root
def test_nothing_of_roots_session_remains() -> None:
    program = (Path(become_user.__file__)).read_text()
    boot = "import json; print(json.dumps([dict(os.environ), os.getgroups(), os.umask(0)]))"
    names = {"__name__": "__main__", "user": _USER, "boot": f"import os; {boot}"}
    path = {"PATH": "/usr/bin:/bin", "SLURM_CONF": "/etc/x"}
    done = subprocess.run(
        ["/usr/bin/python3", "-I", "-S", "-c", f"exec({program!r}, {names!r})"],
        env={**path, "AWS_SECRET_ACCESS_KEY": "x", "KRB5CCNAME": "x", "HOME": "/root"},
        extra_groups=[0, 1],
        capture_output=True,
        check=True,
    )
    env, groups, umask = json.loads(done.stdout)
    entry = pwd.getpwnam(_USER)
    names = {"USER": _USER, "LOGNAME": _USER, "HOME": entry.pw_dir, "SHELL": entry.pw_shell}
    assert {name: text for name, text in env.items() if name != "LC_CTYPE"} == {**path, **names}
    assert sorted(groups) == sorted(os.getgrouplist(_USER, entry.pw_gid))
    assert umask == 0o077


@needs_root
def test_the_helper_runs_as_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the user's groups only, and with nothing of the environment of root."""
    with TemporaryDirectory(prefix="cavvy-users-") as folder:
        check_user(Path(folder), monkeypatch)


def check_user(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared.chmod(0o711)
    (shared / _USER).mkdir(mode=0o700)
    shutil.chown(shared / _USER, _USER, _USER)
    monkeypatch.setenv("CAVVY_TOKEN", "secret")
    monkeypatch.setenv("SLURM_CONF", "/etc/x")
    monkeypatch.setenv("SLURM_JWT", "secret")
    where = LoginNode(
        host="", ssh_options=(), python="/usr/bin/python3", folder=f"{shared}/%u/cavvy", tools=()
    )

    async def scenario() -> None:
        own = LoginSession(where)
        user = own.for_user(_USER)
        entry = pwd.getpwnam(_USER)
        try:
            hello = await user.hello()
            assert (hello.uid, hello.folder) == (entry.pw_uid, f"{shared}/{_USER}/cavvy")
            assert (await user.run(["id", "-G"])).out.strip() == str(entry.pw_gid)
            env = (await user.run(["env"])).out.splitlines()
            assert f"HOME={entry.pw_dir}" in env
            assert "SLURM_CONF=/etc/x" in env
            assert not [line for line in env if "secret" in line]
            await user.write({f"{hello.folder}/a": b"x"})
            assert (shared / _USER / "cavvy/a").owner() == _USER
            secret = shared / "of-root"
            secret.write_text("x")
            secret.chmod(0o600)
            assert (await user.run(["cat", str(secret)])).code == 1
            with pytest.raises(Refused, match="root is root"):
                await own.for_user("root").hello()
            with pytest.raises(Refused, match="has no user nosuch"):
                await own.for_user("nosuch").hello()
        finally:
            await user.close()
            await own.close()

    asyncio.run(scenario())


class ForgingJobs:
    """A batch system in which each user has jobs with the names of two gangs."""

    def __init__(self, login_session: LoginSession) -> None:
        self.commands = BatchCommands(login_session, DIALECT)

    async def jobs(self, uid: int, mark: str) -> Sequence[BatchJobRow]:
        names = ("mine", "of-root") if uid else ()
        return [BatchJobRow(id="1", name=name, phase=BatchPhase.WORKS) for name in names]


@needs_root
def test_a_user_is_not_believed_about_gangs_of_others() -> None:
    with TemporaryDirectory(prefix="cavvy-users-") as folder:
        asyncio.run(check_forged(Path(folder)))


async def check_forged(shared: Path) -> None:
    shared.chmod(0o711)
    (shared / _USER).mkdir(mode=0o700)
    shutil.chown(shared / _USER, _USER, _USER)
    where = LoginNode(
        host="", ssh_options=(), python="/usr/bin/python3", folder=f"{shared}/%u/cavvy", tools=()
    )
    settings = {"folder": where.folder, "unix_users": f"ann={_USER} eve=root2 mallory=no-such"}
    context = ProviderContext(installation="i", home=shared, settings=settings)
    own = cast("BatchSystem", ForgingJobs(LoginSession(where)))

    def make_system(login_session: LoginSession) -> BatchSystem:
        return cast("BatchSystem", ForgingJobs(login_session))

    def spec(name: str, user: str) -> GangSpec:
        return cast("GangSpec", SimpleNamespace(name=name, user=user))

    gangs = UserGangs(MANIFEST, context, make_system, own)
    try:
        for stranger in ("", "root", "eve", "mallory", _USER):
            with pytest.raises(Refused):
                await gangs.choose(spec("refused", stranger))
        system, _ = await gangs.choose(spec("mine", "ann"))
        assert (await system.commands.login_session.hello()).uid == pwd.getpwnam(_USER).pw_uid
        assert [each.name for each in await gangs.gangs(None)] == ["mine"]
        assert [each.name for each in await gangs.gangs("mine")] == ["mine"]
        assert await gangs.gangs("of-root") == []
        # A server that starts again, with another mapping, finds the gang of the first user.
        settings["unix_users"] = "ann=nobody"
        again = UserGangs(MANIFEST, context, make_system, own)
        assert [each.name for each in await again.gangs(None)] == ["mine"]
        assert (await again.choose(spec("mine", "ann")))[0].commands.login_session is not None
        await again.close()
    finally:
        await gangs.close()
