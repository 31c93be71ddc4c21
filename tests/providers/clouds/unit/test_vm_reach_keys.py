"""The connection to a machine of a cloud, with a program in the place of `ssh` that runs the
machine's commands here.
"""

import asyncio
import subprocess
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cavvy.providers.base import ProviderError, TryAgain
from cavvy.providers.hosts.ssh_link import LinkDependencies, SshLink
from cavvy.providers.hosts.userdata import make_key_script
from cavvy.providers.state import MemoryProviderState
from cavvy.providers.vm.cloud import SshTarget
from cavvy.providers.vm.reach import ReachedMachine
from cavvy.providers.vm.reach_keys import MachineDoor, load_keys

# The last argument is the command. `-M` marks the connection that other commands share.
_SSH = """\
#!/bin/sh
echo "$*" >> {folder}/calls
for last; do :; done
case " $* " in
  *" -M "*) {login}; eval "exec $last" ;;
  *) {command} ;;
esac
"""
_RUN = 'eval "exec $last"'


class Place:
    """A machine and the server's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pins, self.state = folder, list[str](), MemoryProviderState()
        self.lost = False  # True: pins cannot be recorded
        (folder / "bin").mkdir()
        (folder / "s").mkdir()

    def ssh(self, login: str = ":", command: str = _RUN) -> None:
        """Set what the program does at a login and with a command over an open connection."""
        text = _SSH.format(folder=self.folder, login=login, command=command)
        path = self.folder / "bin" / "ssh"
        path.write_text(text)
        path.chmod(0o700)

    def door(self, target: SshTarget) -> MachineDoor:
        async def keep(pin: str) -> None:
            if self.lost:
                raise TryAgain("the pin is not recorded")
            self.pins.append(pin)

        return MachineDoor(
            alias="vm-1",
            target=target,
            sockets=self.folder / "s",
            read_pin=lambda: self.pins[-1] if self.pins else "",
            keep_pin=keep,
            read_keys=lambda: load_keys(self.state),
        )

    def link(self, target: SshTarget) -> SshLink[ReachedMachine]:
        base = LinkDependencies(
            mark="m",
            agent=lambda: None,
            server_address="",
            cache=self.folder,
            now=lambda: datetime.now(UTC),
            changed=lambda host, changed: None,
        )
        entry = ReachedMachine(
            name="vm-1",
            folder=str(self.folder / "host"),
            address=target.address,
            port=target.port,
        )
        return SshLink(entry, base, self.door(target).dial)

    def calls(self) -> Sequence[str]:
        path = self.folder / "calls"
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    # a path of pytest may be too long for a socket
    with TemporaryDirectory() as folder:
        monkeypatch.setenv("PATH", f"{folder}/bin:/usr/bin:/bin")
        yield Place(Path(folder))


TARGET = SshTarget(address="192.0.2.1")


async def connect(link: SshLink[ReachedMachine]) -> str:
    """Connect, and return the folder on the machine or the error."""
    try:
        return (await link.connect()).root
    except ProviderError as error:
        return str(error)
    finally:
        await link.close()


def test_a_machine_is_connected(place: Place) -> None:
    place.ssh()
    assert asyncio.run(connect(place.link(TARGET))) == f"{place.folder}/host/m/vm-1"


@pytest.mark.parametrize("path", [r"/x\0y", "x", "/x:22", "/x%d", "/${HOME}", "/x[", ""])
def test_the_path_of_a_machines_folder_is_checked(place: Place, path: str) -> None:
    place.ssh(
        command=f"printf '%b' 'base={path}\\nsystem=Linux x86_64\\npython=/usr/bin/python3\\n'"
    )
    said = asyncio.run(connect(place.link(TARGET)))
    assert "vm-1: the path of the host's folder for Cavvy has unusual characters" in said


@pytest.mark.parametrize(
    "target",
    [
        SshTarget(address="192.0.2.1", user="root\nProxyCommand sh -c true"),
        SshTarget(address="192.0.2.1", user=""),
        SshTarget(address="192.0.2.1\0"),
        SshTarget(address="-oProxyCommand"),
    ],
)
def test_a_target_that_is_no_plain_word_is_never_called(place: Place, target: SshTarget) -> None:
    place.ssh()
    said = asyncio.run(connect(place.link(target)))
    assert "vm-1: the cloud reported an unusual user or address" in said
    assert place.calls() == []


def test_a_host_key_is_recorded_only_after_a_login(place: Place) -> None:
    """The second machine at an address has another key than the first, which refused the login."""
    known = place.folder / "s" / "vm-1.hosts"
    see = f"[ -e {known} ] || echo 'vm-1 key-{{}}' > {known}"
    place.ssh(login=f"{see.format(1)}; echo 'Permission denied (publickey).' >&2; exit 255")
    assert "Permission denied" in asyncio.run(connect(place.link(TARGET)))
    assert place.pins == []
    place.ssh(login=see.format(2))
    assert asyncio.run(connect(place.link(TARGET))) == f"{place.folder}/host/m/vm-1"
    assert place.pins == ["vm-1 key-2"]


def test_a_connection_whose_pin_cannot_be_recorded_is_closed(place: Place) -> None:
    known, pid = place.folder / "s" / "vm-1.hosts", place.folder / "pid"
    place.ssh(login=f"echo 'vm-1 key' > {known}; echo $$ > {pid}")
    place.lost = True
    assert "the pin is not recorded" in asyncio.run(connect(place.link(TARGET)))
    assert not Path(f"/proc/{pid.read_text().strip()}").exists()


def test_a_machine_that_prints_without_end_is_not_read_for_ever(place: Place) -> None:
    place.ssh(command="exec cat /dev/zero")
    assert "vm-1: sh printed more than 1048576 bytes" in asyncio.run(connect(place.link(TARGET)))
    place.ssh(command="tail -c 3000000 /dev/zero | tr '\\0' x >&2; echo ' the end' >&2; exit 3")
    assert "xxx the end" in asyncio.run(connect(place.link(TARGET)))


def test_a_machine_accepts_the_key_once_it_has_a_container_engine(tmp_path: Path) -> None:
    """The server starts the agent at the first login, and the agent looks for an engine then."""
    root, log = tmp_path / "root", tmp_path / "log"
    (tmp_path / "bin").mkdir()
    for name in ("apt-get", "systemctl"):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\necho {name} $* $(/bin/ls {root}/.ssh 2>&1) >> {log}\n")
        path.chmod(0o700)
    (tmp_path / "bin" / "mkdir").symlink_to("/bin/mkdir")
    for engine in (True, False):
        script = make_key_script("ssh-ed25519 AAAA cavvy", engine=engine)
        script = script.replace("/root/", f"{root}/")
        environ = {"PATH": str(tmp_path / "bin")}
        subprocess.run(["/bin/sh", "-c", script], check=True, env=environ, timeout=60)
    key = "ssh-ed25519 AAAA cavvy\n"
    assert (root / ".ssh" / "authorized_keys").read_text() == key * 2
    lines = log.read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["apt-get", "apt-get", "systemctl"]
    assert all("authorized_keys" not in line for line in lines)
