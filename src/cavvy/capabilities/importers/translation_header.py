"""Adds lines before the author's commands. The lines provide the environment variables and the
shell that the commands expect.

The agent sets Cavvy's variables when a node starts. From these, the added lines compute the
variables that the other tool would set. The added lines are POSIX shell code. Cavvy's shell stops
at the first failing command, but the shells of the other tools do not, so the lines begin with `set
+e`.

Other lines are for tasks whose nodes depend on other nodes: tasks that start MPI, dstack's
`startup_order: workers-first` and `stop_criteria: master-done`, and SkyPilot jobs that start
processes in the background.

SkyPilot and dstack connect the nodes with SSH. Here, `$CAVVY_MPI` connects them: on rank 0 (the
master) it waits for the other ranks, and then runs the author's commands, in which `mpirun` starts
processes on the other ranks. The other ranks run the author's commands, too, and do what rank 0
asks until rank 0 ends.

On a SkyPilot node, processes that the commands started, such as a Ray worker, continue to run after
the commands have ended. When the commands of a node end, Cavvy ends all processes of the node. The
shell lines for these jobs make each node wait until the commands of all nodes have succeeded: a
helper process on each node connects to the first node. A node that has ended is not waited for. If
a node does not connect to the first node, the others wait for it for at most a minute.
"""

import hashlib
import re
from collections.abc import Mapping
from shlex import quote

from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.spec.problems import slug

# The variables of each tool. The values are shell words.
_LINES = r"""$(printf '%s' "$CAVVY_HOSTS" | tr ',' '\n')"""
_SKYPILOT = {
    "SKYPILOT_NODE_RANK": '"$NODE_RANK"',
    "SKYPILOT_NODE_IPS": f'"{_LINES}"',
    "SKYPILOT_NUM_NODES": '"$NNODES"',
    "SKYPILOT_NUM_GPUS_PER_NODE": "@GPUS@",
    "SKYPILOT_TASK_ID": '"cavvy-$CAVVY_JOB_ID"',
    "SKYPILOT_TASK_IDS": '"cavvy-$CAVVY_JOB_ID"',
    "SKYPILOT_INTERNAL_JOB_ID": "1",
    "SKYPILOT_MANAGED_JOB_ID": '"$CAVVY_JOB_ID"',
    "SKYPILOT_USER": '"${USER:-}"',
    "SKYPILOT_CLUSTER_INFO": """'{"cluster_name": "'"$CAVVY_JOB"'", "cloud": "cavvy"}'""",
    "SKYPILOT_JOB_RANK": '"${SKYPILOT_JOB_RANK:-0}"',
    "SKYPILOT_NUM_JOBS": '"${SKYPILOT_NUM_JOBS:-1}"',
    "SKYPILOT_SETUP_NODE_RANK": '"$NODE_RANK"',
    "SKYPILOT_SETUP_NODE_IPS": '"$SKYPILOT_NODE_IPS"',
    "SKYPILOT_SETUP_NUM_GPUS_PER_NODE": "@GPUS@",
}
_DSTACK = {
    "DSTACK_RUN_NAME": '"$CAVVY_JOB"',
    "DSTACK_RUN_ID": '"$CAVVY_JOB_ID"',
    "DSTACK_JOB_ID": '"$CAVVY_JOB_ID-$CAVVY_ATTEMPT-$NODE_RANK"',
    "DSTACK_REPO_ID": '"$CAVVY_PROJECT"',
    "DSTACK_REPO_DIR": '"$PWD"',
    "DSTACK_WORKING_DIR": '"$PWD"',
    "DSTACK_NODE_RANK": '"$NODE_RANK"',
    "DSTACK_NODES_NUM": '"$NNODES"',
    "DSTACK_NODES_IPS": f'"{_LINES}"',
    "DSTACK_MASTER_NODE_IP": '"$MASTER_ADDR"',
    "DSTACK_GPUS_PER_NODE": "@GPUS@",
    "DSTACK_GPUS_NUM": '"$((@COUNT@ * NNODES))"',
    "DSTACK_MPI_HOSTFILE": '"${TMPDIR:-/tmp}/dstack-hosts-$CAVVY_JOB_ID-$NODE_RANK"',
}
_HOSTFILE = """\
for _address in $DSTACK_NODES_IPS; do
  if [ "$DSTACK_GPUS_PER_NODE" -gt 0 ]; then
    echo "$_address slots=$DSTACK_GPUS_PER_NODE"
  else
    echo "$_address"
  fi
done > "$DSTACK_MPI_HOSTFILE"
trap 'rm -rf "$DSTACK_MPI_HOSTFILE" "${_venv:-}"' EXIT
"""
# Words that commands may contain, and shell lines that make each word work as it does on a SkyPilot
# node.
_SKYPILOT_NODE = {
    "sky_workdir": """\
_link="$(readlink ~/sky_workdir || :)"
if [ ! -e ~/sky_workdir ] || [ -e "${_link:-/none}/../exit.json" ]; then
  ln -sfn "$PWD" ~/sky_workdir
elif [ -n "$_link" ] && [ "${_link%/*/*}" != "${PWD%/*/*}" ]; then
  echo "~/sky_workdir belongs to another job that runs on this machine: $_link" >&2
  exit 1
fi
""",
    "conda": """\
for _conda in "${CONDA_EXE:-}" "$(command -v conda || :)" ~/miniconda3/bin/conda \\
  ~/miniforge3/bin/conda ~/anaconda3/bin/conda /opt/conda/bin/conda; do
  if [ -x "$_conda" ]; then eval "$("$_conda" shell.posix hook)"; break; fi
done
""",
    "bashrc": """\
if [ -f ~/.bashrc ] && [ -n "${BASH_VERSION:-}" ]; then
  eval "$(bash -ic 'export -p' 2>/dev/null </dev/null || :)"
  PATH="${VIRTUAL_ENV:+$VIRTUAL_ENV/bin:}$PATH"
fi
""",
}
# The name of a node in a job group, as shell commands write it.
_GROUP_NODE = re.compile(
    r"([\w-]+)-([0-9]{1,6})\.\$(\{SKYPILOT_JOBGROUP_NAME\}|SKYPILOT_JOBGROUP_NAME\b)"
)
# In a container, programs can also use these names.
_GROUP_HOSTS = r"""
for _task in $(env | sed -n 's/^CAVVY_HOSTS_\([A-Z0-9_]*\)=.*/\1/p'); do
  _rank=0
  for _address in $(printenv "CAVVY_HOSTS_$_task" | tr ',' ' '); do
    echo "$_address $(echo "$_task" | tr 'A-Z_' 'a-z-')-$_rank.$CAVVY_GROUP"
    _rank=$((_rank + 1))
  done
done >> /etc/hosts || echo "the names of the group's nodes cannot be written to /etc/hosts" >&2
"""
# Commands that start MPI: the nodes of the other tools have SSH, over which it starts processes.
_MPI = re.compile(r"(?<![\w$/-])mpi(run|exec)(?![\w-])")
WAITS = "the job waits for `cavvy ssh NAME` until `cavvy stop NAME`"
VARIABLES = {"SkyPilot": _SKYPILOT, "dstack": _DSTACK}


def add_translation_header(
    task: TaskSpec, kind: str, before: str = "", after: str = ""
) -> TaskSpec:
    """Add lines before the commands of a task. The lines set the variables of the tool for which
    the file was written, and then run the commands in `before`. Lines in `after` are added after
    the commands of the task.
    """
    quoted, counted = (
        ('"$NPROC_PER_NODE"', "NPROC_PER_NODE") if task.resources.accelerators else ("0", "0")
    )
    lines = ["set +e"]
    for name, words in VARIABLES[kind].items():
        lines.append(f"{name}={words.replace('@GPUS@', quoted).replace('@COUNT@', counted)}")
    lines.append(f"export {' '.join(VARIABLES[kind])}")
    if task.group is not None:
        lines.append('export SKYPILOT_JOBGROUP_NAME="$CAVVY_GROUP"')
        lines += [_GROUP_HOSTS.strip()] if task.image is not None else []
        task = _name_group_nodes(task)
    text = "\n".join(lines) + "\n" + (_HOSTFILE if kind == "dstack" else "") + before
    setup = text
    if kind == "SkyPilot":
        task = _move_setup(task)
        text += 'PATH="$PATH:$HOME/.local/bin:$HOME/.cargo/bin"\n'
        commands = f"{task.setup}\n{task.run}"
        text += "".join(part for word, part in _SKYPILOT_NODE.items() if word in commands)
        setup = f"{text}unset CUDA_VISIBLE_DEVICES\n"
        if task.nodes > 1 and STARTS_PROCESSES.search(task.run):
            text += KEEPER
    note = f"# above: the steps that {kind} would do; below: the author's own commands\n"
    run = text + note + task.run if task.run else ""
    if after:
        run = f"{run.rstrip(chr(10))}\n{after}"
    elif task.nodes > 1 and _MPI.search(task.run):
        run = f"{HOLD_COMMANDS}{run.rstrip(chr(10))}\n{run_commands(must=False)}"
    return replace(
        task,
        run=run,
        setup=setup + note + task.setup if task.setup is not None else None,
    )


def _name_group_nodes(task: TaskSpec) -> TaskSpec:
    """Return the task with the addresses of the nodes of its job group in place of their names."""

    def name(found: "re.Match[str]") -> str:
        variable = slug(found[1]).upper().replace("-", "_")
        return f'$(printf %s "$CAVVY_HOSTS_{variable}" | cut -d, -f{int(found[2]) + 1})'

    setup = None if task.setup is None else _GROUP_NODE.sub(name, task.setup)
    return replace(task, run=_GROUP_NODE.sub(name, task.run), setup=setup)


def _move_setup(task: TaskSpec) -> TaskSpec:
    """Move the setup to the start of the commands, in two cases. First, the setup may need mounted
    files, which Cavvy provides only after a setup. Second, the setup starts processes that the
    commands need, and that would end with the setup. If the task has an image, nothing is moved,
    because its setup always runs with the commands.
    """
    if task.setup is None or task.image is not None:
        return task
    if not (_needs_mounts(task, task.setup) or STARTS_PROCESSES.search(task.setup)):
        return task
    before = f"""\
(
unset CUDA_VISIBLE_DEVICES
{task.setup}
)
_code=$?  # in a list with `||`, the shell would ignore `set -e` of the setup
[ $_code = 0 ] || {{ echo "the setup ended with exit code $_code" >&2; exit $_code; }}
"""
    # A setup that does nothing is kept, because each distinct setup gets its own virtual
    # environment.
    name = hashlib.sha256(task.setup.encode()).hexdigest()
    return replace(task, run=before + task.run, setup=f"true {name}")


def _needs_mounts(task: TaskSpec, setup: str) -> bool:
    """Return whether the setup may need mounted files. For a service, only a setup that names the
    path of a mount counts, because a setup that runs with the commands delays each start of a
    replica.
    """
    paths = [*(each.target for each in task.inputs), *(each.path for each in task.volumes)]
    return any(task.service is None or path.removeprefix("~") in setup for path in paths)


def enter_folder(path: str) -> str:
    """Return shell lines that create a folder if necessary and make it the current folder. If the
    folder cannot be created or entered, the work ends.
    """
    place = _quote_path(path)
    return f"mkdir -p {place} && cd {place} || exit 1\n"


def _quote_path(path: str) -> str:
    """Return a path as a shell word. A path that starts with ~/ is in the home folder."""
    return f'"$HOME"/{quote(path[2:])}' if path.startswith("~/") else quote(path)


def write_secrets(names: Mapping[str, str]) -> str:
    """Return shell lines that write secrets into files that only the user can read, and remove the
    variables of the secrets. Existing files are not changed. `names` maps the path of each file to
    its secret. If a file cannot be written, the work ends.
    """
    lines = ""
    for path, name in names.items():
        lines += f"""\
_file={_quote_path(path)}
if [ ! -e "$_file" ]; then
  (umask 077; mkdir -p "$(dirname "$_file")" && printf '%s\\n' "${name}" > "$_file") || exit 1
fi
"""
    return lines + (f"unset {' '.join(sorted(set(names.values())))}\n" if names else "")


def use_python(version: str) -> str:
    """Return shell lines that activate a virtual environment with this Python version. If the
    environment cannot be created, the work ends.
    """
    return f"""\
_venv="$(mktemp -d)"
if command -v uv >/dev/null 2>&1; then
  uv venv -q --seed --clear -p {version} "$_venv" || exit 1
elif command -v python{version} >/dev/null 2>&1; then
  python{version} -m venv "$_venv" || exit 1
else
  echo "this needs Python {version}, and the node has neither python{version} nor uv" >&2
  exit 1
fi
. "$_venv/bin/activate"
"""


_END = "_CAVVY_END_OF_COMMANDS"
# Stores the author's commands, which follow, instead of running them.
HOLD_COMMANDS = f"""\
_commands="$(cat <<'{_END}'
"""
_RUN = f"""\
{_END}
)"
_shell="$(command -v bash || command -v sh)"
if [ "$NNODES" -gt 1 ] && ! command -v "${{CAVVY_MPI%% *}}" >/dev/null 2>&1; then
  echo "the nodes cannot be connected, because this node has no Python" >&2
  @WITHOUT@
fi
if [ "$NNODES" -le 1 ]; then
  "$_shell" -c "$_commands"
  exit $?
fi
if [ "$NODE_RANK" = 0 ]; then
  $CAVVY_MPI "$_shell" -c "$_commands"
  exit $?
fi
# The file gets the exit code of this node's commands if they fail before the master has ended.
_failed="$(mktemp)"
$CAVVY_MPI true &
_master=$!
{{
  "$_shell" -c "$_commands"
  _code=$?
  if [ $_code != 0 ]; then echo $_code > "$_failed"; kill $_master 2>/dev/null; fi
}} &
_work=$!
wait $_master
_code=$?
@WAIT@
if [ -s "$_failed" ]; then _code="$(cat "$_failed")"; fi
rm -f "$_failed"
exit $_code
"""
# Matches commands that probably start a process that continues to run after them.
STARTS_PROCESSES = re.compile(
    r"(?<![&>|\\])&(?=[\s)]|$)|\b(ray start|nohup|setsid)\b|--daemon|docker run .*-d\b"
)
# The argument of the helper is the path of a file. The shell writes to this file when the commands
# have succeeded, and the helper removes the file when the helper exits.
_HELPER = """\
import os, select, socket, sys, time
mark, since = sys.argv[1], []
def done():
    if not since and os.path.getsize(mark):
        since.append(time.monotonic())
    return bool(since)
def missing():
    return done() and time.monotonic() > since[0] + 60
def serve(port, others):
    server, working, ended = socket.create_server(("", port)), [], []
    while not done() or working or (len(ended) < others and not missing()):
        for each in select.select([server, *working], [], [], 0.3)[0]:
            if each is server:
                working.append(server.accept()[0])
                continue
            data = each.recv(99)
            if data != key:
                working.remove(each)
            if data in (b"", b".", key + b"."):
                ended.append(each)
def follow(address):
    node = None
    while node is None:
        try:
            node = socket.create_connection(address, 10)
        except OSError:
            if missing():
                return
            time.sleep(0.3)
    node.settimeout(None)
    node.sendall(key)
    while not done():
        if select.select([node], [], [], 0.3)[0]:
            return
    node.sendall(b".")
    node.recv(1)
try:
    port = int(os.environ["MASTER_PORT"]) + 2
    key = "{CAVVY_JOB_ID}-{CAVVY_ATTEMPT};".format(**os.environ).encode()
    if os.environ["NODE_RANK"] == "0":
        serve(port, int(os.environ["NNODES"]) - 1)
    else:
        follow((os.environ["MASTER_ADDR"], port))
finally:
    os.unlink(mark)
"""
KEEPER = f"""\
if command -v python3 >/dev/null 2>&1; then
  _mark="$(mktemp)"
  _helper="$(python3 -c '{_HELPER}' "$_mark" >/dev/null 2>&1 </dev/null & echo $!)"
  trap '_code=$?
  if [ $_code = 0 ] && [ -e "$_mark" ]; then
    echo >> "$_mark"
    while [ -e "$_mark" ] && kill -0 "$_helper" 2>/dev/null; do sleep 0.3; done
  fi
  rm -f "$_mark"
  exit $_code' EXIT
fi
"""


def run_commands(*, ends_with_master: bool = False, must: bool = True) -> str:
    """Return the lines that follow the author's commands and run them. `ends_with_master` means
    that a node ends when the master has ended, and its own commands are stopped. Nodes without
    Python cannot be connected: if `must` is true, the work ends, and otherwise the commands run
    without a connection.
    """
    end = "kill $_work 2>/dev/null" if ends_with_master else "wait $_work"
    without = '"$_shell" -c "$_commands"; exit $?'
    return _RUN.replace("@WAIT@", end).replace("@WITHOUT@", "exit 1" if must else without)
