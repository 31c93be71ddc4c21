"""A folder that is hidden from the work is hidden from commands next to the work, from containers,
and from the agent's own copies of the work's files.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cavvy.agent.allowed_folders import AllowedFolders
from cavvy.agent.config import AgentConfig, ConfigFields, read_work
from cavvy.agent.data.mounts import link, list_binds
from cavvy.agent.data.transfer import TransferProgress
from cavvy.agent.data.upload import send_file
from cavvy.agent.work import hide
from cavvy.agent.work.folder import CannotBuild, transfer
from cavvy.agent.work.view import list_shown
from cavvy.domain.tasks import TaskSpec, Volume, VolumeKind
from cavvy.providers.local.provider import check_task

WORK = """
import ctypes, os, sys
package = type(sys)("agent")
package.__path__ = [{path!r}]
sys.modules["agent"] = package
from agent.work import hide
os.setgroups([])
os.setgid({user})
os.setuid({user})
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # a process that starts as this user is dumpable
if not hide.find_ability({folder!r}, {shown!r}):
    sys.exit("this system offers no namespaces")
ready, go = os.pipe()
pid = os.fork()
if pid == 0:
    os.read(ready, 1)
    hide.hide({folder!r}, [{shown!r}])
    os.execv("/bin/sleep", ["sleep", "60"])
try:
    command = os.fork()
    if command == 0:
        os.write(go, b"x")
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # as the agent does
        hide.enter({folder!r}, lambda: [pid])
        os.execv("/bin/sh", ["sh", "-c", "ls {folder}; readlink /proc/self/ns/mnt; umount {folder}"])
    os.waitpid(command, 0)
    print(os.readlink(f"/proc/{{pid}}/ns/mnt"))
finally:
    os.kill(pid, 9)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A server's folder with a token and the home of a rank."""
    path = tmp_path / "server"
    (path / "gangs/g/0/work").mkdir(parents=True)
    (path / "storage/job").mkdir(parents=True)
    (path / "token").write_text("secret")
    return path


def make_config(folder: Path, **work: object) -> AgentConfig:
    base = {"gang": "g", "rank": 0, "address": "http://a", "token": "t", "hides": str(folder)}
    fields = {**base, "home": f"{folder}/gangs/g/0", "cache": f"{folder}/cache"}
    config = AgentConfig(ConfigFields(fields, "configuration"))
    storage = {"path": "state", "storage": f"{folder}/storage/job", "sync": False}
    given = {"job": "j", "job_id": "1", "project": "p", "attempt": 1, "run": "x", **work}
    config.shown = list_shown(
        config, read_work(ConfigFields({**given, "checkpoint": storage}, "work"))
    )
    return config


@pytest.mark.parametrize("above", ["", "/way"])
@pytest.mark.parametrize("user", [0, 65534])
def test_a_command_next_to_the_work_sees_what_the_work_sees(user: int, above: str) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can try another user")
    with TemporaryDirectory() as top:
        os.symlink(top, f"{top}/way")  # as /home is a link on some machines
        folder, shown = f"{top}{above}/server", f"{top}{above}/server/gangs"
        os.makedirs(shown)
        Path(folder, "token").touch()
        for each in (top, folder, shown):
            os.chown(each, user, user)
        path = str(Path(hide.__file__).parent.parent)
        code = WORK.format(path=path, user=user, folder=folder, shown=shown)
        python = [sys.executable, "-I", "-S", "-c", code]
        done = subprocess.run(python, capture_output=True, text=True, cwd="/")
    if "no namespaces" in done.stderr:
        pytest.skip(done.stderr)
    seen, inside, work = done.stdout.split()
    assert (seen, inside) == ("gangs", work), done.stderr
    assert "umount" in done.stderr  # it may not remove the cover


@pytest.mark.parametrize("through", [False, True])
def test_inputs_and_volumes_place_no_links_in_the_hidden_folder(
    folder: Path, tmp_path: Path, through: bool
) -> None:
    config = make_config(folder)
    source = Path(config.folder, "mine")
    source.mkdir()
    (tmp_path / "way").symlink_to(folder)
    target = f"{tmp_path}/way" if through else str(folder)
    for path in (f"{target}/planted", f"{target}/new/planted", str(folder)):
        with pytest.raises(CannotBuild, match="hidden from jobs"):
            link(config, str(source), path)
    assert {each.name for each in folder.iterdir()} == {"gangs", "storage", "token"}
    (tmp_path / "left").symlink_to(folder / "gangs/earlier/0/inputs/0")
    for path in (f"{tmp_path}/left", f"{tmp_path}/beside/link", f"{config.folder}/below/link"):
        link(config, str(source), path)
        link(config, str(source), path)
        assert Path(path).readlink() == source


RENAME = """
import os, sys
package = type(sys)("agent")
package.__path__ = [{path!r}]
sys.modules["agent"] = package
from agent.work import hide
try:
    hide.hide({folder!r}, {shown!r})
except OSError as error:
    sys.exit(f"no namespaces: {{error}}")
for name in {shown!r}:
    try:
        os.rename(name, name + ".moved")
        print("moved", name)
    except OSError:
        pass
open({shown!r}[-1] + "/file", "w").close()
"""


def test_work_cannot_replace_the_home_of_its_agent(folder: Path) -> None:
    setup = {"setup": "x", "setup_key": "k"}
    config = make_config(folder, **setup)
    kept = f"{folder}/cache/setups/k@{os.uname().nodename}"
    assert config.shown == [
        f"{folder}/gangs/g",
        f"{folder}/gangs/g/0",
        f"{kept}/dir",
        f"{kept}/venv",
        f"{folder}/storage/job",
    ]
    code = RENAME.format(
        path=str(Path(hide.__file__).parent.parent), folder=str(folder), shown=config.shown[:2]
    )
    python = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(python, capture_output=True, text=True, cwd="/")
    if "no namespaces" in done.stderr:
        pytest.skip(done.stderr)
    assert (done.stdout, done.stderr) == ("", "")
    assert (folder / "gangs/g/0/file").exists()


def test_work_that_has_ended_cannot_be_entered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hide, "ENTER_S", 0.0)
    with pytest.raises(ProcessLookupError, match="the work is not running"):
        hide.enter(str(folder), lambda: [0])


BESIDE = """
from cavvy.agent.loop import EventLoop
from cavvy.agent.work import hide
from cavvy.agent.work.process import WorkProcess
from cavvy.agent.work.protect import Protection
from cavvy.agent.work.reaper import ChildCommand
from cavvy.agent.work.view import WorkView
hide.ENTER_S = 0.0
loop, said = EventLoop(), []
command = ChildCommand(["true"], {}, "/")
command.view, command.beside = WorkView("/missing", [], Protection([], ""), devices=[]), 1
WorkProcess(loop, command, wrote=said.append, gone=loop.stop)
loop.run()
print(b"".join(said).decode(), end="")
"""


def test_the_user_of_a_command_learns_that_the_work_cannot_be_entered() -> None:
    done = subprocess.run([sys.executable, "-c", BESIDE], capture_output=True, text=True)
    assert done.stdout == "cavvy: cannot start true: the work is not running\n"


@pytest.mark.parametrize(
    ("path", "hidden"),
    [
        ("token", True),
        ("", True),
        ("..", True),
        ("gangs", True),
        ("gangs/g/0/work", False),
        ("storage/job/step-1", False),
        ("storage/jobs", True),
        ("../elsewhere", False),
        ("../server2", False),
    ],
)
def test_copies_leave_hidden_files_alone(folder: Path, path: str, hidden: bool) -> None:
    config = make_config(folder)
    link = folder / "gangs/g/0/work/link"
    link.symlink_to(folder / path)
    for each in (str(folder / path), str(link)):
        assert hide.is_hidden(str(folder), config.shown, each) is hidden


def test_inputs_and_outputs_cannot_lead_into_the_folder(folder: Path, tmp_path: Path) -> None:
    config = make_config(folder)
    work = folder / "gangs/g/0/work"
    (work / "link").symlink_to(folder / "token")
    (tmp_path / "mine").write_text("mine")
    all_folders = AllowedFolders([], ["/"])

    def copy(source: Path, target: Path) -> None:
        transfer(config, all_folders, str(source), None, str(target), "output")

    copy(tmp_path / "mine", work / "mine")
    for source, target in (
        (folder / "token", work / "input"),
        (work / "link", tmp_path / "output"),
        (work / "mine", folder / "token"),
    ):
        with pytest.raises(CannotBuild, match="hidden from jobs on this machine"):
            copy(source, target)
    meter = TransferProgress("out", print)
    with pytest.raises(CannotBuild, match="hidden from jobs on this machine"):
        send_file(config, all_folders, 0, str(work / "link"), "link", meter, {})
    assert (folder / "token").read_text() == "secret"


def test_containers_cannot_mount_the_folder(folder: Path, tmp_path: Path) -> None:
    config = make_config(folder)

    def bind(source: Path) -> list[str]:
        volume = {"kind": "host", "source": str(source), "path": "/data", "read_only": False}
        fields = {"job": "j", "job_id": "1", "project": "p", "attempt": 1, "run": "x"}
        work = read_work(ConfigFields({**fields, "volumes": [volume]}, "work"))
        return list_binds(config, work, config.folder)

    (tmp_path / "data").mkdir()
    assert bind(tmp_path / "data") == [f"{tmp_path}/data:/data"]
    for source in (tmp_path, folder, folder / "storage"):
        with pytest.raises(CannotBuild, match="hidden from jobs on this machine"):
            bind(source)


def test_the_agent_writes_nothing_that_is_obeyed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, settings = tmp_path / "home", tmp_path / "etc/settings.toml"
    (home / "data").mkdir(parents=True)
    settings.parent.mkdir()
    settings.write_text("mine")
    monkeypatch.setenv("HOME", str(home))
    config = make_config(folder)
    config.obeys = [str(settings)]
    work = Path(config.folder)
    (work / "tree/.config/cavvy").mkdir(parents=True)
    (work / "tree/.config/cavvy/settings.toml").write_text("planted")
    (home / "way").symlink_to(settings.parent)
    program = Path(hide.__file__)
    for target in (
        *(home / name for name in (".bashrc", ".zshenv", ".ssh/rc", "bin/git", ".config/a/b")),
        *(settings, home / "way/settings.toml", program, program.parents[3] / "sitecustomize.py"),
        *(Path("/etc/cron.d/x"), Path("/usr/local/bin/git"), Path("/var/spool/cron/root")),
    ):
        with pytest.raises(CannotBuild, match="obeys the files there"):
            link(config, str(work), str(target))
        with pytest.raises(CannotBuild, match="obeys the files there"):
            transfer(
                config, AllowedFolders([str(work)]), f"{work}/tree", None, str(target), "output"
            )
    for target in (home, home / ".config", settings.parent):
        with pytest.raises(CannotBuild, match="obeys the files there"):
            link(config, str(work), str(target))
    with pytest.raises(CannotBuild, match="obeys the files there"):
        transfer(config, AllowedFolders([str(work)]), f"{work}/tree", None, str(home), "output")
    for target in (home / "data/out", home / "results", home / ".cache/x", tmp_path / "other"):
        transfer(config, AllowedFolders([str(work)]), f"{work}/tree", None, str(target), "output")
        assert (target / ".config/cavvy/settings.toml").exists()
    assert settings.read_text() == "mine"
    assert {each.name for each in home.iterdir()} == {".cache", "data", "results", "way"}


def test_containers_cannot_change_what_is_obeyed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home/.config").mkdir(parents=True)
    (tmp_path / "home/data").mkdir()
    config = make_config(folder)

    def bind(source: str, *, read_only: bool) -> list[str]:
        volume = {"kind": "host", "source": source, "path": "/data", "read_only": read_only}
        fields = {"job": "j", "job_id": "1", "project": "p", "attempt": 1, "run": "x"}
        work = read_work(ConfigFields({**fields, "volumes": [volume]}, "work"))
        return list_binds(config, work, config.folder)

    for source in ("/etc", f"{tmp_path}/home", f"{tmp_path}/home/.config", sys.prefix):
        with pytest.raises(CannotBuild, match="obeys the files there"):
            bind(source, read_only=False)
        assert bind(source, read_only=True) == [f"{source}:/data:ro"]
    assert bind(f"{tmp_path}/home/data", read_only=False) == [f"{tmp_path}/home/data:/data"]


def test_a_task_with_such_a_volume_is_refused_before_it_is_queued(
    folder: Path, tmp_path: Path
) -> None:
    def check(source: Path, image: str | None = "busybox") -> list[str]:
        volume = Volume(kind=VolumeKind.HOST, source=str(source), path="/data")
        task = TaskSpec(name="t", run="x", image=image, volumes=(volume,))
        return [each.field for each in check_task(task, lambda: "podman", folder)]

    assert check(tmp_path) == check(folder / "storage") == ["volumes"]
    assert check(tmp_path / "elsewhere") == check(tmp_path, None) == []
    volume = Volume(kind=VolumeKind.HOST, source="/", path="/data")
    task = TaskSpec(name="t", run="x", image="busybox", volumes=(volume,))
    assert check_task(task, lambda: "podman", None) == []  # `hide_server` is off
