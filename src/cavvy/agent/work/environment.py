"""Builds the environment of the work: base variables, the user's variables, Cavvy's
variables and, on the server's machine, the Python of the shell that submitted the job."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys

from ..config import AgentConfig
from ..disk import write_whole
from ..documents import WorkConfig
from ..tunnel import tunnel_variables
from .python_start import LAUNCHER

# A login shell's variables, and those needed to reach the network from this node. The agent's other
# variables are left out, because they may contain the credentials of a server that has started the
# agent.
BASE = {
    "HOME",
    "LANG",
    "LANGUAGE",
    "LD_LIBRARY_PATH",
    "LOGNAME",
    "PATH",
    "SHELL",
    "TERM",
    "TMPDIR",
    "TZ",
    "USER",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "XDG_RUNTIME_DIR",
    # the folder of a gang that is a job of Slurm, for a batch script that runs as in Slurm
    "CAVVY_BATCH",
    "all_proxy",
    "ftp_proxy",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "ALL_PROXY",
    "FTP_PROXY",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
}
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# maximum bytes of a socket's folder: tmux appends /tmux-UID/NAME, and a socket's path has at most
# 107 bytes
LONGEST_HOME = 80
DEVICE_VARIABLES = {
    "nvidia": "CUDA_VISIBLE_DEVICES",
    "amd": "ROCR_VISIBLE_DEVICES",
    "intel": "ZE_AFFINITY_MASK",
    "google": "TPU_VISIBLE_CHIPS",
}


# the variables of Open MPI 5 and 4; they apply to all nodes of a job
MPI_FOLDERS = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")
REJOINS = "CAVVY_REJOINS"  # tells programs that this agent can keep them
FORKS = "CAVVY_FORK_RANKS"  # with 1 in the task's `env`, launchers of PyTorch can be kept, too
# blanks, in whose place a rank that was forked shows its variables (`torchrun.py`)
ROOM, ROOM_SIZE = "CAVVY_RANK_ROOM", 400
MPS = "/tmp/nvidia-mps"  # the default folder of the control daemon's pipes
SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh")
# After SIGTERM, the shell waits for the command that runs, which may save, and then exits with its
# exit code: what follows must not take for complete what was interrupted.
SHELL_LINE = "trap 'exit $?' TERM; . \"$0\""
# a file that marks an environment -> the variable that names the environment's folder
MARKS = {"pyvenv.cfg": "VIRTUAL_ENV", "conda-meta": "CONDA_PREFIX"}


def make_environment(config: AgentConfig, work: WorkConfig, socket: str = "") -> dict[str, str]:
    """Return all variables of the work. The user's variables override the base; Cavvy's variables
    override the user's variables.

    `socket` is the path of the agent's socket for the task, or "" without a socket.
    """
    env = base_environment(every=config.boxed)
    if _has_shell(config, work):
        # Where namespaces protect Cavvy's packages, the work may use its environment.
        use_shell(env, work.path, "" if config.covers else own_environment())
    if len(config.home) < LONGEST_HOME:
        env["TMUX_TMPDIR"] = (
            config.home
        )  # gives the work its own tmux server, which is killed when the attempt ends
    if config.fresh_cache and not config.covers and work.image is None:
        # The caches in the home folder may hold what the work of another project left there.
        env["XDG_CACHE_HOME"] = config.cache + "/xdg"
    if work.image is None:
        # Open MPI names its folder in /tmp after the process ID of mpirun, which is the same in the
        # process namespaces of several jobs: the second mpirun would fail.
        digest = hashlib.sha256(config.gang.encode()).hexdigest()[:12]
        env.update(dict.fromkeys(MPI_FOLDERS, f"/tmp/cavvy-mpi-{digest}"))
    env.update(work.env)
    env.update(work.secrets)
    for name, value in work.params.items():
        env["CAVVY_PARAM_" + re.sub(r"\W", "_", name).upper()] = value
    env.update(_identity(config, work))
    env.update(_rank(config, work))
    env.update(device_variables(config, contained=work.image is not None))
    if socket:
        env["CAVVY_NOTICE"] = socket
    return env


def add_python(config: AgentConfig, work: WorkConfig) -> None:
    """Add the Python of the submitting shell to the key of the setup, whose virtual environment
    uses this Python."""
    if work.setup_key and _has_shell(config, work):
        python = os.path.realpath(find_python(make_environment(config, work)["PATH"]))
        digest = hashlib.sha256(python.encode("utf-8", "surrogateescape")).hexdigest()
        work.setup_key = f"{work.setup_key}-{digest[:12]}"


def _has_shell(config: AgentConfig, work: WorkConfig) -> bool:
    """Return whether the work uses the Python of the submitting shell. Separated work does not see
    the user's folders."""
    return bool(work.path) and not work.image and not config.separates


def find_shell() -> str:
    """Return the shell that runs the task's commands: bash if the node has it, else sh."""
    return next(path for path in SHELLS if os.path.exists(path))


def base_environment(*, every: bool = False) -> dict[str, str]:
    """Return the variables of a login shell. With `every`, return all variables of the node's
    image."""
    env = {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8", "TERM": "dumb", "PYTHONUNBUFFERED": "1"}
    for name, value in os.environ.items():
        if name in BASE or name.startswith("LC_") or every:
            env[name] = value
    if "HOME" not in env:
        env["HOME"] = os.path.expanduser("~")
    return env


def device_variables(config: AgentConfig, *, contained: bool = False) -> dict[str, str]:
    """Return variables that restrict the work to its assigned accelerators, or {} if the work has
    the whole node. `contained` work runs in a container, where it cannot reach the sockets of
    NVIDIA's Multi-Process Service; neither can separated work, which does not see /tmp.
    """
    if config.devices is None:
        return {}
    if not config.devices:
        return {"CUDA_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
    if config.device_part < 1:
        pipes = "" if contained or config.separates else find_mps()
        variables = {"CUDA_VISIBLE_DEVICES": config.devices[0], **share_variables(config, pipes)}
        if config.devices[0].isdigit():  # a batch system's number of the GPU
            variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        return variables
    instance = config.devices[0].startswith("MIG-")  # CUDA knows MIG instances by UUID only
    if instance or (config.separates and config.vendor == "nvidia"):
        return {"CUDA_VISIBLE_DEVICES": ",".join(config.devices)}  # other GPUs have no indices
    ids = [str(index) for index in config.device_indices] or config.devices
    variables = {DEVICE_VARIABLES.get(config.vendor, "CUDA_VISIBLE_DEVICES"): ",".join(ids)}
    if config.vendor in ("nvidia", ""):
        # make CUDA number the GPUs in the same order as these indices
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    return variables


def share_variables(config: AgentConfig, pipes: str) -> dict[str, str]:
    """Return the variables of work that has a part of a GPU. `pipes` is the folder of the
    Multi-Process Service (MPS), which then limits the work's threads and memory. Without MPS (""),
    the driver gives the processes on the GPU slices of time.
    """
    variables = {"CAVVY_GPU_SHARE": f"{config.device_part:g}"}
    if config.device_memory_mib:  # 0 on clusters whose GPUs have an unknown memory
        variables["CAVVY_GPU_MEMORY_MIB"] = str(config.device_memory_mib)
    if pipes:
        variables["CUDA_MPS_PIPE_DIRECTORY"] = pipes
        percentage = max(1, round(100 * config.device_part))
        variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(percentage)
        if config.device_memory_mib:
            variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={config.device_memory_mib}M"
    return variables


def find_mps() -> str:
    """Return the folder of the pipes of MPS if its control daemon runs, or "". The daemon writes
    its process ID there (NVIDIA's documentation of MPS, nvidia-cuda-mps-control)."""
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", MPS)
    try:
        with open(f"{pipes}/nvidia-cuda-mps-control.pid") as file:
            pid = file.read().strip()
    except (OSError, ValueError):
        return ""
    return pipes if pid.isdigit() and os.path.isdir(f"/proc/{pid}") else ""


def _identity(config: AgentConfig, work: WorkConfig) -> dict[str, str]:
    env = {
        "CAVVY_JOB": work.job,
        "CAVVY_JOB_ID": work.job_id,
        "CAVVY_PROJECT": work.project,
        "CAVVY_ATTEMPT": str(work.attempt),
        "CAVVY_GANG": config.gang,
        "CAVVY_RANK": str(config.rank),
        "CAVVY_NOTICE_FILE": config.notice_file,
        "CAVVY_ADVICE_FILE": config.advice_file,
        "CAVVY_PROGRESS_FILE": config.progress_file,
    }
    if work.checkpoint is not None:
        env["CAVVY_CHECKPOINT_DIR"] = os.path.join(config.folder, work.checkpoint.path)
        env["CAVVY_CHECKPOINT_EVERY_FILE"] = config.every_file
        if work.checkpoint.every_s is not None:
            env["CAVVY_CHECKPOINT_EVERY_S"] = json.dumps(work.checkpoint.every_s)
    return env


def _rank(config: AgentConfig, work: WorkConfig) -> dict[str, str]:
    """Return the gang's environment variables, which torchrun and similar launchers need."""
    return {
        "MASTER_ADDR": work.addresses[0],
        "MASTER_PORT": str(work.master_port),
        "NODE_RANK": str(config.rank),
        "NNODES": str(work.nodes),
        "NPROC_PER_NODE": str(work.accelerators_per_node or 1),
        "CAVVY_HOSTS": ",".join(work.addresses),
        "CAVVY_HOSTFILE": config.host_file,
        "CAVVY_MPI": f"{sys.executable if work.image is None else 'python3'} {config.mpi_program}",
        "CAVVY_MPI_KEY": work.gang_key,
        **(tunnel_variables(config) if work.tunnel is not None else {}),
    }


def may_keep(work: WorkConfig) -> bool:
    """Return whether a program of this work is kept if it asks for it (`kept_program.py`)."""
    checkpoint = work.checkpoint
    return (
        work.repair_s > 0
        and work.env.get(REJOINS) != "0"
        and work.image is None
        and checkpoint is not None
        and (checkpoint.storage is not None or not checkpoint.sync)
        and not (work.tunnel or work.ports or work.streams or work.mounted or work.mirrored)
    )


def forks_ranks(work: WorkConfig) -> bool:
    """Return whether the ranks of PyTorch's launchers are forked, so that these can be kept."""
    return may_keep(work) and work.env.get(FORKS) == "1"


def add_keeping(config: AgentConfig, work: WorkConfig, env: dict[str, str]) -> None:
    """Let the programs of the work be kept, if this is possible, and PyTorch's launchers, if the
    task asks for it."""
    env.pop(REJOINS, None)  # what the task says about it: a program would wait in vain
    if may_keep(work):
        env[REJOINS] = "1"
    if forks_ranks(work):
        _add_launchers(config, env)


def _add_launchers(config: AgentConfig, env: dict[str, str]) -> None:
    env[ROOM] = " " * ROOM_SIZE
    env["PYTHONPATH"] = ":".join(filter(None, (config.launchers_folder, env.get("PYTHONPATH"))))


def write_rank_files(config: AgentConfig, work: WorkConfig, env: dict[str, str]) -> None:
    """Write the files whose paths are in the gang's variables: the list of hosts (lines `address
    slots=N`), the program that starts MPI on these hosts, and what starts ranks for PyTorch, with
    digests of the variables that the work starts with.
    """
    slots = work.accelerators_per_node or 1
    write_whole(
        config.host_file, "".join(f"{address} slots={slots}\n" for address in work.addresses)
    )
    if forks_ranks(work):
        from .torchrun import GIVEN, digest_of

        os.makedirs(config.launchers_folder, exist_ok=True)
        _write_program("python_start.py", f"{config.launchers_folder}/sitecustomize.py")
        _write_program("torchrun.py", f"{config.launchers_folder}/{LAUNCHER}.py")
        given = {name: digest_of(value) for name, value in env.items()}
        write_whole(f"{config.launchers_folder}/{GIVEN}", json.dumps(given))
    if work.nodes > 1:
        _write_program("mpi.py", config.mpi_program)


def _write_program(name: str, path: str) -> None:
    import pkgutil

    source = pkgutil.get_data(__package__ or "", name)
    write_whole(path, (source or b"").decode())


def use_shell(env: dict[str, str], path: str, hidden: str = "") -> None:
    """Put the folders of the submitting shell's PATH before the PATH in `env`, and set the variable
    of its virtual or conda environment. The environment in the folder `hidden` is left out.
    """
    folders = [each for each in path.split(":") if os.path.isabs(each) and os.path.isdir(each)]
    folders += env["PATH"].split(":")
    env["PATH"] = ":".join(
        each for each in dict.fromkeys(folders) if not hidden or not _is_of(each, hidden)
    )
    python = find_python(env["PATH"])
    root = os.path.dirname(os.path.dirname(python))
    for mark, variable in MARKS.items():
        if python and os.path.exists(f"{root}/{mark}"):
            env[variable] = root


def find_python(path: str) -> str:
    """Return the full path of the Python on this PATH, or "" if there is none."""
    found = shutil.which("python3", path=path) or shutil.which("python", path=path)
    return os.path.abspath(found) if found else ""


def own_environment() -> str:
    """Return the folder of the virtual or conda environment in which this agent is installed, or ""
    if the agent is not installed in an environment."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(sys.executable)))
    return root if any(os.path.exists(f"{root}/{mark}") for mark in MARKS) else ""


def _is_of(folder: str, environment: str) -> bool:
    """Return whether a folder of PATH has the programs of this environment. The folder with the
    command `conda` does not count."""
    if os.path.basename(folder) == "condabin":
        return False
    return os.path.dirname(os.path.realpath(folder)) == os.path.realpath(environment)
