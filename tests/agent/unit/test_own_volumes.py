"""Named volumes of this machine: where their files are, and how work sees them in its namespace."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cavvy.agent.allowed_folders import LeadsOutside
from cavvy.agent.config import AgentConfig, ConfigFields, read_work
from cavvy.agent.data.mounts import link, link_volumes, list_binds, list_mounted, remove_links
from cavvy.agent.data.paths import find_folders, find_output
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


def make_bare(folder: Path, gang: str, project: str) -> AgentConfig:
    """The configuration of a running gang's agent on a machine without namespaces."""
    base = {"gang": gang, "rank": 0, "address": "http://a", "token": "t", "covers": False}
    own = {"home": f"{folder}/gangs/{gang}/0", "private": f"{folder}/agents/{gang}/0"}
    for each in own.values():
        os.makedirs(each, exist_ok=True)
    more = {"volumes": f"{folder}/volumes/{project}"}
    return AgentConfig(ConfigFields({**base, **own, **more}, "configuration"))


def end(config: AgentConfig) -> None:
    Path(config.exit_file).write_text("{}")
    remove_links(config)


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


@pytest.mark.parametrize("keep", [True, False])
def test_a_link_to_a_volume_leads_no_other_project_into_it(tmp_path: Path, keep: bool) -> None:
    """Both volumes are empty, which does not make them the same."""
    path = tmp_path / "cache"
    work = make_work({"path": str(path), "keep": keep})
    first, second = (make_bare(tmp_path, f"g-{each}", each) for each in "pq")
    link_volumes(first, work, first.folder)
    seen = os.readlink(path)
    (tmp_path / "input").mkdir()
    for attempt in (
        lambda: link_volumes(second, work, second.folder),
        lambda: link(second, str(tmp_path / "input"), str(path)),
    ):
        with pytest.raises(CannotBuild, match="already in use"):
            attempt()
    end(second)
    assert os.readlink(path) == seen  # of the job that runs
    end(first)
    assert not os.path.lexists(path)
    third = make_bare(tmp_path, "g-3", "q")
    link_volumes(third, work, third.folder)
    assert os.readlink(path).startswith((third.volumes, f"{tmp_path}/agents/g-3/"))


def test_jobs_of_one_project_share_a_link_and_the_last_one_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    work = make_work({"path": str(path)})
    first, second = (make_bare(tmp_path, f"g-{each}", "p") for each in "12")
    for config in (first, second):
        link_volumes(config, work, config.folder)
    end(first)
    assert os.readlink(path) == f"{tmp_path}/volumes/p/models"
    end(second)
    assert not os.path.lexists(path)


def test_a_link_that_no_job_uses_is_replaced(tmp_path: Path) -> None:
    """Its agent was killed, and the records of its gang were removed."""
    path = tmp_path / "cache"
    (tmp_path / "volumes/p/models").mkdir(parents=True)
    path.symlink_to(tmp_path / "volumes/p/models")
    config = make_bare(tmp_path, "g", "q")
    link_volumes(config, make_work({"path": str(path)}), config.folder)
    assert os.readlink(path) == f"{tmp_path}/volumes/q/models"


def test_files_of_the_machine_stand_for_no_volume(tmp_path: Path) -> None:
    """What the work writes there would not be in the volume."""
    path = tmp_path / "cache"
    for folder in (path, tmp_path / "volumes/p/models"):
        folder.mkdir(parents=True)
        (folder / "file").write_text("the same")
    config = make_bare(tmp_path, "g", "p")
    with pytest.raises(CannotBuild, match="already in use"):
        link_volumes(config, make_work({"path": str(path)}), config.folder)


@pytest.mark.parametrize("image", [None, "busybox"])
def test_an_output_in_a_volume_is_read_in_the_volume(tmp_path: Path, image: str | None) -> None:
    """Its path as the work sees it may be missing on the machine, or be a file of the machine."""
    config, shown = make_config(tmp_path), tmp_path / "shown"
    (shown / "out").mkdir(parents=True)
    (shown / "out/file").write_text("of the machine")
    volumes = ({"path": f"{shown}"}, {"path": f"{shown}/inner", "source": "data"})
    sources = (f"{shown}/out", f"{shown}/inner/../inner/out", f"{shown}/innermost")
    outputs = [{"source": each, "target": "s3://b/x"} for each in sources]
    work = make_work(*volumes, outputs=outputs, image=image)
    kept = tmp_path / "volumes/p"
    found = [find_output(config, work, index)[0] for index in range(3)]
    assert found == [f"{kept}/models/out", f"{kept}/data/out", f"{kept}/models/innermost"]
    (kept / "models/out").mkdir()
    (kept / "models/out/file").write_text("of the work")
    (kept / "models/out/stolen").symlink_to(tmp_path / "token")
    (kept / "models/out/seen").symlink_to(shown / "out/file")
    (tmp_path / "token").touch()
    os.makedirs(config.folder)
    folders = find_folders(config, work)
    for name in ("file", "seen"):
        with os.fdopen(folders.open_file(f"{found[0]}/{name}")) as file:
            assert file.read() == "of the work"
    for path in (f"{found[0]}/stolen", f"{shown}/out/file"):  # the work placed no file in the last
        with pytest.raises(LeadsOutside):
            folders.open_file(path)


def test_this_machine_says_that_its_volumes_have_no_types() -> None:
    volume = Volume(kind=VolumeKind.NAMED, source="models", path="/c", size_gib=5, type="gp3")
    task = TaskSpec(name="t", run="x", volumes=(volume,))
    (told,) = check_task(task, lambda: None, None)
    assert (told.field, "no `type`" in told.reason) == ("volumes", True)
