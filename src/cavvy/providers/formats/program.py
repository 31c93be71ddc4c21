"""Builds the shell program that a container of a managed service runs."""

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from cavvy.domain.tasks import TaskSpec, Volume, VolumeKind
from cavvy.domain.values import Struct
from cavvy.providers.batch.export import STAY, here_document, list_variables, make_work
from cavvy.providers.formats import Machine, count_accelerators

# The assumed part of a machine's memory that a container can use. The system and the service's
# agent need the rest.
_USABLE_MEMORY = 0.9


class ContainerSize(Struct, frozen=True, kw_only=True):
    """The resources that a container reserves on its machine."""

    cpus: int
    memory_mib: int
    accelerators: int


def choose_size(task: TaskSpec, machine: Machine | None) -> ContainerSize:
    """Return the CPUs, memory and accelerators that the container reserves. A task that requests
    accelerators or an instance type gets the machine's CPUs and memory by default. All other tasks
    get one CPU by default, and 2 GiB of memory for each CPU.
    """
    need = task.resources
    offer = machine.offer if machine else None
    whole = offer is not None and bool(need.accelerators or need.instance)
    cpus = round(need.cpus_min or (offer.vcpus if offer and whole else 1)) or 1
    memory = need.least_memory_mib(cpus)
    if not memory:
        memory = int(offer.memory_mib * _USABLE_MEMORY) if offer and whole else 2048 * cpus
    count = machine.accelerators if machine and whole else count_accelerators(need)
    return ContainerSize(cpus=cpus, memory_mib=memory, accelerators=count)


def list_container_variables(task: TaskSpec, accelerators: int) -> dict[str, str]:
    """Return the environment variables of a container, except the variables for the rank and the
    addresses.
    """
    return {**list_variables(task, task.nodes), "NPROC_PER_NODE": str(accelerators or 1)}


def list_host_volumes(task: TaskSpec) -> list[Volume]:
    """Return the task's volumes that mount a folder of the machine at an absolute path."""
    return [
        each for each in task.volumes if each.kind is VolumeKind.HOST and each.path.startswith("/")
    ]


# Lines of a program for a job with one node.
ALONE = ("export MASTER_ADDR=127.0.0.1 NODE_RANK=0 CAVVY_HOSTS=127.0.0.1",)


# Runs the program in the next argument, with bash if the image has bash, otherwise with sh.
SHELL = 'exec "$(command -v bash || command -v sh)" -c "$0"'


# Sends SIGTERM to the programs that handle it, but not to what these have started, such as the
# workers of a data loader: bit 14 of SigCgt is SIGTERM. PyTorch's own workers handle it as well,
# and are known by the signals that they handle besides (4c0 of 4e8). If nothing but shells handles
# it, all processes of the work get it.
_TELL = """\
cavvy_tell() { # SIGTERM for the programs of process $1 that handle it
    case $(readlink "/proc/$1/exe") in
    */sh | */bash | */dash | */ash | */busybox) CAVVY_SHELL=1 ;;
    *) CAVVY_SHELL= ;;
    esac
    CAVVY_MASK=$(sed -n 's/^SigCgt:.*\\(........\\)$/\\1/p' "/proc/$1/status")
    CAVVY_MASK=$((0x${CAVVY_MASK:-0}))
    if [ $((CAVVY_MASK & 0x4000)) != 0 ] && [ $((CAVVY_MASK & 0x4e8)) != $((0x4c0)) ]; then
        kill -TERM "$1"
        [ -n "$CAVVY_SHELL" ] || { CAVVY_TOLD=1 && return; }
    fi
    for CAVVY_EACH in $(cat "/proc/$1/task/$1/children"); do cavvy_tell "$CAVVY_EACH"; done
}
cavvy_stop() {
    CAVVY_TOLD=
    cavvy_tell "$CAVVY_CHILD" 2>/dev/null
    [ -n "$CAVVY_TOLD" ] || kill -TERM -- "-$CAVVY_CHILD" 2>/dev/null || kill -TERM "$CAVVY_CHILD"
}
"""


def make_program(task: TaskSpec, prepare: Sequence[str] = (), finish: Sequence[str] = ()) -> str:
    """Return the program: the lines of `prepare`, then the task's setup and work, then the lines of
    `finish`. The program exits with the exit code of the work. The lines of `finish` can read the
    work's exit code from CAVVY_CODE.

    The program passes SIGTERM on to the programs of the work, because a shell that is the first
    process of a container would ignore the signal.
    """
    lines = [
        *prepare,
        f"CAVVY_WORK=$(cat {here_document(make_work(task))}\n)",
        *list_start_lines("$CAVVY_WORK"),
        *finish,
        'exit "$CAVVY_CODE"',
    ]
    return "\n".join(lines) + "\n"


def list_start_lines(work: str) -> list[str]:
    """Return shell lines that run the shell program in the variable `work`, such as "$0", with bash
    if the image has bash, and pass SIGTERM on to its programs. Then CAVVY_CODE is the program's
    exit code.
    """
    return [
        "set -m 2>/dev/null # the work gets its own process group",
        f'"$(command -v bash || command -v sh)" -c "{STAY}; {work}" &',
        "CAVVY_CHILD=$!",
        *_TELL.splitlines(),
        "trap cavvy_stop TERM",
        "while :; do",
        '    wait "$CAVVY_CHILD"',
        "    CAVVY_CODE=$?",
        '    kill -0 "$CAVVY_CHILD" 2>/dev/null || break',
        "done",
        "# a signal ends the first wait with a code of its own, also if the work ends meanwhile",
        'wait "$CAVVY_CHILD" 2>/dev/null',
        "CAVVY_LATE=$?",
        '[ "$CAVVY_LATE" = 127 ] || CAVVY_CODE=$CAVVY_LATE # 127: this shell has asked before',
    ]


def escape_references(text: str) -> str:
    """Escape a text for services such as Kubernetes and Vertex AI, which replace `$(NAME)` with the
    value of a variable, and `$$` with `$`. The container receives the unescaped text.
    """
    return re.sub(r"\$(?=[$(])", "$$", text)


def link_folder(folder: str, path: str, *, make: bool = True) -> list[str]:
    """Return shell lines that make `path` a link to the folder. If `make` is True, the folder is
    created if it does not exist.
    """
    source = shlex.quote(folder)
    return [*([f"mkdir -p {source} || exit 1"] if make else []), *link_path(source, path)]


def link_path(source: str, path: str) -> list[str]:
    """Return shell lines that make `path` a link to `source`, which is already quoted for the
    shell. The lines rename a file or folder that already exists at `path`.
    """
    parts = PurePosixPath(path)
    parent, target = shlex.quote(str(parts.parent)), shlex.quote(str(parts))
    return [
        f"[ -L {target} ] || [ ! -e {target} ] || mv {target} {target}.before || exit 1",
        f"mkdir -p {parent} && ln -sfn {source} {target} || exit 1",
    ]


def copy_output(source: str, folder: str, file: str) -> list[str]:
    """Return shell lines that copy an output if the work's exit code is 0: the content of a folder
    into `folder`, or one file to the path `file`. `folder` and `file` are already quoted for the
    shell. If the copy fails, the shell lines set CAVVY_CODE to 1.
    """
    path = shlex.quote(source)
    return [
        '[ "$CAVVY_CODE" != 0 ] || {',
        f"    if [ -d {path} ]; then mkdir -p {folder} && cp -R {path}/. {folder}",
        f'    else mkdir -p "$(dirname {file})" && cp {path} {file}; fi',
        "} || CAVVY_CODE=1",
    ]


def split_program(program: str, length: int, count: int) -> Sequence[str] | None:
    """Split the program into at most `count` arguments without line breaks, each of at most
    `length` characters. `printf %b` joins the arguments to form the program. Cut the program at
    line breaks if this produces at most `count` arguments; otherwise cut the program into pieces of
    maximum length. Returns None if the program is too long.
    """
    lines = [
        part
        for line in program.splitlines(keepends=True)
        for part in _cut([_escape(each) for each in line], length)
    ]
    if len(lines) > count:
        lines = _cut([_escape(each) for each in program], length)
    return lines if len(lines) <= count else None


def _escape(character: str) -> str:
    if character == "\\":
        return "\\\\"
    if character == "\n":
        return "\\n"
    if character in "\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029":  # other line ends, in octal
        return "".join(f"\\0{byte:03o}" for byte in character.encode())
    return character


def _cut(characters: Sequence[str], length: int) -> list[str]:
    """Join the characters into strings of at most `length` characters each."""
    parts, current = [], ""
    for each in characters:
        if len(current) + len(each) > length:
            parts.append(current)
            current = ""
        current += each
    return [*parts, current] if current else parts
