"""Two projects on one machine, the server's or a joined one of another user: a hostile job of one
tries to reach a job of the other, Cavvy there and its user. With `isolation = "namespaces"` nothing
may succeed; without, much does, which shows that the attempts are real.
"""

import ctypes
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from tests.system.trust import User
from tests.waits import PATIENCE_S, wait_until

from cavvy.agent.work import separate

pytestmark = pytest.mark.system

NOBODY = 65534
SECRET, MARK = "planted-5151", f"hostile-{os.getpid()}"
ATTACKS = Path(__file__).parents[2].joinpath("hostile", "hostile_task.py")
SEGMENT = 0x51000000 + os.getpid()  # the same test may run in other processes
ADD_KEY = 248 if os.uname().machine == "x86_64" else 217
VICTIM = f"""
import ctypes, os, socket, time
for path in ("notes", "/tmp/{MARK}", "/var/tmp/{MARK}", "/dev/shm/{MARK}"):
    open(path, "w").write("{SECRET}")
line = socket.socket(socket.AF_UNIX)
line.bind("\\0victim-{MARK}")
line.listen()
libc = ctypes.CDLL(None)
segment = libc.shmget({SEGMENT}, 64, 0o1666)
libc.syscall({ADD_KEY}, b"user", b"victim", b"x", 1, -4)
buffer = ctypes.create_string_buffer(b"{SECRET}")
print("ready", ctypes.addressof(buffer), flush=True)
time.sleep(600)
"""
# what one user of a system can always do to another process of theirs
REAL = {
    "victim's file",
    "victim's agent token",
    "server's token",
    "server's cavvy.db",
    "environment by /proc",
    "memory by a system call",
    "ptrace attach",
    "signal to pid",
    "abstract socket",
    "/tmp",
    "/dev/shm",
    "shared memory",
    "cloud keys of the user",
    "input of the user's home",
}


# the same of a joined machine, whose user is not the server's
REAL_THERE = REAL - {"server's token", "server's cavvy.db"} | {
    "host's member-*.json",
    "host's */*/agents/*/*/config.json",
    "host's program",
}

AS_NOBODY: dict[str, Any] = (
    {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.getuid() == 0 else {}
)
# where this Python finds packages, but not its own modules
PATHS = os.pathsep.join(
    path for path in sys.path if os.path.isdir(path) and not path.startswith(sys.base_prefix)
)

# the machine of the tests may have a metadata service, so root gives the server its own network
ALONE = (
    [
        *("unshare", "-n", "sh", "-c", 'ip link set lo up; exec setpriv "$@"', "sh"),
        *("--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"),
    ]
    if os.getuid() == 0
    else []
)


@functools.cache
def find_python() -> str:
    """A Python that this user may run: root's own may be in root's home."""
    own = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (sys.executable, own):
        try:
            subprocess.run(
                [path, "-c", "import msgspec, fastapi, cavvy"],
                check=True,
                capture_output=True,
                env={"PYTHONPATH": PATHS, "PATH": os.environ["PATH"]},
                **AS_NOBODY,
            )
        except (OSError, subprocess.CalledProcessError):
            continue
        return path
    pytest.skip("no Python that a user without privileges may run")


class Nobody(User):
    """A user without privileges, also if the tests run as root: only a command starts a server, as
    a look would do so for the tests' user, to whom this home does not belong.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.starts = os.getuid() != 0

    def start(self, *arguments: str, stdin: int = subprocess.DEVNULL) -> "subprocess.Popen[str]":
        command = subprocess.Popen(
            [
                *ALONE,
                find_python(),
                "-c",
                "from cavvy.cli.main import main; main()",
                *arguments,
            ],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environ,
            cwd=self.work,
            start_new_session=True,
        )
        self._commands.append(command)
        return command


class Hunted:
    """The machine that runs the jobs: its user's home, Cavvy's folder, and the provider."""

    def __init__(self, user: Nobody, provider: str = "local", home: Path | None = None) -> None:
        self.user, self.provider = user, provider
        self.home = home or Path(user.variables["HOME"])
        self.folder = user.home / "providers/local" if home is None else home / ".cavvy-agent"

    def gang(self) -> Path:
        """The folder of the only gang."""
        pattern = "gangs/*/0" if self.provider == "local" else "*/*/gangs/*/0"
        (rank,) = self.folder.glob(pattern)
        return rank.parent


JOINED = """[providers.local]
enabled = false
[server]
tls_listen = "127.0.0.1:7443"
[providers.join]
{settings}
"""
OTHER = NOBODY - 1
OUR_USERS = os.readlink("/proc/self/ns/user")


@contextmanager
def joined(settings: str) -> Iterator[Hunted]:
    """This machine, joined by a user other than the server's. It has its own user namespace, in
    which the test can change the kernel's settings for it.
    """
    if os.getuid() != 0:
        pytest.skip("only root can start the processes of two other users")
    with nobody(JOINED.format(settings=settings)) as user:
        home = user.root.parent / "there"
        make_home(home)
        for path in (home, *home.rglob("*")):
            os.chown(path, OTHER, OTHER)
        line = user.output("join", "--python", "--background")
        server = find_process("cavvy.server", str(user.home))
        enter = ["nsenter", "-t", str(server), "-n", "unshare", "--user", "sh", "-c"]
        as_other = f"setpriv --reuid {OTHER} --regid {OTHER} --clear-groups"
        start = subprocess.Popen(
            [*enter, f"read mapped; exec {as_other} sh -c {shlex.quote(line)}"],
            stdin=subprocess.PIPE,
            cwd="/",
            env={"HOME": str(home), "PATH": "/usr/local/bin:/usr/bin:/bin"},
        )
        wait_until(lambda: os.readlink(f"/proc/{start.pid}/ns/user") != OUR_USERS)
        for ids in ("uid_map", "gid_map"):
            Path(f"/proc/{start.pid}/{ids}").write_text("0 0 65536")
        start.communicate(b"mapped\n", timeout=PATIENCE_S)
        assert start.returncode == 0
        wait_until(lambda: " up " in user.cli("joined"), lambda: user.cli("joined"))
        yield Hunted(user, "join", home)


def make_home(home: Path) -> None:
    for folder in (home / ".aws", home / ".ssh"):
        folder.mkdir(mode=0o700, parents=True)
    (home / ".aws/credentials").write_text(SECRET)


@contextmanager
def nobody(settings: str) -> Iterator[Nobody]:
    """Such a user, with a server that has these settings."""
    top = Path(mkdtemp(prefix="cavvy-hostile-"))
    user = Nobody(top / "user")
    home = user.root / "own"
    for folder in (user.home, user.root / "run"):
        folder.mkdir(mode=0o700, parents=True)
    make_home(home)
    user.settings(settings)
    user.variables |= {"HOME": str(home), "PYTHONPATH": PATHS}
    if os.getuid() == 0:
        for path in (top, *top.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        top.chmod(0o711)
    try:
        yield user
    finally:
        user.cli("stop", "-p", "good", "victim", code=None)
        user.cli("server", "stop", code=None)
        end_processes(str(top))
        libc = ctypes.CDLL(None)
        libc.shmctl(libc.shmget(SEGMENT, 64, 0), 0, None)  # 0 removes it
        for folder in ("/tmp", "/var/tmp", "/dev/shm"):
            Path(folder, MARK).unlink(missing_ok=True)
        shutil.rmtree(top, ignore_errors=True)


def end_processes(path: str) -> None:
    """End the processes of this test, whose arguments or environments name its folder."""
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            told = (each / "cmdline").read_bytes() + (each / "environ").read_bytes()
            if path.encode() in told and int(each.name) != os.getpid():
                os.kill(int(each.name), signal.SIGKILL)


def submit(
    user: Nobody,
    project: str,
    name: str,
    program: str,
    *,
    fields: dict[str, Any] | None = None,
    **env: str,
) -> None:
    folder = user.work / name
    folder.mkdir()
    (folder / "program.py").write_text(program)
    task = {
        "name": name,
        "workdir": ".",
        "run": f"{find_python()} -u program.py",
        "env": env,
        **(fields or {}),
    }
    (folder / "task.yaml").write_text(json.dumps(task))
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)
    user.cli("run", "-d", "-p", project, str(folder / "task.yaml"))


def try_transfers(there: Hunted) -> dict[str, bool]:
    """Tasks whose inputs and outputs name the user's files, and tasks that choose the programs that
    prepare the work: the agent, which carries these tasks out, is not in the namespaces of the work.
    """
    user, home, done = there.user, there.home, {}
    secret = home / ".aws/credentials"
    asked: dict[str, dict[str, Any]] = {
        "git": {
            "workdir": {"git": "ssh://nowhere.invalid/model.git", "commit": "0" * 40},
            "env": {"GIT_SSH_COMMAND": f"cat {secret} >&2; false"},
        },
        "input": {"inputs": [{"source": str(secret), "target": "stolen"}]},
        "output": {"outputs": [{"source": "program.py", "target": str(home / "written")}]},
    }
    for name, fields in asked.items():
        submit(user, "evil", name, "print(open('stolen').read())", fields=fields)
        user.cli("wait", "-p", "evil", name, code=None)
        done[f"{name} of the user's home"] = SECRET in user.cli("logs", "-p", "evil", name)
    done["output written"] = (home / "written").exists()
    return done


def find_process(text: str, mark: str = "") -> int:
    """The newest process with this text in its arguments, and the other in its environment."""
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda each: -int(each.name)):
        try:
            command, environ = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue
        if text.encode() in command and mark.encode() in environ:
            return int(path.name)
    return 0


def attack(there: Hunted) -> dict[str, bool]:
    """What the hostile job could do, by attempt."""
    user = there.user
    submit(user, "good", "victim", VICTIM, VICTIM="1", NOTES=SECRET)

    def read_log(project: str, name: str) -> str:
        return user.cli("logs", "-p", project, name, code=None)

    wait_until(lambda: "ready" in read_log("good", "victim"))
    pid = find_process("program.py", "VICTIM=1")
    server = find_process("cavvy.server", str(user.home))
    assert server, "the server of the attack was not found"
    gang = there.gang()
    hunt = {
        "secret": SECRET,
        "mark": MARK,
        "segment": SEGMENT,
        "server": str(user.home),
        "server_pid": server,
        "socket": (user.home / "server.socket").read_text()
        if (user.home / "server.socket").exists()
        else str(user.home / "socket"),
        "gang": str(gang),
        "pid": pid,
        "agent": find_process(f"agents/{gang.name}/0/config.json") or pid,
        "command": str(gang),
        "address": int(read_log("good", "victim").split("ready")[1].split()[0]),
        "program": os.path.dirname(separate.__file__),
        "user_home": str(there.home),
        "folder": str(there.folder),
    }
    submit(user, "evil", "attacker", ATTACKS.read_text(), HUNT=json.dumps(hunt))
    user.cli("wait", "-p", "evil", "attacker", code=None)
    log = read_log("evil", "attacker")
    found = [json.loads(line) for line in log.splitlines() if line.startswith('{"attempt"')]
    done = {each["attempt"]: bool(each["done"]) for each in found}
    assert "zombies" in done, log
    done["victim was ended"] = find_process("program.py", "VICTIM=1") != pid
    done["processes are left"] = find_process(MARK, "evil") != 0
    planted = [user.home / "planted", there.folder / "planted", gang / "0/work/planted"]
    planted += [there.home / name for name in (".bashrc", ".ssh/authorized_keys")]
    planted.append(there.home / ".config/systemd/user/planted.service")
    planted.append(Path("/etc/cron.d/planted"))
    done |= {f"left {path}": path.exists() and MARK in path.read_text() for path in planted}
    return done


def check_separation(there: Hunted) -> None:
    """Nothing that the hostile job tries succeeds."""
    done = attack(there)
    user = there.user
    beside = user.cli("exec", "-p", "good", "victim", "--", "sh", "-c", f"cat /tmp/{MARK}")
    done |= try_transfers(there)
    assert len(done) >= 30
    assert SECRET in beside, "a command next to the work sees what the work sees"
    assert [name for name, succeeded in done.items() if succeeded] == []


LOCAL = "[providers.local]\ncpus = 4\n"
SEPARATED = "side by side, separated by namespaces"


def test_nothing_that_a_hostile_job_tries_succeeds() -> None:
    with nobody(LOCAL + "isolation = 'namespaces'") as user:
        check = user.cli("check", "local")
        if SEPARATED not in check:
            pytest.skip(f"this system offers no namespaces: {check}")
        check_separation(Hunted(user))


def test_without_separation_the_same_attempts_succeed() -> None:
    with nobody(LOCAL + "isolation = 'none'\nhide_server = false") as user:
        done = attack(Hunted(user)) | try_transfers(Hunted(user))
    succeeded = {name for name, each in done.items() if each}
    assert succeeded >= REAL, REAL - succeeded


def test_nothing_succeeds_on_a_joined_machine_until_it_stops_separating() -> None:
    with joined("isolation = 'namespaces'") as there:
        user = there.user
        wait_until(lambda: "projects" in user.cli("joined"), lambda: user.cli("joined"))
        if SEPARATED not in user.cli("joined"):
            pytest.skip(f"this system offers no namespaces: {user.cli('joined')}")
        check_separation(there)
        pid = find_process(".supervisor.pyz", str(there.home))
        forbid = ["nsenter", "-t", str(pid), "-U", "sysctl", "-qw", "user.max_user_namespaces=0"]
        subprocess.run(forbid, check=True, timeout=PATIENCE_S)
        submit(user, "evil", "late", "print('here')")
        wait_until(lambda: "one project at a time" in user.cli("status", "-p", "evil", "late"))
        assert "namespaces need a Linux kernel" in user.cli("status", "-p", "evil", "late")
        user.cli("stop", "-p", "good", "victim")
        user.cli("wait", "-p", "evil", "late")
        assert "here" in user.cli("logs", "-p", "evil", "late")


def test_without_separation_the_same_attempts_succeed_on_a_joined_machine() -> None:
    with joined("isolation = 'none'") as there:
        done = attack(there) | try_transfers(there)
    succeeded = {name for name, each in done.items() if each}
    assert succeeded >= REAL_THERE, REAL_THERE - succeeded


def test_by_default_the_job_of_another_project_waits_once_the_server_has_accounts() -> None:
    with nobody(LOCAL) as user:
        assert "one project at a time" in user.cli("check", "local")
        user.cli("user", "add", "ada")
        submit(user, "good", "victim", VICTIM)
        wait_until(lambda: "running" in user.cli("ps", "-p", "good", code=None))
        submit(user, "evil", "attacker", "print('here')")
        told = user.cli("status", "-p", "evil", "attacker")
        wait_until(lambda: "one project at a time" in user.cli("status", "-p", "evil", "attacker"))
        assert "good" not in told
        user.cli("stop", "-p", "good", "victim")
        user.cli("wait", "-p", "evil", "attacker")
        assert "here" in user.cli("logs", "-p", "evil", "attacker")


def test_root_separates_nothing() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can try")
    assert separate.main("/srv", "/srv") == 1
