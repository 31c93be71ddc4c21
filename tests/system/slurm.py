"""A real Slurm cluster on this machine: four nodes with eight pretended GPUs each, and a partition
that is preempted.

The daemons are Debian's. Every node is a slurmd of its own; the GPUs are copies of /dev/null, which
is enough for Slurm to hand them out. `python -m tests.system.slurm up FOLDER` leaves one running
for trying things out.
"""

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.system.packages import install_packages
from tests.system.ports import free_port
from tests.waits import PATIENCE_S, wait_until

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
NODES = ("gpu1", "gpu2", "gpu3", "gpu4")

_CONF = """
ClusterName=meadow
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu,shard
MpiDefault=none
SwitchType=switch/none
{accounting}
JobCompType=jobcomp/none
SlurmctldTimeout=30
SlurmdTimeout=10
GetEnvTimeout=0
MinJobAge={min_job_age}
InactiveLimit=0
KillWait=30
SchedulerParameters=sched_interval=1,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
NodeName=gpu1 {node} Port={port1} Gres=gpu:h100:8 Feature=r1
NodeName=gpu2 {node} Port={port2} Gres=gpu:h100:8 Feature=r2
NodeName=gpu3 {node} Port={port3} Gres=gpu:a100:8,shard:32 Feature=r1
NodeName=gpu4 {node} Port={port4} Gres=gpu:a100:8,shard:32 Feature=r2
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=spot Nodes=ALL MaxTime=2-00:00:00 State=UP PriorityTier=1 PreemptMode=REQUEUE
"""
_GRES = """
NodeName=gpu[1-2] Name=gpu Type=h100 File={folder}/dev/nvidia[0-7]
NodeName=gpu[3-4] Name=gpu Type=a100 File={folder}/dev/nvidia[0-7]
NodeName=gpu[3-4] Name=shard Count=32
"""


_DATABASE = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
DbdHost=localhost
DbdPort={dbd}
SlurmUser=root
PidFile={folder}/run/slurmdbd.pid
LogFile={folder}/log/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
"""
_NO_ACCOUNTING = "AccountingStorageType=accounting_storage/none"
_ACCOUNTING = """AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=localhost
AccountingStoragePort={dbd}
AccountingStoragePass={folder}/munge/socket
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
AccountingStoreFlags=job_comment"""


def why_no_accounting() -> str | None:
    """Why no cluster with accounting can be made here; as below."""
    if reason := why_not():
        return reason
    if not all(
        shutil.which(tool, path=_path()) for tool in ("slurmdbd", "mariadbd", "mariadb-install-db")
    ):
        return install_packages(["slurmdbd", "mariadb-server"]) or None
    return None


def why_not() -> str | None:
    """Why no cluster can be made here; installs Debian's packages where that is all that is
    missing.
    """
    if os.getuid() != 0:
        return "Slurm's daemons are started by root here: run the tests as root"
    if not all(
        shutil.which(tool, path=_path()) for tool in ("slurmctld", "slurmd", "sbatch", "munged")
    ):
        return install_packages(PACKAGES) or None
    return None


class Cluster:
    """One running cluster below a folder."""

    def __init__(self, folder: Path, *, min_job_age: int = 300, accounting: bool = False) -> None:
        self.folder = folder
        self.accounting = accounting
        self.min_job_age = min_job_age
        self.conf = folder / "slurm.conf"
        self.munge = folder / "munge"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def host(self) -> str:
        return socket.gethostname().split(".")[0]

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "PATH": _path(), "SLURM_CONF": str(self.conf)}

    def up(self) -> None:
        for name in ("state", "log", "run", "dev", "munge", *(f"spool/{node}" for node in NODES)):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(8):
            path = self.folder / "dev" / f"nvidia{number}"
            if not path.exists():
                os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        names = ("port", "port1", "port2", "port3", "port4", "dbd", "sql")
        ports = {name: free_port() for name in names}
        values = {
            "folder": self.folder,
            "host": self.host,
            "min_job_age": self.min_job_age,
        }
        values["node"] = (
            f"NodeHostname={values['host']} NodeAddr=127.0.0.1 CPUs=64 RealMemory=512000"
        )
        values["accounting"] = (
            _ACCOUNTING.format(folder=self.folder, **ports) if self.accounting else _NO_ACCOUNTING
        )
        self.conf.write_text(_CONF.format(**values, **ports))
        (self.folder / "gres.conf").write_text(_GRES.format(**values))
        # Jobs without their submitter's environment take it from here, never from a login of this
        # machine's user, which may be slow and which Slurm kills in the middle.
        cache = self.folder / "state" / "env_cache"
        cache.mkdir(exist_ok=True)
        (cache / "root").write_text(f"HOME={Path.home()}\nPATH={os.environ['PATH']}\n")
        self._start_munge()
        if self.accounting:
            self._start_accounting(ports)
        self.start("slurmctld")
        for node in NODES:
            self.start(node)
        self.until(
            lambda: (
                self.run("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False).split()
                == ["idle"] * 4
            )
        )

    def add(self, lines: str) -> None:
        """Add lines to slurm.conf, which slurmctld reads when it starts again."""
        (self.folder / "spool/burst-1").mkdir(exist_ok=True)
        with open(self.conf, "a") as file:
            file.write(lines)
        self.kill("slurmctld", signal.SIGTERM)
        self.start("slurmctld")
        self.until(lambda: self.run("sinfo", "-h", check=False))

    def down(self) -> None:
        for row in self.jobs():
            self.run("scancel", "--full", "-s", "KILL", row, check=False)
        for name in reversed(list(self._daemons)):
            self.kill(name)
        for pid in _processes(str(self.folder)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start(self, name: str) -> None:
        """Start slurmctld, or the slurmd of a node."""
        command = ["slurmctld", "-D"] if name == "slurmctld" else ["slurmd", "-D", "-N", name]
        self._spawn(name, command)

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        daemon = self._daemons.pop(name)
        daemon.send_signal(number)
        daemon.wait(PATIENCE_S)

    def kill_node(self, node: str) -> None:
        """The death of a node: its daemon and all of its jobs' processes, at once and without a
        word.
        """
        self.kill(node)
        parents = dict(_parents())
        doomed = set(_marked(f"SLURMD_NODENAME={node}"))
        doomed |= {
            parents[pid] for pid in doomed if pid in parents and _is_step_daemon(parents[pid])
        }
        while more := {pid for pid, parent in parents.items() if parent in doomed} - doomed:
            doomed |= more
        # All stop before the first dies, or an agent would see and report the death of its task.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in doomed:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def run(self, *command: str, stdin: str = "", check: bool = True) -> str:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            env=self.environ,
            timeout=PATIENCE_S,
            check=False,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def jobs(self, states: str = "all") -> Sequence[str]:
        """The ids of the jobs in these states."""
        return self.run("squeue", "-h", "-t", states, "-o", "%i", check=False).split()

    def job(self, job: str, field: str = "%T") -> str:
        return self.run("squeue", "-h", "-t", "all", "-j", job, "-o", field, check=False).strip()

    def until(self, true: Callable[[], object], seconds: float = PATIENCE_S) -> None:
        wait_until(true, lambda: f"jobs:\n{self.run('squeue', '-t', 'all', check=False)}", seconds)

    def _start_accounting(self, ports: dict[str, int]) -> None:
        """A database and slurmdbd, with this cluster and root's account in them."""
        data, socket_ = self.folder / "sql", self.folder / "run" / "sql.sock"
        subprocess.run(
            [
                "mariadb-install-db",
                "--no-defaults",
                "--user=root",
                f"--datadir={data}",
                "--skip-test-db",
            ],
            check=True,
            capture_output=True,
            env=self.environ,
        )
        listen = [f"--socket={socket_}", f"--port={ports['sql']}", "--bind-address=127.0.0.1"]
        self._spawn(
            "mariadbd", ["mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", *listen]
        )
        self.until(socket_.exists)
        grant = (
            "CREATE DATABASE slurm; GRANT ALL ON slurm.* TO slurm@'127.0.0.1' IDENTIFIED BY "
            "'slurm';"
        )
        grant += "GRANT ALL ON slurm.* TO slurm@localhost IDENTIFIED BY 'slurm';"
        self.run("mariadb", "--no-defaults", f"--socket={socket_}", "-e", grant)
        conf = self.folder / "slurmdbd.conf"
        conf.write_text(_DATABASE.format(folder=self.folder, **ports))
        conf.chmod(0o600)
        self._spawn("slurmdbd", ["slurmdbd", "-D"])
        manage = ("sacctmgr", "-i", "add")
        self.until(lambda: "meadow" in self.run(*manage, "cluster", "meadow", check=False))
        self.run(*manage, "account", "vision", "Cluster=meadow")
        self.run(*manage, "user", "root", "Account=vision", check=False)

    def _spawn(self, name: str, command: Sequence[str], as_user: Sequence[str] = ()) -> None:
        """Start a daemon that does not outlive us, even if we are killed."""
        command = ["setpriv", "--pdeathsig=KILL", *as_user, "--", *command]
        with open(self.folder / "log" / f"{name}.out", "ab") as log:
            self._daemons[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environ,
                start_new_session=True,
            )

    def _start_munge(self) -> None:
        key = self.munge / "key"
        key.write_bytes(os.urandom(128))
        shutil.chown(self.munge, "munge", "munge")
        shutil.chown(key, "munge", "munge")
        self.munge.chmod(0o755)
        key.chmod(0o400)
        path = self.folder
        while path != Path(
            "/"
        ):  # the daemon is not root, and pytest's folders are their user's only
            if not path.stat().st_mode & 0o001:
                path.chmod(path.stat().st_mode | 0o011)
            path = path.parent
        names = {
            "socket": "socket",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
            "key-file": "key",
        }
        options = [f"--{option}={self.munge}/{name}" for option, name in names.items()]
        user = ("--reuid=munge", "--regid=munge", "--clear-groups")
        self._spawn("munge", ["munged", "--foreground", "--force", *options], user)
        self.until((self.munge / "socket").exists)


@contextmanager
def cluster_at(
    folder: Path, *, min_job_age: int = 300, accounting: bool = False
) -> Iterator[Cluster]:
    """A cluster for the length of a block; nothing of it is left afterwards."""
    cluster = Cluster(folder, min_job_age=min_job_age, accounting=accounting)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


def _path() -> str:
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


def _processes(*words: str) -> list[int]:
    """The processes in whose command line all of the words stand."""
    return [pid for pid, text in _proc("cmdline") if all(word.encode() in text for word in words)]


def _marked(variable: str) -> list[int]:
    return [pid for pid, text in _proc("environ") if variable.encode() in text.split(b"\0")]


def _is_step_daemon(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"slurmstepd")
    return False


def _parents() -> Iterator[tuple[int, int]]:
    for pid, text in _proc("stat"):
        yield pid, int(text.rpartition(b")")[2].split()[1])


def _proc(file: str) -> Iterator[tuple[int, bytes]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with suppress(OSError):
                yield int(entry), Path(f"/proc/{entry}/{file}").read_bytes()


if __name__ == "__main__":
    made = Cluster(Path(sys.argv[2]))
    made.up()
    print(f"export SLURM_CONF={made.conf}")
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    made.down()
