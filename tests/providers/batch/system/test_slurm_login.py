"""A cluster whose login node is reached by SSH: a real sshd, a line that breaks, a login that is
refused.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.providers.batch.system.test_slurm_jobs import SMALL, check_gone
from tests.system.ports import free_port
from tests.system.slurm import Cluster, cluster_at, why_not
from tests.system.trust import User, user_at, wait_until

pytestmark = pytest.mark.system

_CONFIG = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
PidFile none
AuthorizedKeysFile {folder}/id.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
SetEnv SLURM_CONF={conf} PATH={path} SHLVL=2
"""  # from level 2 on, bash does not read the .bashrc of this machine's user for a command over SSH


class Login:
    """An sshd on the loopback interface, and how `ssh` gets in."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        folder.mkdir()
        for name in ("host", "id", "stranger"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)],
                check=True,
            )
        port = free_port()
        config = _CONFIG.format(
            port=port, folder=folder, conf=cluster.conf, path=cluster.environ["PATH"]
        )
        (folder / "sshd_config").write_text(config)
        known = f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}"
        (folder / "known").write_text(known)
        self._folder, self._port = folder, port
        Path("/run/sshd").mkdir(exist_ok=True)
        with open(folder / "log", "ab") as log:
            command = ["/usr/sbin/sshd", "-D", "-e", "-f", str(folder / "sshd_config")]
            self.daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log)
        wait_until(lambda: "listening" in (folder / "log").read_text())

    def options(self, key: str = "id") -> str:
        known = (
            f"-o UserKnownHostsFile={self._folder}/known -o StrictHostKeyChecking=yes -o "
            "IdentitiesOnly=yes"
        )
        return f"-F none -p {self._port} -i {self._folder}/{key} {known}"

    def sessions(self) -> list[int]:
        """The processes of sshd that serve a login."""
        found = subprocess.run(
            ["pgrep", "-P", str(self.daemon.pid)], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in found.stdout.split()]

    def close(self) -> None:
        for pid in self.sessions():
            os.kill(pid, signal.SIGKILL)
        self.daemon.kill()
        self.daemon.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    if not (shutil.which("ssh") and Path("/usr/sbin/sshd").exists()):
        pytest.skip("neither ssh nor sshd is installed here")
    with cluster_at(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def login(cluster: Cluster, tmp_path: Path) -> Iterator[Login]:
    made = Login(tmp_path / "login", cluster)
    yield made
    made.close()


@pytest.fixture
def user(cluster: Cluster, login: Login, tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
        _configure(user, login.options())
        yield user
    cluster.run(
        "scancel", "--user=root", check=False
    )  # only now is no server left to launch them again
    cluster.until(lambda: not cluster.jobs("PD,R,CG"))


def _configure(user: User, options: str) -> None:
    settings = (
        f'host = "root@127.0.0.1"\nssh_options = "{options}"\nfolder = "{user.root}/shared"\n'
    )
    user.settings(f"[providers.local]\nenabled = false\n[providers.slurm]\n{settings}")


def test_a_job_runs_over_ssh_and_outlives_a_broken_line(
    user: User, cluster: Cluster, login: Login
) -> None:
    (user.work / "data.txt").write_text("from the folder\n")
    run = f"cat data.txt; while [ ! -e {user.root}/go ]; do sleep 0.05; done; echo ends"
    name = "far"
    user.cli("run", "-d", user.task(f"name: {name}\nworkdir: .\n{SMALL}\nrun: '{run}'"))
    wait_until(lambda: user.said(name) == "from the folder\n")
    before = login.sessions()
    assert len(before) == 1
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: login.sessions() not in ([], before))
    (user.root / "go").touch()
    job = user.ended(name)
    assert (job.phase, job.attempt, user.log(name)) == ("done", 1, "from the folder\nends\n")
    assert "login node" in user.cli("check", "slurm")
    check_gone(user, cluster)


def test_a_login_that_is_refused_says_so(user: User, login: Login) -> None:
    _configure(user, login.options("stranger"))
    told = user.cli("check", "slurm", code=None)
    assert "Permission denied" in told
