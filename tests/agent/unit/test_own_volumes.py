"""Named volumes of this machine: where their files are, and how work sees them in its namespace."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cavvy.agent.config import AgentConfig, ConfigFields, read_work
from cavvy.agent.data.mounts import link_volumes, list_binds, list_mounted
from cavvy.agent.documents import WorkConfig
from cavvy.agent.work import hide
from cavvy.agent.work.folder import CannotBuild
from cavvy.domain.tasks import TaskSpec, Volume, VolumeKind
from cavvy.providers.local.provider import check_task

WORK = """
import os, sys
package = type(sys)("agent")
package.__path__ = [{path!r}]
sys.modules["agent"] = package
import ctypes
from agent.work import hide, separate
from agent.work.own_volumes import MountedVolume
from agent.work.protect import Protection
os.setgroups([])
os.setgid({user})
os.setuid({user})
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # a process that starts as this user is dumpable
folder = {folder!r}
volumes = [
    MountedVolume(folder + "/volumes/p/models", "/cavvy-cache", read_only=False),
    MountedVolume(folder + "/volumes/p/models", folder + "-beside/new", read_only=False),
    MountedVolume(folder + "/volumes/p/data", "/cavvy-cache/data", read_only=True),
]
how, protection = {how!r}, Protection([], "")
if os.fork() == 0:
    try:
        if how == "separate":
            separate.separate(folder, [folder + "/gangs"], (), protection, volumes)
        else:
            hide.hide(
                folder, [folder + "/gangs"], protection, alone=how == "alone", volumes=volumes
            )
    except OSError as error:
        sys.exit(f"no namespaces: {{error}}")
    os.execv("/bin/sh", ["sh", "-c", {shell!r}, "sh", folder])
os.wait()
"""
SHELL = """
echo $(ls "$1") and $(ls -A "$1/.volumes/"*)
cat /cavvy-cache/file
echo more >>/cavvy-cache/file
cat "$1-beside/new/file"
touch /cavvy-cache/data/x 2>/dev/null || echo read-only
umount /cavvy-cache 2>/dev/null || echo stays
ls -d /usr/bin
"""


def make_config(folder: Path) -> AgentConfig:
    base = {"gang": "g", "rank": 0, "address": "http://a", "token": "t", "hides": str(folder)}
    own = {"home": f"{folder}/gangs/g/0", "private": f"{folder}/agents/g/0", "covers": True}
    more = {"volumes": f"{folder}/volumes/p"}
    return AgentConfig(ConfigFields({**base, **own, **more}, "configuration"))


def make_work(*volumes: dict[str, object], **more: object) -> WorkConfig:
    given = {"job": "j", "job_id": "1", "project": "p", "attempt": 1, "run": "x", **more}
    listed = [{"kind": "named", "source": "models", "path": "/c", **each} for each in volumes]
    return read_work(ConfigFields({**given, "volumes": listed}, "work"))


@pytest.mark.parametrize("how", ["hide", "alone", "separate"])
@pytest.mark.parametrize("user", [0, 65534])
def test_work_sees_its_volumes_at_paths_that_the_machine_lacks(user: int, how: str) -> None:
    if os.getuid() != 0 or (user == 0 and how == "separate"):
        pytest.skip("only root can try another user, and is never separated")
    with TemporaryDirectory(dir="/var/lib") as top:
        folder = Path(top, "server")
        for name in ("server/gangs", "server/volumes/p/models/data", "server/volumes/p/data"):
            Path(top, name).mkdir(parents=True)
        Path(folder, "volumes/p/models/file").write_text("content\n")
        os.chmod(top, 0o755)
        for parent, _, names in os.walk(folder):
            for each in (parent, *(os.path.join(parent, name) for name in names)):
                os.chown(each, user, user)
        os.makedirs(f"{folder}-beside")  # of root: the other user creates nothing there
        code = WORK.format(
            path=str(Path(hide.__file__).parent.parent),
            user=user,
            folder=str(folder),
            how=how,
            shell=SHELL,
        )
        # the other user may not be able to read the Python of the tests
        system = "/usr/bin/python3" if user and os.path.exists("/usr/bin/python3") else ""
        python = [system or sys.executable, "-I", "-S", "-c", code]
        env = {"HOME": "/nonexistent", "PATH": "/usr/bin:/bin"}
        done = subprocess.run(python, capture_output=True, text=True, cwd="/", env=env)
        written = Path(folder, "volumes/p/models/file").read_text()
    if "no namespaces" in done.stderr:
        pytest.skip(done.stderr)
    seen, *lines = done.stdout.splitlines()
    assert seen.split(" and ")[0] == "gangs", done.stderr
    assert "file" not in seen
    assert lines == ["content", "content", "more", "read-only", "stays", "/usr/bin"], done.stderr
    assert written == "content\nmore\n"
    assert not os.path.exists("/cavvy-cache")


def test_the_files_of_a_volume_stay_and_belong_to_the_project(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    work = make_work({}, {"source": "tmp", "path": "/t", "keep": False, "read_only": True})
    kept, given = list_mounted(config, work)
    assert (kept.source, kept.path, kept.read_only) == (f"{tmp_path}/volumes/p/models", "/c", False)
    assert (given.source, given.read_only) == (f"{tmp_path}/agents/g/volumes/tmp", True)
    assert os.path.isdir(kept.source)
    assert os.path.isdir(given.source)
    assert not list_mounted(config, make_work({}, image="busybox"))  # its container has them
    bound = list_binds(config, make_work({}, image="busybox"), config.folder)
    assert bound == [f"{tmp_path}/volumes/p/models:/c"]
    config.volumes = ""  # other machines have none
    assert not list_mounted(config, work)


@pytest.mark.parametrize("name", ["..", "../q/models", ".hidden", "a/b"])
def test_a_name_leads_to_no_other_project(tmp_path: Path, name: str) -> None:
    with pytest.raises(CannotBuild, match="cannot be the name of a volume"):
        list_mounted(make_config(tmp_path), make_work({"source": name}))


def test_a_path_is_refused_only_where_it_would_hide_what_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    config = make_config(tmp_path / "server")
    config.separates = True  # the work has a home folder of its own, in which volumes can be
    for path in (home / ".cache/models", home / "data", "/tmp/new", "/cavvy-cache"):
        link_volumes(config, make_work({"path": str(path)}), config.folder)
    for path, why in (
        (tmp_path / "server", "hidden from jobs"),
        (tmp_path / "server/token", "hidden from jobs"),
        (home / ".ssh", "obeys the files"),
        ("/etc/cron.d", "obeys the files"),
    ):
        with pytest.raises(CannotBuild, match=why):
            link_volumes(config, make_work({"path": str(path)}), config.folder)
    (home / "data/file").touch()
    with pytest.raises(CannotBuild, match="is not a folder"):
        link_volumes(config, make_work({"path": f"{home}/data/file"}), config.folder)
    inside = {"source": "s3://b/x", "target": f"{home}/data/x"}
    with pytest.raises(CannotBuild, match="whose files it cannot join"):
        link_volumes(config, make_work({"path": f"{home}/data"}, inputs=[inside]), config.folder)


def test_this_machine_says_that_its_volumes_have_no_types() -> None:
    volume = Volume(kind=VolumeKind.NAMED, source="models", path="/c", size_gib=5, type="gp3")
    task = TaskSpec(name="t", run="x", volumes=(volume,))
    (told,) = check_task(task, lambda: None, None)
    assert (told.field, "no `type`" in told.reason) == ("volumes", True)
