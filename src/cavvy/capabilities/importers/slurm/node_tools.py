"""The programs of Slurm that a batch script calls, for nodes without Slurm: `srun`, `scontrol`,
`scancel`, `module` and others; and those of PBS: `pbsdsh`, `qstat` and others.

The file runs on the node without the rest of Cavvy, on Python 3.8 or later. `batch` runs the
script on the first node, as Slurm does, with the variables of sbatch; the other nodes wait for the
tasks of its steps, which reach them through `$CAVVY_MPI`. Names and defaults are those of
https://slurm.schedmd.com/srun.html and https://slurm.schedmd.com/sbatch.html.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

AGAIN = 75  # EX_TEMPFAIL: "run me again"
KILL_WAIT_S = 30  # Slurm's default KillWait
TIMED_OUT = 128 + signal.SIGTERM
LOOK_S = 0.2
FOLDER = "CAVVY_SLURM"  # the variable with the folder of these programs on a node
BATCH = "CAVVY_BATCH"  # the variable with the folder of a job of a real Slurm
WORK = "CAVVY_SLURM_WORK"  # the variable with the working folder on a node
PLAN = "CAVVY_SLURM_PLAN"  # the variable with what the script's options say
COMMANDS = {
    "slurm": ("srun", "scontrol", "scancel", "module", "ml", "sbatch", "squeue", "sacct", "sinfo"),
    "pbs": ("pbsdsh", "module", "ml", "qsub", "qstat", "qdel", "qalter", "qhold", "pbsnodes"),
}


def main(words: list[str]) -> int:
    name, rest = words[0], words[1:]
    if name == "batch":
        return run_batch(rest)
    if name == "task":
        return run_tasks(json.loads(base64.b64decode(rest[0])))
    if name == "kill":
        signal_step(rest[0], int(rest[1]))
        return 0
    if name == "srun":
        return run_step(rest)
    if name == "scontrol":
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as with `scontrol show hostnames | head -1`
        return control(rest)
    if name == "scancel":
        return cancel(rest)
    if name == "sbatch":
        return submit(rest)
    if name == "pbsdsh":
        return run_everywhere(rest)
    if name in ("squeue", "sacct"):
        import queries  # type: ignore[import-not-found,unused-ignore]  # `node_queries`

        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        return int(queries.show_queue(rest) if name == "squeue" else queries.show_accounts(rest))
    if name == "qdel" and [each.partition(".")[0] for each in rest] == [own_number()]:
        return end_job()
    if name in ("module", "ml"):
        tell(f"{name} {' '.join(rest)}: this node has no environment modules; nothing was loaded")
        return 0
    tell(f"{name}: a job cannot do this without a cluster; `cavvy` does it on your machine")
    return 1


def tell(text: str) -> None:
    with suppress(OSError):  # what was printed before stands before it in a common file
        sys.stdout.flush()
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


# What sbatch does


def run_batch(words: list[str]) -> int:
    """Run the script `words[0]` on the first node; the others serve its steps until it ends."""
    plan = json.loads(os.environ[PLAN])
    folder = os.environ[FOLDER]
    system = plan.get("system", "slurm")
    if system == "slurm" and has_cluster():
        return run_in_cluster(plan, words)
    lay_commands(folder, COMMANDS[system])
    os.environ["NPROC_PER_NODE"] = str(plan["tasks_per_node"])
    nodes = int(os.environ.get("NNODES", "1"))
    if plan["signal"]:
        signal.signal(signal.SIGTERM, lambda *_: None)
    if nodes > 1 and os.environ.get("CAVVY_SLURM_LEADS") != "1":
        # `$CAVVY_MPI` runs its command on the first node, when the others are connected
        os.environ["CAVVY_SLURM_LEADS"] = "1"
        command = [*shlex.split(os.environ["CAVVY_MPI"]), sys.executable, __file__, "batch", *words]
        if os.environ["NODE_RANK"] == "0" and not plan["signal"]:
            os.execv(command[0], command)
        return exit_code(subprocess.call(command))
    with open(os.path.join(folder, "steps.json"), "w", encoding="utf-8") as file:
        json.dump({"next": 0, "steps": {}}, file)
    found = make_pbs_variables(plan, nodes) if system == "pbs" else make_variables(plan, nodes)
    env = {**os.environ, **found}
    if "sbatch" in plan:
        with open(os.path.join(folder, "environment.json"), "w", encoding="utf-8") as file:
            json.dump(env, file)
    return ScriptRun(plan, env).run(words)


def has_cluster() -> bool:
    """Return whether the node is one of a Slurm cluster that has given its nodes to this job."""
    place = os.environ.get(BATCH, "")
    has_job = bool(place) and os.path.exists(os.path.join(place, "batch.env"))
    return has_job and shutil.which("srun") is not None


def run_in_cluster(plan: dict[str, Any], words: list[str]) -> int:
    """Run the script as Slurm's own batch job does: on the first node, with the variables of the
    job of Slurm, and its programs. The others wait until the script has ended.
    """
    place = os.environ[BATCH]
    ended = os.path.join(place, "script-ended")
    if os.environ.get("NODE_RANK", "0") != "0":
        while not os.path.exists(ended):
            time.sleep(LOOK_S)
        return 0
    env = {**os.environ, **read_batch_variables(os.path.join(place, "batch.env"))}
    env["SLURM_SUBMIT_DIR"] = os.getcwd()  # of the script, and not of the agents
    env["SLURM_JOB_NAME"] = plan["name"]
    if "CAVVY_ARRAY_INDEX" in env:
        env.update({name: str(each) for name, each in _list_array_variables(plan).items()})
    os.environ.update(env)  # for the programs that signal steps
    try:
        return ScriptRun(plan, env).run(words)
    finally:
        with open(ended, "w", encoding="utf-8"):
            pass


def read_batch_variables(path: str) -> dict[str, str]:
    """Return the variables of a file that `export -p` of a shell has written."""
    found = {}
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            with suppress(ValueError):
                words = shlex.split(line)
                name, given, value = words[-1].partition("=")
                if given:
                    found[name] = value
    return found


def list_cluster_steps() -> list[str]:
    """Return the steps of the script in a Slurm cluster: all but that of the agents, the first."""
    job = os.environ["SLURM_JOB_ID"]
    command = ["squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    steps = done.stdout.decode().split()
    return [each for each in steps if each.partition(".")[2].isdigit() and each != f"{job}.0"]


class ScriptRun:
    """Runs the script, copies its output into its files, and passes signals on."""

    def __init__(self, plan: dict[str, Any], env: dict[str, str]) -> None:
        self._plan, self._env = plan, env
        self._process: subprocess.Popen[bytes] | None = None
        self._asked = False
        self._is_late = False
        self._began = 0.0

    def run(self, words: list[str]) -> int:
        if self._plan["signal"]:
            signal.signal(signal.SIGTERM, self._warn)
        names = [self._plan["output"], self._plan["error"]]
        streams: list[Any] = [None, None]
        if names[0] or names[1]:
            streams[0] = subprocess.PIPE
            streams[1] = subprocess.PIPE if names[1] else subprocess.STDOUT
        with open(words[0], encoding="utf-8", errors="surrogateescape") as file:
            first = file.readline()
        interpreter = first[2:].split() if first.startswith("#!") else ["/bin/sh"]
        try:
            self._process = subprocess.Popen(
                [*interpreter, *words],
                env=self._env,
                stdout=streams[0],
                stderr=streams[1],
                stdin=subprocess.DEVNULL,
                cwd=self._plan["folder"] or None,
                start_new_session=True,
            )
        except OSError as error:
            tell(f"{' '.join(interpreter)}: {error.strerror}")
            return 127
        copies = [
            threading.Thread(target=self._copy, args=(source, target, name, kind), daemon=True)
            for source, target, name, kind in (
                (self._process.stdout, sys.stdout.buffer, names[0], "OU"),
                (self._process.stderr, sys.stderr.buffer, names[1], "ER"),
            )
            if source is not None
        ]
        for copy in copies:
            copy.start()
        with open(os.path.join(self._env[FOLDER], "script"), "w", encoding="utf-8") as file:
            file.write(str(self._process.pid))
        self._began = time.monotonic()
        code = self._wait(self._process)
        for copy in copies:
            copy.join(5)
        if self._is_requeued():
            return AGAIN
        # for Slurm, work that its time has ended is not complete, even if its script answers 0
        is_ended = self._is_late or self._is_asked("cancel")
        return exit_code(code) or (TIMED_OUT if is_ended else 0)

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        killed_at = None
        limit, warning = self._plan["time_s"], self._plan["signal"]
        while True:
            try:
                return process.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                pass
            ran = time.monotonic() - self._began
            if warning and limit and ran > limit - warning["seconds"]:
                self._warn()
            late = bool(limit and ran > limit)
            cancelled = killed_at is None and self._is_asked("cancel")
            if killed_at is None and (late or cancelled or self._is_requeued()):
                if late:
                    self._is_late = True
                    self._tell_late(limit)
                elif cancelled:
                    tell("slurmstepd: error: *** JOB CANCELLED by its own script ***")
                killed_at = time.monotonic()
                # the script first: it must not go on with what comes after a step that has ended
                signal_group(process.pid, signal.SIGTERM)
                signal_all_steps(signal.SIGTERM)
            if killed_at is not None and time.monotonic() > killed_at + KILL_WAIT_S:
                signal_group(process.pid, signal.SIGKILL)

    def _tell_late(self, limit: int) -> None:
        if "PBS_JOBID" in self._env:
            tell(f"=>> PBS: job killed: walltime {limit + 1} exceeded limit {limit}")
            return
        number = self._env["SLURM_JOB_ID"]
        tell(f"slurmstepd: error: *** JOB {number} CANCELLED DUE TO TIME LIMIT ***")

    def _warn(self, *_: object) -> None:
        """Send the signal that `--signal` names to what it names, once."""
        if self._asked or self._process is None:
            return
        self._asked = True
        number = self._plan["signal"]["number"]
        if self._plan["signal"]["batch"]:
            self._process.send_signal(number)
        else:
            threading.Thread(target=signal_all_steps, args=(number,), daemon=True).start()

    def _is_requeued(self) -> bool:
        return self._is_asked("requeue")

    def _is_asked(self, name: str) -> bool:
        """Return whether a program of the job has asked for something by this file."""
        return os.path.exists(os.path.join(self._env[FOLDER], name))

    def _copy(self, source: BinaryIO, target: BinaryIO, name: str, kind: str) -> None:
        path = os.devnull
        if name:
            pbs = "PBS_JOBID" in self._env
            path = fill_pbs(name, self._env, kind) if pbs else fill(name, self._env)
        try:
            if os.path.dirname(path):
                os.makedirs(os.path.dirname(path), exist_ok=True)
            file = open(path, "ab" if self._plan["append"] else "wb", buffering=0)  # noqa: SIM115
        except OSError as error:  # such as a folder of the cluster: the log has the output
            tell(f"{path}: {error.strerror}: the output is in the log only")
            file = open(os.devnull, "wb", buffering=0)  # noqa: SIM115
        with file:
            for data in iter(lambda: source.read1(65536), b""):  # type: ignore[attr-defined]
                file.write(data)
                target.write(data)
                target.flush()


def signal_group(group: int, number: int) -> None:
    """Signal all processes that a script has started."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def lay_commands(folder: str, names: tuple[str, ...]) -> None:
    """Put programs of a batch system on PATH."""
    place = os.path.join(folder, "bin")
    os.makedirs(place, exist_ok=True)
    for name in names:
        # The program's name stands in its command line, by which the agent knows a launcher.
        program, command = os.path.join(folder, name), os.path.join(place, name)
        with open(program, "w", encoding="utf-8") as file:
            file.write(f"import sys, tools\nsys.exit(tools.main([{name!r}, *sys.argv[1:]]))\n")
        with open(command, "w", encoding="utf-8") as file:
            words = shlex.join([sys.executable, program])
            file.write(f'#!/bin/sh\nexec {words} "$@"\n')
        os.chmod(command, 0o755)
    os.environ["PATH"] = place + os.pathsep + os.environ.get("PATH", os.defpath)


def make_variables(plan: dict[str, Any], nodes: int) -> dict[str, str]:
    """Return the variables that sbatch sets:
    https://slurm.schedmd.com/sbatch.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    """
    env = os.environ
    number = str(zlib.crc32(env.get("CAVVY_JOB_ID", "job").encode()) % 90_000_000 + 10_000_000)
    tasks = plan["ntasks"]
    if plan.get("tasks_follow"):  # the job may have more nodes than the least that was asked for
        tasks = (plan["per_node"] or 1) * nodes
    per_node = share_out(tasks, nodes, plan["per_node"])
    cpus = plan["cpus_per_node"] or plan["tasks_per_node"]
    if plan["exclusive"]:
        cpus = max(cpus, os.cpu_count() or 1)
    hosts = env.get("CAVVY_HOSTS") or "localhost"
    now = int(time.time())
    values: dict[str, Any] = {
        "SLURM_JOB_ID": number,
        "SLURM_JOBID": number,
        "SLURM_JOB_NAME": plan["name"],
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_NODELIST": hosts,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NNODES": nodes,
        "SLURM_NTASKS": tasks,
        "SLURM_NPROCS": tasks,
        "SLURM_TASKS_PER_NODE": shorten(per_node),
        "SLURM_CPUS_ON_NODE": cpus,
        "SLURM_JOB_CPUS_PER_NODE": shorten([cpus] * nodes),
        "SLURM_SUBMIT_DIR": os.getcwd(),
        "SLURM_SUBMIT_HOST": "localhost",
        "SLURM_CLUSTER_NAME": "cavvy",
        "SLURM_JOB_PARTITION": plan["partition"],
        "SLURM_JOB_USER": env.get("USER", ""),
        "SLURM_JOB_START_TIME": now,
        "SLURM_NODEID": 0,
        "SLURM_PROCID": 0,
        "SLURM_LOCALID": 0,
        "SLURM_GTIDS": 0,
        "SLURM_TASK_PID": os.getpid(),
        "SLURMD_NODENAME": hosts.split(",")[0],
        "SLURM_JOB_UID": os.getuid(),
        "SLURM_JOB_GID": os.getgid(),
        "SLURM_PRIO_PROCESS": 0,
    }
    values.update(_list_stated_variables(plan))
    values["SLURM_TMPDIR"] = make_own_folder()
    if plan["time_s"]:
        values["SLURM_JOB_END_TIME"] = now + plan["time_s"]
    if int(env.get("CAVVY_ATTEMPT", "1")) > 1:
        values["SLURM_RESTART_COUNT"] = int(env["CAVVY_ATTEMPT"]) - 1
    if "CAVVY_ARRAY_INDEX" in env:
        values.update(_list_array_variables(plan))
    return {name: str(value) for name, value in values.items()}


def _list_stated_variables(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the variables that sbatch sets only if the script states what they say."""
    stated = {
        "SLURM_JOB_ACCOUNT": plan["account"],
        "SLURM_NTASKS_PER_NODE": plan["per_node"],
        "SLURM_CPUS_PER_TASK": plan["cpus_per_task"],
        "SLURM_MEM_PER_NODE": plan["memory_mib"],
    }
    if plan["gpus"]:
        devices = ",".join(list_devices(plan["gpus"]))
        stated["SLURM_GPUS_ON_NODE"] = plan["gpus"]
        stated["SLURM_JOB_GPUS"] = stated["SLURM_STEP_GPUS"] = devices
        stated["SLURM_GPUS_PER_TASK"] = plan["gpus_per_task"]
    found = {name: value for name, value in stated.items() if value}
    return {**found, **plan.get("set", {})}


def make_own_folder() -> str:
    """Return a folder on this node that is removed after the job, as many clusters have one."""
    path = os.path.join(os.environ[FOLDER], "tmp")
    os.makedirs(path, exist_ok=True)
    return path


def _list_array_variables(plan: dict[str, Any]) -> dict[str, Any]:
    array = zlib.crc32(os.environ.get("CAVVY_ARRAY_JOB", plan["name"]).encode())
    indices = plan["array"]
    return {
        # which the server has set for an array that another job has submitted
        "SLURM_ARRAY_JOB_ID": os.environ.get("SLURM_ARRAY_JOB_ID", array % 90_000_000 + 10_000_000),
        "SLURM_ARRAY_TASK_ID": os.environ["CAVVY_ARRAY_INDEX"],
        "SLURM_ARRAY_TASK_COUNT": indices["count"],
        "SLURM_ARRAY_TASK_MIN": indices["least"],
        "SLURM_ARRAY_TASK_MAX": indices["most"],
        "SLURM_ARRAY_TASK_STEP": indices["step"],
    }


def make_pbs_variables(plan: dict[str, Any], nodes: int) -> dict[str, str]:
    """Return the variables that PBS Professional, OpenPBS and Torque set, and write the file with
    the names of the nodes, in which each name stands once for each process.
    """
    env = os.environ
    number = zlib.crc32(env.get("CAVVY_JOB_ID", "job").encode()) % 90_000_000 + 10_000_000
    hosts = (env.get("CAVVY_HOSTS") or "localhost").split(",")
    file = os.path.join(env[FOLDER], "nodefile")
    with open(file, "w", encoding="utf-8") as lines:
        lines.write("".join(f"{host}\n" * plan["per_node"] for host in hosts))
    cpus, threads = plan["cpus_per_node"], plan["threads"]
    values: dict[str, Any] = {
        "PBS_ENVIRONMENT": "PBS_BATCH",
        "PBS_JOBID": f"{number}.cavvy",
        "PBS_JOBNAME": plan["name"],
        "PBS_NODEFILE": file,
        "PBS_QUEUE": "cavvy",
        "PBS_SERVER": "cavvy",
        "PBS_O_WORKDIR": os.getcwd(),
        "PBS_O_HOST": "localhost",
        "PBS_O_QUEUE": "cavvy",
        "PBS_O_HOME": env.get("HOME", "/"),
        "PBS_O_LOGNAME": env.get("USER", ""),
        "PBS_O_PATH": env.get("PATH", os.defpath),
        "PBS_O_SHELL": env.get("SHELL", "/bin/sh"),
        "PBS_O_SYSTEM": os.uname().sysname,
        "PBS_JOBDIR": os.getcwd(),
        "PBS_NODENUM": 0,
        "PBS_TASKNUM": 1,
        "PBS_NUM_NODES": nodes,
        "PBS_NUM_PPN": plan["per_node"],
        "PBS_NP": plan["ntasks"],
        "NCPUS": threads,
        "PBS_NCPUS": cpus * nodes,  # of the National Computational Infrastructure
        "PBS_NGPUS": plan["gpus"] * nodes,
        "PBS_JOBFS": make_own_folder(),
        "OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", threads),
        # an Open MPI that was built for PBS would look for its daemons
        "OMPI_MCA_plm": "rsh",
        "OMPI_MCA_ras": "^tm",
    }
    if plan["time_s"]:
        values["PBS_WALLTIME"] = plan["time_s"]
    if plan["gpus"]:
        values["PBS_GPUFILE"] = _write_gpu_file(hosts, plan["gpus"])
    if "CAVVY_ARRAY_INDEX" in env:
        values.update(_list_pbs_array_variables(plan))
    return {name: str(value) for name, value in values.items()}


def _write_gpu_file(hosts: list[str], count: int) -> str:
    """Write Torque's file with a line such as HOST-gpu0 for each GPU. Return its path."""
    path = os.path.join(os.environ[FOLDER], "gpufile")
    devices = list_devices(count)
    with open(path, "w", encoding="utf-8") as lines:
        lines.writelines(f"{host}-gpu{each}\n" for host in hosts for each in devices)
    return path


def _list_pbs_array_variables(plan: dict[str, Any]) -> dict[str, Any]:
    array = zlib.crc32(os.environ.get("CAVVY_ARRAY_JOB", plan["name"]).encode())
    index = os.environ["CAVVY_ARRAY_INDEX"]
    whole = array % 90_000_000 + 10_000_000
    return {
        "PBS_JOBID": f"{whole}[{index}].cavvy",
        "PBS_ARRAY_ID": f"{whole}[].cavvy",
        "PBS_ARRAY_INDEX": index,
        "PBS_ARRAYID": index,  # of Torque
    }


def fill_pbs(pattern: str, env: dict[str, str], kind: str) -> str:
    """Return the name of a file of output; in a folder, it has the name of the job."""
    name = pattern.replace("^array_index^", env.get("PBS_ARRAY_INDEX", ""))
    name = re.sub(r"\$\{?(PBS_\w+)\}?", lambda found: env.get(found[1], found[0]), name)
    if name.endswith("/") or os.path.isdir(name):
        name = os.path.join(name, f"{env['PBS_JOBID']}.{kind}")
    return name


def fill(pattern: str, env: dict[str, str], task: int = 0, node: int = 0) -> str:
    """Return the name of a file: https://slurm.schedmd.com/sbatch.html#SECTION_FILENAME-PATTERN"""
    values = {
        "A": env.get("SLURM_ARRAY_JOB_ID", env["SLURM_JOB_ID"]),
        "a": env.get("SLURM_ARRAY_TASK_ID", "4294967294"),
        "J": f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID', 'batch')}",
        "j": env["SLURM_JOB_ID"],
        "N": env.get("SLURMD_NODENAME", "localhost"),
        "n": str(node),
        "s": env.get("SLURM_STEP_ID", "batch"),
        "t": str(task),
        "u": env.get("USER", ""),
        "x": env["SLURM_JOB_NAME"],
        "%": "%",
    }

    def replace(found: re.Match[str]) -> str:
        value = values.get(found[2], found[0])
        return value.zfill(min(int(found[1] or 0), 10)) if value.isdigit() else value

    return re.sub(r"%(\d*)([AaJjNnstux%])", replace, pattern)


def share_out(tasks: int, nodes: int, per_node: int) -> list[int]:
    """Return the number of tasks on each node, by Slurm's default distribution in blocks."""
    if per_node and per_node * nodes == tasks:
        return [per_node] * nodes
    least, more = divmod(tasks, nodes)
    return [least + (rank < more) for rank in range(nodes)]


def shorten(counts: list[int]) -> str:
    """Write counts as Slurm does: [2, 2, 1] is 2(x2),1."""
    parts: list[str] = []
    start = 0
    while start < len(counts):
        end = start
        while end < len(counts) and counts[end] == counts[start]:
            end += 1
        times = f"(x{end - start})" if end - start > 1 else ""
        parts.append(f"{counts[start]}{times}")
        start = end
    return ",".join(parts)


def list_devices(count: int) -> list[str]:
    """Return the names of the job's GPUs on a node, as the agent has chosen them."""
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if os.environ.get(name):
            return os.environ[name].split(",")
    return [str(number) for number in range(count)]


def exit_code(code: int) -> int:
    return 128 - code if code < 0 else code


# What srun does


class Usage(Exception):
    """A mistake in a command line."""


# What sbatch does within a job

# variables that say something of this node, which another node has by itself
NOT_SENT = re.compile(
    r"(SLURM|SBATCH|CAVVY|PET|OMPI|PMIX?|PRTE)_.*|PATH|LD_LIBRARY_PATH|PWD|OLDPWD|SHLVL|_|HOME|"
    r"TMPDIR|HOSTNAME|MASTER_ADDR|MASTER_PORT|NODE_RANK|NNODES|NPROC_PER_NODE|BASH_FUNC_.*|"
    r"(CUDA|ROCR|HIP|NVIDIA|ZE)_VISIBLE_DEVICES|RANK|LOCAL_RANK|WORLD_SIZE"
)
ANSWER_S = 150
POLL_S = 2.0
MOST_BYTES = 60_000


class SubmissionRefused(Exception):
    """The server has refused what was asked."""


def submit(words: list[str]) -> int:
    """Submit a script, or the command of --wrap, and say its number."""
    plan = json.loads(os.environ.get(PLAN, "{}"))
    if "sbatch" not in plan or FOLDER not in os.environ:
        tell("sbatch: error: only a batch script that names sbatch may submit jobs")
        return 1
    try:
        options, rest = parse_submission(words, plan["sbatch"])
        if "test-only" in options:
            raise Usage("--test-only: `cavvy plan FILE` shows what would happen")
        asked = make_submission(options, rest)
        found = ask_server("slurm/submit", asked)
    except (Usage, OSError, UnicodeDecodeError, SubmissionRefused) as error:
        tell(f"sbatch: error: {error}")
        return 1
    number = found["number"]
    with open(os.path.join(os.environ[FOLDER], "submitted"), "a", encoding="utf-8") as file:
        file.write(f"{number} {found['name']}\n")
    if "parsable" in options:
        print(number, flush=True)
    elif "quiet" not in options:
        print(f"Submitted batch job {number}", flush=True)
        tell(f"cavvy: its name is {found['name']}")
    return wait_for(number) if "wait" in options else 0


def parse_submission(
    words: list[str], known: dict[str, Any]
) -> tuple[dict[str, str | None], list[str]]:
    """Return the options of sbatch by their long names, and the script with its arguments."""
    found: dict[str, str | None] = {}
    words = list(words)
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        word = words.pop(0)
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
        elif word[1] in known["short"]:
            name, value = known["short"][word[1]], word[2:]
            given = value
            if value and name in known["switches"]:  # several letters, such as -QW
                words.insert(0, f"-{value}")
                value = given = ""
        else:
            raise Usage(f"invalid option -- '{word[1]}'")
        if name not in known["known"]:
            raise Usage(f"unrecognized option '{word}'")
        if not given and name not in known["switches"]:
            if not words:
                raise Usage(f"option '{word}' requires an argument")
            value, given = words.pop(0), "="
        found[name] = value if given else None
    return found, words[1:] if words[:1] == ["--"] else words


def make_submission(options: dict[str, str | None], rest: list[str]) -> dict[str, Any]:
    """Return what the server is asked. Raises Usage and OSError."""
    if "wrap" in options:
        if rest:
            raise Usage(f"Script arguments not permitted with --wrap option: {rest[0]}")
        script, name, rest = f"#!/bin/sh\n{options['wrap']}\n", "wrap", [""]
    elif rest:
        with open(rest[0], encoding="utf-8") as file:
            script = file.read()
        name = os.path.basename(rest[0])
    else:
        script, name, rest = sys.stdin.read(), "sbatch", [""]
    work = os.path.realpath(os.environ[WORK])
    folder = os.path.relpath(os.path.realpath(os.getcwd()), work)
    if folder == ".." or folder.startswith("../"):
        tell(f"sbatch: {os.getcwd()} is not in the job's folder, in which the new job starts")
        folder = "."
    export = options.get("export") or os.environ.get("SBATCH_EXPORT") or "ALL"
    named = [each for each in export.split(",") if each not in ("ALL", "NONE", "NIL")]
    inherits = export in ("ALL", "") or "ALL" in export.split(",")
    with open(os.path.join(os.environ[FOLDER], "environment.json"), encoding="utf-8") as file:
        before: dict[str, str] = json.load(file)
    env = {name: os.environ.get(name, "") for name in named if "=" not in name}
    if inherits:
        env.update(
            (name, value)
            for name, value in os.environ.items()
            if before.get(name) != value
            and re.fullmatch(r"[A-Za-z_]\w*", name)
            and not NOT_SENT.fullmatch(name)
        )
    unset = [name for name in before if name not in os.environ] if inherits else []
    left_out = ("wrap", "parsable", "wait", "quiet", "verbose")
    asked = {
        "id": base64.b16encode(os.urandom(12)).decode(),
        "script": script,
        "name": name,
        "options": [[key, value] for key, value in options.items() if key not in left_out],
        "arguments": rest[1:],
        "env": env,
        "unset": unset,
        "inherits": inherits,
        "folder": "" if folder == "." else folder,
        "array": int(os.environ.get("SLURM_ARRAY_JOB_ID", "0")),
    }
    if len(json.dumps(json.dumps(asked))) > MOST_BYTES:
        raise Usage("the script and its variables are longer than 60 kB")
    return asked


def wait_for(number: int) -> int:
    """Wait until a job has ended, and return its exit code, as --wait does."""
    while True:
        try:
            found = ask_server("slurm/state", {"number": number})
        except (OSError, SubmissionRefused) as error:
            tell(f"sbatch: error: {error}")
            return 1
        if found["exit_code"] is not None:
            return int(found["exit_code"])
        time.sleep(POLL_S)


def ask_server(place: str, body: dict[str, Any]) -> dict[str, Any]:
    """Ask the server through the node's agent. Raises OSError and SubmissionRefused."""
    name = base64.b16encode(os.urandom(8)).decode()
    path = os.environ.get("CAVVY_NOTICE", "")
    if not path:
        raise SubmissionRefused("the node's agent is not reached: CAVVY_NOTICE is not set")
    line = json.dumps({"ask": {"id": name, "to": place, "body": json.dumps(body)}})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect(path)
        connection.sendall(line.encode() + b"\n")
        with connection.makefile("r", encoding="utf-8") as lines:
            for each in lines:
                answer = json.loads(each).get("answer")
                if answer and answer["id"] == name:
                    break
            else:
                raise SubmissionRefused("the node's agent has not answered")
    content = answer["body"] if isinstance(answer["body"], dict) else {}
    if answer["status"] >= 300:
        hint = content.get("hint")
        raise SubmissionRefused(content.get("message", "refused") + (f"\n{hint}" if hint else ""))
    return dict(content)


# the long form of the short options of srun that have a value
VALUES = {
    **{"n": "ntasks", "N": "nodes", "c": "cpus-per-task", "G": "gpus", "o": "output"},
    **{"e": "error", "w": "nodelist", "r": "relative", "D": "chdir", "J": "job-name"},
    **{"t": "time", "m": "distribution", "A": "account", "p": "partition", "q": "qos"},
    **{"W": "wait", "i": "input", "C": "constraint", "x": "exclude", "d": "dependency"},
}
# options of which this program heeds the value
HEEDED = (
    *("ntasks", "nodes", "ntasks-per-node", "cpus-per-task", "gpus", "gpus-per-node"),
    *("gpus-per-task", "gres", "output", "error", "nodelist", "relative", "chdir", "job-name"),
    *("export", "mpi"),
)
# Others have a value without a meaning here: they name something of the cluster, or say how a
# process is bound to its cores.
UNHEEDED = (
    *("time", "distribution", "account", "partition", "qos", "wait", "input", "constraint"),
    *("exclude", "cpu-bind", "cpu_bind", "mem-bind", "gpu-bind", "hint", "mem", "mem-per-cpu"),
    *("mem-per-gpu", "threads-per-core", "ntasks-per-socket", "ntasks-per-core", "accel-bind"),
    *("open-mode", "jobid", "network", "propagate", "comment", "cpus-per-gpu", "het-group"),
    *("slurmd-debug", "task-prolog", "task-epilog", "prolog", "epilog"),
    *("time-min", "tres-bind", "tres-per-task", "cpu-freq", "licenses", "mail-type", "mail-user"),
    *("acctg-freq", "begin", "cluster-constraint", "clusters", "core-spec", "cores-per-socket"),
    *("deadline", "delay-boot", "dependency", "extra-node-info", "gpu-freq", "gres-flags"),
    *("mcs-label", "mincpus", "nice", "power", "priority", "profile", "reservation", "signal"),
    *("sockets-per-node", "switches", "thread-spec", "threads", "tmp", "wckey", "quotatype"),
)
# of pyxis: a step runs in the image of the job
CONTAINERS = ("container-image", "container-mounts", "container-workdir", "container-name")
SWITCHES = {
    **{"l": "label", "K": "kill-on-bad-exit", "O": "overcommit", "s": "oversubscribe"},
    **{"u": "unbuffered", "v": "verbose", "Q": "quiet", "k": "no-kill", "X": "disable-status"},
}
LONG_SWITCHES = (
    *(*SWITCHES.values(), "overlap", "exact", "exclusive", "multi-prog", "pty", "bcast"),
    *("compress", "contiguous", "immediate", "preserve-env", "quit-on-interrupt", "reboot"),
    *("resv-ports", "spread-job", "use-min-nodes", "container-mount-home", "container-readonly"),
    *("no-container-mount-home", "container-writable", "container-remap-root", "nvmps"),
    *("no-container-remap-root", "container-entrypoint", "no-container-entrypoint", "async"),
)


def parse_step(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of srun by their long names, and its command. Raises Usage."""
    found: dict[str, str] = {}
    words = list(words)
    while words and words[0].startswith("-") and words[0] not in ("-", "--"):
        word = words.pop(0)
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            if name in LONG_SWITCHES:
                found[name] = value or "1"
                continue
            if name not in (*HEEDED, *UNHEEDED, *CONTAINERS, "ntasks-per-gpu"):
                raise Usage(f"unrecognized option '{word}'")
        elif word[1] in SWITCHES:
            found[SWITCHES[word[1]]] = "1"
            if word[2:]:
                words.insert(0, f"-{word[2:]}")
            continue
        elif word[1] in VALUES:
            name, given, value = VALUES[word[1]], word[2:], word[2:].lstrip("=")
        else:
            raise Usage(f"invalid option -- '{word[1]}'")
        if not given:
            if not words:
                raise Usage(f"option '{word}' requires an argument")
            value = words.pop(0)
        found[name] = value
    command = words[1:] if words[:1] == ["--"] else words
    if not command:
        raise Usage("No command given to execute.")
    return found, command


def run_step(words: list[str]) -> int:
    if FOLDER not in os.environ or "SLURM_JOB_ID" not in os.environ:
        tell("srun: this is not the script of the job, or its variables were removed")
        return 1
    try:
        options, command = parse_step(words)
        step = plan_step(options, command)
    except (Usage, ValueError) as error:
        tell(f"srun: error: {error}")
        return 1
    told = False
    while (taken := take_nodes(step)) is None:
        if not told:
            tell("srun: the job's cores or GPUs are used by other steps; waiting for them")
        told = True
        time.sleep(LOOK_S)
    try:
        return SlurmStep(step, taken).run()
    finally:
        with open_steps() as state:
            state["steps"].pop(step["id"], None)


def plan_step(options: dict[str, str], command: list[str]) -> dict[str, Any]:
    """Return what a step needs. Raises Usage and ValueError."""
    env = os.environ
    in_job, plan = int(env["SLURM_JOB_NUM_NODES"]), json.loads(env[PLAN])
    hosts = env["SLURM_JOB_NODELIST"].split(",")
    wanted = split_hosts(options["nodelist"]) if "nodelist" in options else []
    if missing := [host for host in wanted if host not in hosts]:
        raise Usage(f"{missing[0]} is no node of this job, whose nodes are {','.join(hosts)}")
    nodes = int(options["nodes"].split("-")[-1]) if "nodes" in options else len(wanted)
    tasks = int(options["ntasks"]) if "ntasks" in options else None
    if not nodes:
        nodes = in_job if tasks is None else min(in_job, tasks)
    relative = int(options.get("relative", "0"))
    if nodes + relative > in_job:
        raise Usage(f"the step needs {nodes} nodes, and the job has {in_job}")
    per_node = int(options.get("ntasks-per-node", "0"))
    if "ntasks-per-gpu" in options and tasks is None and not per_node:
        on_node = read_gpus(options, nodes, [1])[0]
        per_node = int(options["ntasks-per-gpu"]) * (plan["gpus"] if on_node is None else on_node)
    if tasks is None:
        per_node = per_node or plan["per_node"]
        tasks = per_node * nodes or (nodes if "nodes" in options else int(env["SLURM_NTASKS"]))
    tasks = max(tasks, nodes)
    counts = share_out(tasks, nodes, per_node)
    gpus, gpus_per_task = read_gpus(options, nodes, counts)
    cpus = int(options.get("cpus-per-task") or env.get("SLURM_CPUS_PER_TASK") or 1)
    most = int(env["SLURM_CPUS_ON_NODE"])
    if "overcommit" not in options and max(counts) * cpus > most:
        raise Usage(
            f"Unable to create step for job {env['SLURM_JOB_ID']}: More processors requested than "
            "permitted"
        )
    return {
        "id": "",
        "command": command,
        "multi": "multi-prog" in options,
        "counts": counts,
        "cpus": cpus,
        "gpus": gpus,
        "gpus_per_task": gpus_per_task or int(env.get("SLURM_GPUS_PER_TASK") or 0),
        "hosts": wanted,
        "relative": relative,
        "overlaps": "overlap" in options or "oversubscribe" in options,
        "label": "label" in options,
        "output": options.get("output", ""),
        "error": options.get("error", ""),
        "folder": find_folder(options),
        "ends_all": options.get("kill-on-bad-exit", "0") != "0",
        "mpi": options.get("mpi", "none"),
        "name": options.get("job-name", ""),
        "export": options.get("export") or env.get("SLURM_EXPORT_ENV", ""),
    }


def find_folder(options: dict[str, str]) -> str:
    """Return the folder of a step: --chdir, or that of a container if it exists here."""
    inner = options.get("container-workdir", "")
    folder = inner if os.path.isdir(inner) else options.get("chdir", "")
    return os.path.join(os.getcwd(), folder).rstrip("/") or "/"


def read_gpus(options: dict[str, str], nodes: int, counts: list[int]) -> tuple[int | None, int]:
    """Return the GPUs of a step on each node, or None for all of the job, and those of a task."""

    def count(text: str) -> int:
        last = text.split(",")[0].rpartition(":")[2]
        return int(last) if last.isdigit() else 1

    if "gpus-per-task" in options:
        each = count(options["gpus-per-task"])
        return each * max(counts), each
    if "gpus-per-node" in options:
        return count(options["gpus-per-node"]), 0
    if "gpus" in options:
        return -(-count(options["gpus"]) // nodes), 0
    for part in options.get("gres", "").split(","):
        if part.startswith("gpu"):
            return count(part), 0
    return (0 if options.get("gres") == "none" else None), 0


@contextmanager
def open_steps() -> Iterator[dict[str, Any]]:
    """The steps that run, locked, and written back afterwards."""
    path = os.path.join(os.environ[FOLDER], "steps.json")
    with open(path, "r+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        state = json.load(file)
        yield state
        file.seek(0)
        file.truncate()
        json.dump(state, file)


def take_nodes(step: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Choose the nodes of a step, and note that they are used. Return None if others use them:
    since Slurm 20.11, a step has its cores and GPUs for itself.
    """
    plan = json.loads(os.environ[PLAN])
    hosts = os.environ["SLURM_JOB_NODELIST"].split(",")
    cpus = int(os.environ["SLURM_CPUS_ON_NODE"])
    devices = list_devices(plan["gpus"]) if plan["gpus"] else []
    with open_steps() as state:
        used = [0] * len(hosts)
        busy: list[set[str]] = [set() for _ in hosts]
        for other in state["steps"].values():
            for taken in other:
                used[taken["rank"]] += taken["cpus"]
                busy[taken["rank"]] |= set(taken["own"])
        ranks = [rank for rank in range(step["relative"], len(hosts))]
        if step["hosts"]:
            ranks = [rank for rank in ranks if hosts[rank] in step["hosts"]]
        ranks.sort(key=lambda rank: (used[rank], rank))
        chosen: list[dict[str, Any]] = []
        for rank in ranks:
            if len(chosen) == len(step["counts"]):
                break
            tasks = step["counts"][len(chosen)]
            need = 0 if step["overlaps"] else min(cpus, tasks * step["cpus"])
            free = [each for each in devices if step["overlaps"] or each not in busy[rank]]
            gpus = step["gpus"]
            if used[rank] + need > cpus or (gpus and len(free) < min(gpus, len(devices))):
                continue
            own = devices if gpus is None else free[:gpus]
            held = [] if gpus is None or step["overlaps"] else own
            chosen.append({"rank": rank, "cpus": need, "own": held, "devices": own})
        if len(chosen) < len(step["counts"]):
            return None
        chosen.sort(key=lambda each: int(each["rank"]))
        step["id"] = str(state["next"])
        state["next"] += 1
        state["steps"][step["id"]] = chosen
    return chosen


class SlurmStep:
    """The tasks of one srun on the nodes of a job."""

    def __init__(self, step: dict[str, Any], taken: list[dict[str, Any]]) -> None:
        self._step, self._taken = step, taken
        self._runs: list[subprocess.Popen[bytes]] = []
        self._signalled = 0

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._pass_on)
        step = self._step
        if step["mpi"] not in ("none", "list"):
            return self._run_mpi()
        first = 0
        for node, (count, taken) in enumerate(zip(step["counts"], self._taken)):  # noqa: B905
            told = make_node_step(step, self._taken, node, first)
            self._runs.append(start_on(taken["rank"], "task", encode(told)))
            first += count
        codes = list[int]()
        waiting = list(self._runs)
        while waiting:
            for run in list(waiting):
                if run.poll() is not None:
                    waiting.remove(run)
                    codes.append(exit_code(run.returncode))
                    if codes[-1] and step["ends_all"] and waiting:
                        tell("srun: Job step aborted: a task has failed")
                        self._send(signal.SIGTERM)
            time.sleep(0.02)
        return max(codes)

    def _run_mpi(self) -> int:
        """Let mpirun start the tasks: it provides the PMI that `--mpi` promises."""
        step = self._step
        first = make_node_step(step, self._taken, 0, 0)
        place = f"ppr:{step['counts'][0]}:node"
        line = ["mpirun", "-np", str(sum(step["counts"])), "--map-by", place, *step["command"]]
        env = {**os.environ, **first["env"]}
        try:
            return exit_code(subprocess.call(line, env=env, cwd=step["folder"]))
        except OSError as error:
            tell(f"srun: error: --mpi={step['mpi']} needs mpirun: {error.strerror}")
            return 127

    def _pass_on(self, number: int, frame: object) -> None:
        threading.Thread(target=self._send, args=(number,), daemon=True).start()

    def _send(self, number: int) -> None:
        for taken in self._taken:
            start_on(taken["rank"], "kill", self._step["id"], str(int(number))).wait()


def make_node_step(
    step: dict[str, Any], taken: list[dict[str, Any]], node: int, first: int
) -> dict[str, Any]:
    """Return what the tasks of a step on one of its nodes are."""
    hosts = os.environ["SLURM_JOB_NODELIST"].split(",")
    names = ",".join(hosts[each["rank"]] for each in taken)
    counts = step["counts"]
    env = {name: value for name, value in os.environ.items() if is_passed(name, step["export"])}
    for part in step["export"].split(","):
        if "=" in part:
            env[part.partition("=")[0]] = part.partition("=")[2]
    tasks = sum(counts)
    env |= {
        "SLURM_STEP_ID": step["id"],
        "SLURM_STEPID": step["id"],
        "SLURM_STEP_NODELIST": names,
        "SLURM_STEP_NUM_NODES": str(len(counts)),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": shorten(counts),
        "SLURM_NTASKS": str(tasks),
        "SLURM_NPROCS": str(tasks),
        "SLURM_NNODES": str(len(counts)),
        "SLURM_TASKS_PER_NODE": shorten(counts),
        "SLURM_NODELIST": names,
        "SLURM_LAUNCH_NODE_IPADDR": hosts[0],
        "SLURM_SRUN_COMM_HOST": hosts[0],
        "SLURMD_NODENAME": hosts[taken[node]["rank"]],
        "SLURM_NODEID": str(node),
    }
    keys = (
        *("id", "command", "multi", "label", "output", "error", "folder", "gpus_per_task"),
        "ends_all",
    )
    base = os.environ[WORK]
    return {
        **{key: step[key] for key in keys},
        "base": base,
        "env": env,
        "first": first,
        "count": counts[node],
        "node": node,
        "devices": taken[node]["devices"],
    }


# Variables of one node, which a task on another node has of its own.
OF_NODE = (
    *("CAVVY_SLURM", "CAVVY_SLURM_WORK", "CAVVY_SLURM_PYTHON", "NODE_RANK", "HOME", "TMPDIR"),
    *("HOSTNAME", "PWD", "PATH", "VIRTUAL_ENV", "CAVVY_HOSTFILE", "CAVVY_MPI"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("CAVVY_CHECKPOINT_DIR", "CAVVY_PROGRESS_FILE", "CAVVY_SOCKET"),
)


def is_passed(name: str, export: str) -> bool:
    """Whether a task gets this variable of the script (`--export`)."""
    if export.split(",")[0] in ("", "ALL"):
        return True
    named = [part.partition("=")[0] for part in export.split(",")]
    return name in named or name.startswith(("SLURM_", "CAVVY_")) or name in OF_NODE


def start_on(rank: int, *words: str) -> subprocess.Popen[bytes]:
    """Start these programs on a node of the job."""
    if rank == int(os.environ.get("NODE_RANK", "0")):
        alone = words[0] == "task"
        command = [sys.executable, __file__, *words]
        return subprocess.Popen(command, stdin=None if alone else subprocess.DEVNULL)
    line = f'exec "${{{FOLDER}_PYTHON:-python3}}" "${FOLDER}/tools.py" {shlex.join(words)}'
    return subprocess.Popen(["cavvy-rsh", f"cavvy-rank-{rank}", line], stdin=subprocess.DEVNULL)


def encode(value: object) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()


def run_tasks(told: dict[str, Any]) -> int:
    """Run the tasks of a step on this node; return the highest exit code."""
    env = make_task_variables(told)
    lines = read_programs(told) if told["multi"] else {}
    tasks: dict[int, subprocess.Popen[bytes]] = {}
    codes: dict[int, int] = {}
    copies: list[threading.Thread] = []
    for place in range(told["count"]):
        number = told["first"] + place
        command = lines.get(number, told["command"])
        try:
            task, copy = start_task(told, command, env, place)
        except OSError as problem:
            # as slurmstepd, whose exit code is the number of the error
            tell(f"slurmstepd: error: execve(): {command[0]}: {problem.strerror}")
            codes[number] = problem.errno or 1
            continue
        tasks[number] = task
        copies += [copy] if copy else []
    note_tasks(told["id"], [task.pid for task in tasks.values()])
    if told["ends_all"]:
        end_with_first(list(tasks.values()), failed=bool(codes))
    codes |= {number: exit_code(task.wait()) for number, task in tasks.items()}
    for copy in copies:
        copy.join(5)
    for code in sorted({*codes.values()} - {0}):
        numbers = sorted(number for number in codes if codes[number] == code)
        how = f"Exited with exit code {code}"
        if code > 128:
            how = signal.strsignal(code - 128) or how
        which = f"task {numbers[0]}" if len(numbers) == 1 else f"tasks {write_numbers(numbers)}"
        tell(f"srun: error: {env['SLURMD_NODENAME']}: {which}: {how}")
    return max(codes.values())


def make_task_variables(told: dict[str, Any]) -> dict[str, str]:
    """Return the variables of the tasks of a step on this node, and choose their folder."""
    here = {name: os.environ[name] for name in OF_NODE if name in os.environ}
    env = {**told["env"], **here}
    if "PATH" in told["env"]:  # what the script has added comes first
        both = [*told["env"]["PATH"].split(":"), *here.get("PATH", "").split(":")]
        env["PATH"] = ":".join(each for each in dict.fromkeys(both) if each)
    folder = told["folder"]
    if (folder + "/").startswith(told["base"] + "/"):
        folder = os.environ[WORK] + folder[len(told["base"]) :]
    if not os.path.isdir(folder):
        tell(f"slurmstepd: error: couldn't chdir to `{folder}': going to /tmp instead")
        folder = "/tmp"
    env["PWD"] = told["folder"] = folder
    env["SLURM_TMPDIR"] = make_own_folder()
    last = told["first"] + told["count"]
    env["SLURM_GTIDS"] = ",".join(map(str, range(told["first"], last)))
    return env


def start_task(
    told: dict[str, Any], command: list[str], env: dict[str, str], place: int
) -> tuple[subprocess.Popen[bytes], threading.Thread | None]:
    """Start one task, and what copies its labelled output. Raises OSError."""
    number = told["first"] + place
    own = {**env, "SLURM_PROCID": str(number), "SLURM_LOCALID": str(place)}
    if devices := told["devices"]:
        if each := told["gpus_per_task"]:
            devices = devices[place * each :][:each]
        own["CUDA_VISIBLE_DEVICES"] = own["SLURM_STEP_GPUS"] = ",".join(devices)
    output = open_output(told["output"], own, number, told["node"])
    error = open_output(told["error"], own, number, told["node"])
    piped = told["label"] and output is None
    task = subprocess.Popen(
        command,
        env=own,
        cwd=told["folder"],
        stdout=subprocess.PIPE if piped else output,
        stderr=error if error is not None else subprocess.STDOUT if piped else output,
    )
    copy = None
    if piped:
        copy = threading.Thread(target=label, args=(number, task.stdout), daemon=True)
        copy.start()
    return task, copy


def end_with_first(tasks: list[subprocess.Popen[bytes]], *, failed: bool) -> None:
    """Wait for all tasks, and end the others when one has failed."""
    while any(task.poll() is None for task in tasks):
        if failed or any(task.poll() for task in tasks):
            for task in tasks:
                if task.poll() is None:
                    task.terminate()
            return
        time.sleep(LOOK_S / 10)


def write_numbers(numbers: list[int]) -> str:
    """Write sorted numbers as Slurm does: [0, 1, 2, 5] is 0-2,5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def read_programs(told: dict[str, Any]) -> dict[int, list[str]]:
    """Return the command of each task of `--multi-prog`:
    https://slurm.schedmd.com/srun.html#SECTION_MULTIPLE-PROGRAM-CONFIGURATION
    """
    found: dict[int, list[str]] = {}
    total = int(told["env"]["SLURM_NTASKS"])
    with open(os.path.join(told["folder"], told["command"][0]), encoding="utf-8") as file:
        for line in file:
            words = shlex.split(line, comments=True)
            if len(words) < 2:
                continue
            numbers = range(total) if words[0] == "*" else read_numbers(words[0])
            for place, number in enumerate(numbers):
                own = [word.replace("%t", str(number)) for word in words[1:]]
                found.setdefault(number, [word.replace("%o", str(place)) for word in own])
    return found


def read_numbers(text: str) -> list[int]:
    """Return the numbers of a list such as 0,2-5."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def open_output(pattern: str, env: dict[str, str], task: int, node: int) -> int | None:
    if not pattern or pattern == "all":
        return None
    if pattern == "none":
        pattern = os.devnull
    path = os.path.join(env.get("PWD", "."), fill(pattern, env, task, node))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)


def label(number: int, source: BinaryIO | None) -> None:
    for line in source or ():
        sys.stdout.buffer.write(b"%d: %s" % (number, line))
        sys.stdout.buffer.flush()


def note_tasks(step: str, processes: list[int]) -> None:
    path = os.path.join(os.environ[FOLDER], f"step-{step}")
    with open(path, "w", encoding="utf-8") as file:
        file.write(" ".join(map(str, processes)))


def signal_step(step: str, number: int) -> None:
    """Signal the tasks of a step on this node."""
    path = os.path.join(os.environ[FOLDER], f"step-{step}")
    with suppress(OSError), open(path, encoding="utf-8") as file:
        for process in file.read().split():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(process), number)


def signal_all_steps(number: int) -> None:
    """Signal the tasks of all steps, on all nodes."""
    if has_cluster():
        for step in list_cluster_steps():
            subprocess.call(["scancel", f"--signal={int(number)}", step])
        return
    with open_steps() as state:
        steps = {each: [taken["rank"] for taken in ranks] for each, ranks in state["steps"].items()}
    for step, ranks in steps.items():
        for rank in ranks:
            start_on(rank, "kill", step, str(int(number))).wait()


# What pbsdsh does


def run_everywhere(words: list[str]) -> int:
    """Run a program once for each line of the file of the nodes; return the highest exit code."""
    env = os.environ
    with open(env["PBS_NODEFILE"], encoding="utf-8") as file:
        hosts = file.read().split()
    per_node = json.loads(env[PLAN])["per_node"]
    places = list(range(len(hosts)))
    words = list(words)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word == "--":
            break
        if word in ("-c", "-n") and words and words[0].isdecimal():
            number = int(words.pop(0))
            places = places[:number] if word == "-c" else places[number : number + 1]
        elif word == "-u":  # one for each node
            places = places[::per_node]
        elif word not in ("-v", "-o", "-s"):
            tell(f"pbsdsh: unknown option {word}")
            return 1
    if not words:
        tell("pbsdsh: no program is given")
        return 1
    runs = []
    for place in places:
        rank = place // per_node
        own = {"PBS_NODENUM": str(rank), "PBS_TASKNUM": str(place + 2), "PBS_VNODENUM": str(place)}
        names = [name for name in env if name.startswith("PBS_")]
        if rank == int(env.get("NODE_RANK", "0")):
            runs.append(subprocess.Popen(words, env={**env, **own}, stdin=subprocess.DEVNULL))
            continue
        told = {**{name: env[name] for name in names}, **own}
        line = f"exec env {shlex.join(f'{key}={value}' for key, value in told.items())} "
        command = ["cavvy-rsh", f"cavvy-rank-{rank}", line + shlex.join(words)]
        runs.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
    return max((exit_code(run.wait()) for run in runs), default=0)


# What scontrol and scancel do


def control(words: list[str]) -> int:
    words = [word for word in words if not word.startswith("-")]
    if words[:2] in (["show", "hostnames"], ["show", "hostname"]):
        for host in split_hosts(words[2] if words[2:] else os.environ["SLURM_JOB_NODELIST"]):
            print(host)
        return 0
    if words[:1] == ["requeue"]:
        with open(os.path.join(os.environ[FOLDER], "requeue"), "w", encoding="utf-8"):
            return 0
    if words[:1] == ["show"] and words[1:2] in (["job"], ["jobid"], ["jobs"]):
        import queries  # type: ignore[import-not-found,unused-ignore]  # `node_queries`

        return int(queries.show_job(words[2].partition("=")[0] if words[2:] else ""))
    tell(f"scontrol {' '.join(words)}: a job can do this only on a Slurm cluster")
    return 1


def split_hosts(text: str) -> list[str]:
    """Return the names of a list of hosts, such as a[01-03,7],b."""
    found: list[str] = []
    for part in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text):
        names = [""]
        for piece in re.split(r"(\[[^\]]*\])", part):
            ends = [piece]
            if piece.startswith("["):
                ends = []
                for span in piece[1:-1].split(","):
                    first, _, last = span.partition("-")
                    numbers = range(int(first), int(last or first) + 1)
                    ends += [str(number).zfill(len(first)) for number in numbers]
            names = [name + end for name in names for end in ends]
        found += names
    return found


def cancel(words: list[str]) -> int:
    """End the job itself, or send a signal to its steps (-b: to its script, -f: to all)."""
    number, jobs, flags = 0, list[str](), set[str]()
    words = list(words)
    while words:
        word = words.pop(0)
        if word in ("-s", "--signal") and words:
            word = f"--signal={words.pop(0)}"
        if word.startswith("-s") and len(word) > 2:
            word = f"--signal={word[2:]}"
        if word.startswith("--signal="):
            name = word.partition("=")[2].upper()
            names = {each.name.replace("SIG", "", 1): int(each) for each in signal.Signals}
            number = int(name) if name.isdigit() else names.get(name.replace("SIG", "", 1), 0)
            if not number:
                tell(f"scancel: error: Unknown job signal: {name}")
                return 1
        elif word.startswith("-"):
            flags.add(word)
        else:
            jobs.append(word)
    env, own = os.environ, own_number()
    ours = {own, f"{env.get('SLURM_ARRAY_JOB_ID')}_{env.get('SLURM_ARRAY_TASK_ID')}"}
    if not jobs or any(job.partition(".")[0] not in ours for job in jobs):
        tell("scancel: a job can end only itself; `cavvy stop NAME` ends another one")
        return 1
    if not number and not any("." in job for job in jobs):
        return end_job()
    if {"-b", "--batch", "-f", "--full"} & flags:
        with open(os.path.join(env[FOLDER], "script"), encoding="utf-8") as file, suppress(OSError):
            os.kill(int(file.read()), number or signal.SIGTERM)
    if not {"-b", "--batch"} & flags:
        signal_all_steps(number or signal.SIGTERM)
    return 0


def own_number() -> str:
    env = os.environ
    return env.get("SLURM_JOB_ID") or env.get("PBS_JOBID", "").partition(".")[0]


def end_job() -> int:
    """End this job; what called this program ends with it."""
    with open(os.path.join(os.environ[FOLDER], "cancel"), "w", encoding="utf-8"):
        pass
    time.sleep(KILL_WAIT_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
