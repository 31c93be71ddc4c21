"""A hostile job tries to change what the server, its machine and its user obey, and to end their
processes: by default and with `isolation = "namespaces"`, as root and as another user, on the
server's machine, on an SSH host and on a joined machine. Nothing may succeed. Without protection,
much does.
"""

import contextlib
import json
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from tests.agent.hostile.test_hostile_task import LOCAL, Nobody, joined, nobody, submit
from tests.system.hosts import lab_at, require_hosts
from tests.system.trust import User, user_at
from tests.waits import wait_until

import cavvy

pytestmark = pytest.mark.system

# A user of the host's own, whose home is in the host's folder.
WORKER = """
cp /etc/passwd {folder}/passwd
echo "worker:x:4242:4242::/home/worker:/bin/sh" >> {folder}/passwd
mount --bind {folder}/passwd /etc/passwd
mkdir -p {folder}/homes/worker/.ssh
mount --bind {folder}/homes /home
chown -R 4242:4242 /home/worker
"""
MARK, STARTED = f"obeyed-{os.getpid()}", time.time()
ATTACKS = Path(__file__).parents[2].joinpath("hostile", "obeyed_task.py")
LIMITS = "[providers.local]\ncpus = 4\n"


@contextmanager
def root(settings: str) -> Iterator[User]:
    """The user of the tests, who has its own home."""
    if os.getuid() != 0:
        pytest.skip("only root is root")
    with TemporaryDirectory(prefix="obeyed-") as top, user_at(Path(top) / "user") as user:
        (user.root / "own").mkdir()
        user.settings(settings)
        user.variables |= {"HOME": str(user.root / "own")}
        yield user


def make_home(home: Path, owner: int) -> list[Path]:
    """Give a home folder some of the files that users have; the others are missing. Return the
    user's own folders, which a job may write to."""
    for name in (".ssh", ".config/fish", ".local/bin", "dotfiles", "data"):
        (home / name).mkdir(parents=True, exist_ok=True)
    for name in (".bashrc", ".ssh/authorized_keys", "dotfiles/zshrc", ".gitconfig"):
        (home / name).write_text("# mine\n[ -f ~/tools/env.sh ] && . ~/tools/env.sh\n")
    (home / ".zshrc").symlink_to("dotfiles/zshrc")
    for path in (home, *home.rglob("*")):
        os.chown(path, owner, owner, follow_symlinks=False)
    return [home / "data", home / ".cache"]


def list_files(top: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(top):
        yield from (Path(folder, name) for name in names)


def find_planted(tops: list[Path]) -> list[str]:
    """Files outside of Cavvy's folder that the job has written: those that changed since the tests
    were read, whose last 64 KiB have the mark. A job can set every other time of a file.
    """
    found = []
    for top in tops:
        for path in [top] if top.is_file() else list_files(top):
            with contextlib.suppress(OSError):
                known = path.stat()
                if not stat.S_ISREG(known.st_mode) or known.st_ctime < STARTED - 1:
                    continue
                with path.open("rb") as file:
                    file.seek(max(0, known.st_size - (1 << 16)))
                    if MARK.encode() in file.read():
                        found.append(str(path))
    return found


def attack(user: User, home: Path) -> tuple[list[str], list[str]]:
    """Return what the hostile job could do, and what it has left behind."""
    owner = 65534 if isinstance(user, Nobody) and os.getuid() == 0 else os.getuid()
    own = make_home(home, owner)
    package = Path(cavvy.__file__).parent
    prefix = Path(sys.prefix)
    with socket.socket(socket.AF_UNIX) as agent, TemporaryDirectory(prefix="ssh-") as made:
        folder = Path(made)
        agent.bind(str(folder / "agent.1"))
        agent.listen()
        os.chown(folder, owner, owner)
        user.cli("secret", "list")  # starts the server
        server = user.server()
        assert server
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        hunt: dict[str, Any] = {
            "tmp": [os.stat("/tmp").st_dev, os.stat("/tmp").st_ino],
            "mark": MARK,
            "home": str(home),
            "paths": [
                str(user.config),
                str(package / "__init__.py"),
                str(package / "agent/main.py"),
                str(package.parent / "sitecustomize.py"),
                str(prefix / "bin/cavvy"),
                str(prefix / f"lib/{version}/site-packages/x.pth"),
                str(home / "dotfiles/zshrc"),
            ],
            "sockets": [
                *(str(folder / "agent.1"), "/run/docker.sock", "/run/systemd/private"),
                f"/tmp/cavvy-ssh-{owner}/late",
            ],
            "pids": [server, os.getpid()],
            "commands": ["cavvy.server", "pytest"],
        }
        user.cli("project", "create", "evil", code=None)
        late = Path(f"/tmp/cavvy-ssh-{owner}")
        late.mkdir(mode=0o700, exist_ok=True)
        os.chown(late, owner, owner)
        hunt["paths"] += [f"{late}/planted-{MARK}", f"{user.root}/run/cavvy/planted-{MARK}"]
        submit(user, "evil", "obeyed", ATTACKS.read_text(), HUNT=json.dumps(hunt))
        user.cli("wait", "-p", "evil", "obeyed", code=None)
        log = user.cli("logs", "-p", "evil", "obeyed", code=None)
    assert "all tried" in log, log
    assert user.server() == server, "the server was ended"
    found = [json.loads(line) for line in log.splitlines() if line.startswith('{"attempt"')]
    assert len(found) > 200
    looked = [home, user.config, package.parent, prefix, *map(Path, ("/etc", "/run", "/boot"))]
    looked += [Path(each) for each in ("/var/spool", "/usr/lib/systemd", "/usr/local", "/opt/x")]
    looked += [
        user.root / "run",
        late,
        Path("/usr/bin"),
        Path("/x"),
        Path("/lib/x"),
        Path("/root/.bashrc"),
    ]
    planted = [path for path in find_planted(looked) if not path.startswith(tuple(map(str, own)))]
    return [each["attempt"] for each in found if each["done"]], planted


def check_nothing_changes(user: User) -> None:
    if "cannot change" not in user.cli("check", "local"):
        pytest.skip("this system offers no namespaces")
    assert attack(user, Path(user.variables["HOME"])) == ([], [])


@pytest.mark.parametrize("isolation", ["", "namespaces"])
def test_a_job_of_another_user_than_root_changes_nothing(isolation: str) -> None:
    with nobody(LOCAL + f"isolation = '{isolation}'") as user:
        check_nothing_changes(user)


@pytest.mark.parametrize("isolation", ["", "namespaces"])
def test_a_job_of_root_changes_nothing(isolation: str) -> None:
    with root(LIMITS + f"isolation = '{isolation}'") as user:
        check_nothing_changes(user)


@pytest.mark.parametrize("login", ["root", "worker"])
@pytest.mark.parametrize("isolation", ["", "namespaces"])
def test_a_job_on_an_ssh_host_changes_nothing(isolation: str, login: str, tmp_path: Path) -> None:
    if (isolation, login) == ("namespaces", "root"):
        pytest.skip("jobs of root cannot be separated: this is the same as without namespaces")
    require_hosts()
    with lab_at(tmp_path / "lab") as lab:
        there, home = "/root", lab.root / "h1/home"
        if login == "root":
            lab.add()
            make_home(home, 0)
        else:
            there, home = "/home/worker", lab.root / "h1/homes/worker"
            lab.add(script=WORKER.format(folder=lab.root / "h1", lab=lab.root))
            lab.ssh_config.write_text(
                lab.ssh_config.read_text().replace("User root", "User worker")
            )
            make_home(home, 4242)
            (home / ".ssh/authorized_keys").write_text((lab.root / "id.pub").read_text())
        with lab.entered(), user_at(tmp_path / "user") as user:
            user.settings(
                "[providers.local]\nenabled = false\n"
                f'[providers.ssh]\nhosts = "h1"\nssh_config = "{lab.ssh_config}"\n'
                f"isolation = '{isolation}'\n"
            )
            if "cannot change" not in user.cli("check", "ssh"):
                pytest.skip("this system offers no namespaces")
            user.submit("{name: before, run: 'true'}")
            user.ended("before")
            programs = [str(path) for path in (home / ".cavvy-agent").glob("*.pyz")]
            assert programs
            hunt = {
                "mark": MARK,
                "home": there,
                "paths": [each.replace(str(home), there) for each in programs],
                "sockets": ["/run/docker.sock", "/run/systemd/private"],
                "pids": [],
                "commands": ["sshd", "supervisor"],
            }
            user.cli("project", "create", "evil", code=None)
            (user.work / "obeyed").mkdir()
            (user.work / "obeyed/program.py").write_text(ATTACKS.read_text())
            task = {"name": "obeyed", "workdir": ".", "run": "python3 -u program.py"}
            task["env"] = {"HUNT": json.dumps(hunt)}  # type: ignore[assignment]
            (user.work / "obeyed/task.yaml").write_text(json.dumps(task))
            user.cli("run", "-d", "-p", "evil", str(user.work / "obeyed/task.yaml"))
            check_left_alone(user, home, programs)
            write = "mkdir ~/results; echo x > ~/results/x; echo x > ~/.netrc"
            user.submit(f"{{name: good, run: '{write}'}}")
            user.ended("good")
            if isolation:
                assert "is removed with its files: results;" in user.cli("logs", "good")
                assert not (home / "results").exists()
            else:
                assert (home / "results/x").read_text() == "x\n"
                assert f"{there}/.cavvy-agent/" in user.cli("status", "good")
            assert not (home / ".netrc").exists()


def check_left_alone(user: User, home: Path, programs: list[str]) -> None:
    """The attacks of the job `obeyed` end without one that succeeds."""
    user.cli("wait", "-p", "evil", "obeyed", code=None)
    log = user.cli("logs", "-p", "evil", "obeyed", code=None)
    found = [json.loads(line) for line in log.splitlines() if line.startswith('{"attempt"')]
    assert len(found) > 200, log
    planted = find_planted([home, *map(Path, ("/etc", "/usr/local", "/var/spool"))])
    ours = (f"{home}/.cavvy-agent", f"{home}/.cache", f"{home}/data")
    left = [path for path in planted if not path.startswith(ours)]
    assert ([each["attempt"] for each in found if each["done"]], left) == ([], [])
    assert not any(MARK.encode() in Path(each).read_bytes() for each in programs)


def test_a_job_on_a_joined_machine_changes_nothing() -> None:
    with joined("") as machine:
        user, home = machine.user, machine.home
        make_home(home, os.stat(home).st_uid)
        submit(user, "default", "before", "print('ran')")
        user.cli("wait", "before")
        programs = [str(each) for each in machine.folder.rglob("*.pyz")]
        assert programs
        if "offers no user namespaces" in user.cli("logs", "before"):
            pytest.skip("this system offers no namespaces")
        hunt = {
            "mark": MARK,
            "home": str(home),
            "paths": [*programs, f"{home}/dotfiles/zshrc"],
            "sockets": ["/run/docker.sock", "/run/systemd/private"],
            "pids": [],
            "commands": ["cavvy join", "supervisor"],
        }
        user.cli("project", "create", "evil", code=None)
        submit(user, "evil", "obeyed", ATTACKS.read_text(), HUNT=json.dumps(hunt))
        check_left_alone(user, home, programs)


def test_the_user_s_own_files_stay_writable() -> None:
    with nobody(LOCAL) as user:
        home = Path(user.variables["HOME"])
        make_home(home, 65534 if os.getuid() == 0 else os.getuid())
        if "cannot change" not in user.cli("check", "local"):
            pytest.skip("this system offers no namespaces")
        script = (
            "import os\nos.chdir(os.path.expanduser('~'))\n"
            "os.makedirs('.cache/pip')\nopen('.cache/pip/x', 'w').write('x')\n"
            "open('data/x', 'w').write('x')\nos.makedirs('results')\n"
            "open('results/x', 'w').write('x')\nprint(open('.gitconfig').read())\n"
            "open('.netrc', 'w').write('x')\n"
        )
        submit(user, "good", "tidy", script)
        user.cli("wait", "-p", "good", "tidy")
        assert "# mine" in user.cli("logs", "-p", "good", "tidy")
        assert (home / "data/x").read_text() == (home / ".cache/pip/x").read_text() == "x"
        assert (home / "results/x").read_text() == "x"
        assert f"new in the home folder {home}: results" in user.cli("logs", "-p", "good", "tidy")
        submit(
            user,
            "good",
            "later",
            "import os\nos.chdir(os.path.expanduser('~'))\n"
            "open('results/x', 'a').write(open('.netrc').read())\nos.mkdir('more')\n"
            "open('more/x', 'w').write('x')\nos.kill(os.getpid(), 9)",
        )
        user.cli("wait", "-p", "good", "later", code=None)
        assert (home / "results/x").read_text() == "xx"
        assert (home / "more/x").exists()
        assert not (home / ".netrc").exists()
        left = next(user.root.glob("home/providers/local/cache/homes/good/*-own/.netrc"), None)
        assert left, list(user.root.glob("home/providers/local/cache/homes/good/*"))
        assert str(left.parent) in user.cli("status", "-p", "good", "tidy")
        assert ".netrc" in user.cli("logs", "-p", "good", "tidy")


def test_a_job_replaces_no_link_to_the_settings() -> None:
    """Also not a link to a folder above them, and not by an output."""
    with nobody(LOCAL) as user:
        real, links, folder = (user.root / name for name in ("real", "links", "folder"))
        real.mkdir()
        links.mkdir()
        user.config.rename(real / "s.toml")
        folder.symlink_to("real")
        link = links / "s.toml"
        link.symlink_to("../folder/s.toml")
        if os.getuid() == 0:
            for path in (real, links, folder, link):
                os.chown(path, 65534, 65534, follow_symlinks=False)
        user.variables["CAVVY_CONFIG"] = str(link)
        if "cannot change" not in user.cli("check", "local"):
            pytest.skip("this system offers no namespaces")
        program = (
            "import os\n"
            f"for path in {[str(link), str(links), str(folder)]!r}:\n"
            "    for change in (os.unlink, lambda each: os.rename(each, each + '.moved'),\n"
            "                   lambda each: os.symlink('/etc/passwd', each + '.new') or\n"
            "                   os.rename(each + '.new', each)):\n"
            "        try:\n"
            "            change(path)\n"
            "            print('changed', path)\n"
            "        except OSError as error:\n"
            "            print(error)\n"
            "os.mkdir('tree')\n"
            "open('tree/s.toml', 'w').write('')\n"
            "print('all tried')\n"
        )
        fields = {"outputs": [{"source": "tree", "target": str(links)}]}
        submit(user, "evil", "links", program, fields=fields)
        user.cli("wait", "-p", "evil", "links", code=None)
        log = user.cli("logs", "-p", "evil", "links")
        assert "all tried" in log
        assert "changed" not in log
        assert "obeys the files there" in log + user.cli("status", "-p", "evil", "links")
        assert (os.readlink(link), os.readlink(folder)) == ("../folder/s.toml", "real")


def test_the_agent_writes_nothing_of_this_kind_for_a_job() -> None:
    with nobody(LOCAL) as user:
        home = Path(user.variables["HOME"])
        make_home(home, 65534 if os.getuid() == 0 else os.getuid())
        if "cannot change" not in user.cli("check", "local"):
            pytest.skip("this system offers no namespaces")
        program = f"import os\nos.mkdir('tree')\nopen('tree/x', 'w').write('{MARK}')\n"
        before = user.config.read_text()
        tries: dict[str, dict[str, Any]] = {
            "out": {"outputs": [{"source": "program.py", "target": str(user.config)}]},
            "start": {"outputs": [{"source": "program.py", "target": f"{home}/.zshenv"}]},
            "tree": {"outputs": [{"source": "tree", "target": f"{home}/.config"}]},
            "in": {"inputs": [{"source": "/etc/passwd", "target": f"{home}/.zprofile"}]},
        }
        for name, fields in tries.items():
            submit(user, "evil", name, program, fields=fields)
            user.cli("wait", "-p", "evil", name, code=None)
            assert "obeys the files there" in user.cli("logs", "-p", "evil", name) + user.cli(
                "status", "-p", "evil", name
            )
        assert user.config.read_text() == before
        assert not any((home / name).exists() for name in (".zshenv", ".zprofile"))
        assert find_planted([home]) == []


def test_without_protection_the_same_attempts_succeed() -> None:
    with nobody(LOCAL + "hide_server = false") as user:
        assert "can change" in user.cli("check", "local")
        home = Path(user.variables["HOME"])
        planted = attack_unprotected(user, home)
        assert {f"{home}/.bashrc", f"{home}/.zshenv", str(user.config)} <= set(planted)


def attack_unprotected(user: User, home: Path) -> list[str]:
    owner = 65534 if os.getuid() == 0 else os.getuid()
    make_home(home, owner)
    hunt = {
        "mark": MARK,
        "home": str(home),
        "paths": [str(user.config)],
        "sockets": [],
        "pids": [],
        "commands": ["nothing"],
    }
    program = (
        ATTACKS.read_text()
        .replace("    yield from list_escapes()\n", "")
        .replace('    yield "processes ended", end_everything\n', "")
        .replace(
            '    for path in HUNT["paths"]:\n        yield f"swap',
            '    for path in ():\n        yield f"swap',
        )
    )
    submit(user, "evil", "obeyed", program, HUNT=json.dumps(hunt))
    user.cli("wait", "-p", "evil", "obeyed", code=None)
    wait_until(lambda: "all tried" in user.cli("logs", "-p", "evil", "obeyed", code=None))
    return find_planted([home, user.config])
