"""Makes a task of a batch script of Slurm.

The lines of #SBATCH say what the task needs. Its command is the script itself, which runs on the
first node with the variables of sbatch and the programs of `node_tools`, as `make_ready` arranges.
"""

import difflib
import json
import re
import signal
from base64 import b64encode
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache
from hashlib import sha256
from importlib.resources import files
from math import ceil
from shlex import quote
from typing import Any, TypeVar
from zlib import compress

from cavvy.capabilities.importers.common_fields import find_needs, is_variable_name
from cavvy.capabilities.importers.dialects import Dialect
from cavvy.capabilities.importers.own_rules import check_task
from cavvy.capabilities.importers.script_lines import DirectiveError, ScriptOption, split_words
from cavvy.capabilities.importers.script_names import PROGRAMS, list_missing
from cavvy.capabilities.importers.slurm.cluster_options import make_options
from cavvy.capabilities.importers.slurm.directives import (
    SHORT,
    SWITCHES,
    list_late,
    read_gpus,
    read_mib,
    read_minutes,
    read_options,
)
from cavvy.domain.elastic import NodeRange
from cavvy.domain.tasks import (
    AcceleratorNeed,
    IndexRange,
    JobLimits,
    ResourceSpec,
    RetryPolicy,
    TaskSpec,
)
from cavvy.domain.values import replace
from cavvy.spec.fields.arrays import read_indices
from cavvy.spec.fields.kinds import WrongValue
from cavvy.spec.kept_keys import TranslationNotes
from cavvy.spec.problems import ProblemNotes, SourceMark, listed, shown, slug
from cavvy.spec.translation import Translation

_T = TypeVar("_T")
_CLOSE = 0.75  # how similar a misspelled option is to the one that was meant
_CLUSTER = "it names something of a Slurm cluster"
# options that do not change what the script computes, and why they are left out
_NOTED = {
    "account": f"{_CLUSTER}; --project says who pays",
    "qos": f"{_CLUSTER}; `priority` in the task file says what goes first",
    "partition": f"{_CLUSTER}; --pool NAME runs the job on a pool",
    "reservation": _CLUSTER,
    "nodelist": f"{_CLUSTER}; --provider and --region choose a place",
    "exclude": _CLUSTER,
    "clusters": _CLUSTER,
    "constraint": f"{_CLUSTER}; --gpu, --region and others choose a node",
    "prefer": _CLUSTER,
    "switches": f"{_CLUSTER}; `topology` keeps nodes close to each other",
    "mail-type": "`cavvy notify` sends messages about jobs",
    "mail-user": "`cavvy notify` sends messages about jobs",
    "exclusive": "a rented node is the job's alone; on a shared host, a job has what it asks for",
    "comment": "`tags` describe a job",
    "wait": "`cavvy run` follows the job unless -d is given",
    "tmp": "--disk asks for space",
    "ntasks-per-socket": "tasks are not bound to sockets",
    "ntasks-per-core": "tasks are not bound to cores",
    "sockets-per-node": "tasks are not bound to sockets",
    "cores-per-socket": "tasks are not bound to cores",
    "threads-per-core": "tasks are not bound to cores",
}
_BOUND = "tasks are not bound to cores, memory or GPUs"
_CHOICE = "it says how Slurm chooses or uses nodes, which have no other jobs here"
_NOTED |= {
    **dict.fromkeys(split_words("cpu-bind mem-bind gpu-bind hint distribution"), _BOUND),
    **dict.fromkeys(split_words("extra-node-info core-spec thread-spec"), _BOUND),
    **dict.fromkeys(split_words("cpu-freq gpu-freq power"), "the node determines its frequencies"),
    **dict.fromkeys(split_words("overcommit oversubscribe spread-job use-min-nodes"), _CHOICE),
    **dict.fromkeys(split_words("contiguous no-kill wait-all-nodes delay-boot network"), _CHOICE),
    **dict.fromkeys(
        split_words("profile acctg-freq"), "`cavvy nodes top` and `cavvy profile` measure"
    ),
    **dict.fromkeys(split_words("wckey mcs-label cluster-constraint reboot uid gid"), _CLUSTER),
    **dict.fromkeys(split_words("gres-flags tres-bind"), _BOUND),
    "priority": f"{_CLUSTER}; `priority` in the task file says what goes first",
    "kill-on-invalid-dep": "a job whose predecessor cannot end well is ended",
    "deadline": "--deadline says when the job must have ended",
    "time-min": "--time is the limit",
    "nice": f"{_CLUSTER}; `priority` in the task file says what goes first",
    "propagate": "the node determines limits",
}
# options that plug-ins of some clusters add to sbatch, which do not change what a script computes
_PLUGIN = "a plug-in of a Slurm cluster has this option"
_NOTED |= dict.fromkeys(
    split_words("nvmps quotatype async bell no-bell ear ear-policy ear-verbose x11 tmpdir"), _PLUGIN
)
_NOTED |= dict.fromkeys(
    split_words(
        "container-mount-home no-container-mount-home container-writable container-readonly "
        "container-remap-root no-container-remap-root container-entrypoint "
        "no-container-entrypoint container-name"
    ),
    "the image runs as on any node",
)
# options that say how sbatch itself speaks
_UNHEEDED = split_words("quiet verbose get-user-env parsable ignore-pbs")
_EXCLUSIVE = ("user", "mcs", "topo")
_NEEDS_GPUS = "--{} needs GPUs, and the script asks for none"
_CONTAINER = "write `image` and `volumes` in a Cavvy file"
_REFUSED = {
    "begin": "`schedule: {at: TIME}` in a Cavvy file starts a job later",
    "dependency": "it names jobs of a Slurm cluster; delete the line, and add --after NAME",
    "licenses": "Cavvy counts no licences",
    "hold": "Cavvy has no held jobs; submit the job when it may run",
    "nodefile": _CLUSTER,
    "input": "the work of a job has no input; let the script read the file",
    "gpus-per-socket": "Cavvy knows no sockets; --gpus-per-node says the same for a node",
    "het-group": "Cavvy has no jobs of several parts; `group` in a Cavvy file is similar",
    "test-only": "`cavvy plan FILE` shows what would happen",
    "burst-buffer": _CLUSTER,
    "bb": _CLUSTER,
    "bbf": _CLUSTER,
    "tres-per-task": "write --cpus-per-task and --gpus-per-task",
    "container": _CONTAINER,
    "container-mounts": _CONTAINER,
    "container-workdir": "write `cd FOLDER` in the script",
    "environment": _CONTAINER,
    **dict.fromkeys(split_words("uenv view"), "--image names an image with the same programs"),
    "container-save": "build the image before, and name it with --image",
    "export-file": "write the variables into --export=NAME=VALUE",
}
# other names of options
_ALIASES = {"tasks-per-node": "ntasks-per-node"}
# generic resources that are a part of a GPU, and of others what to write instead
_SHARES = ("shard", "mps")
_WITH_SIZE = re.compile(r"([A-Za-z][A-Za-z0-9]*)-([0-9]{1,3})")
_CARRIED = split_words(
    "job-name nodes ntasks ntasks-per-node ntasks-per-gpu cpus-per-task cpus-per-gpu mem "
    "mem-per-cpu mem-per-gpu mincpus gres gpus gpus-per-node gpus-per-task time array "
    "output error open-mode signal requeue no-requeue chdir export container-image"
)
_EVERY = _CARRIED | _UNHEEDED | SWITCHES | {*_NOTED, *_REFUSED}
_MAY_LACK_VALUES = {name for name, reason in _NOTED.items() if reason == _PLUGIN}
# the variables of sbatch that hold the value of an option, as it is
_VALUES = {
    "SLURM_GPUS": "gpus",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_CPUS_PER_GPU": "cpus-per-gpu",
    "SLURM_NTASKS_PER_GPU": "ntasks-per-gpu",
    "SLURM_JOB_QOS": "qos",
}
# an option of srun, also if an array of the shell passes it on
_CONTAINER_STEP = re.compile(r"^[^#\n]*?(?<![\w-])--container-image(?=[\s=\"')]|$)", re.MULTILINE)
_UNKNOWN = "delete the line if it is for a plug-in of one cluster, which has no meaning elsewhere"
_SIGNAL = re.compile(r"(?:([RB]{1,2}):)?(\w+)(?:@(\d{1,5}))?")
_CALL = re.compile(r"^[^#\n]*\bsbatch\b", re.MULTILINE)
_SUBMITS = (
    "the script calls sbatch: each job that it submits may cost as much as this one, and starts "
    "with the folder as it is sent now"
)
_DEFAULT_SIGNAL_S = 60  # sbatch's default SIGTIME
_END = "CAVVY_END_"
# Python of a node that lays the packed programs into the folder that it is given.
_UNPACK = """\
import base64, os, sys, zlib
for line in sys.stdin:
    name, data = line.split()
    with open(os.path.join(sys.argv[1], name), "wb") as file:
        file.write(zlib.decompress(base64.b64decode(data)))"""
# the options whose values become these keys of a task file, the most exact one first
_KEYS = {
    "nodes": ("nodes", "ntasks"),
    "array": ("array",),
    "parallel": ("array",),
    "env": ("export",),
    "grace": ("signal",),
    "image": ("container-image",),
    "resources.cpu": ("cpus-per-task", "cpus-per-gpu", "mincpus", "ntasks-per-node", "ntasks"),
    "resources.memory": ("mem", "mem-per-cpu", "mem-per-gpu"),
    "resources.gpu": ("gres", "gpus-per-node", "gpus", "gpus-per-task"),
    "limits.duration": ("time",),
}


def translate(text: str, notes: ProblemNotes) -> Translation:
    """Translate a batch script; mistakes are added to `notes`."""
    kept = TranslationNotes()
    try:
        options = list(read_options(text, _MAY_LACK_VALUES))
    except DirectiveError as error:
        notes.add(error.mark, error.message, expected=error.expected)
        return Translation(kind=Dialect.SLURM, what="batch script")
    found: dict[str, ScriptOption] = {}
    for option in options:
        _sort(option, found, notes, kept)
    for mark in list_late(text):
        kept.note(mark, "#SBATCH", "as with sbatch, lines after the first command do not count")
    say_missing(text, "SLURM", kept)
    if "srun" in text and (step := _CONTAINER_STEP.search(text)):
        mark = SourceMark(line=text.count("\n", 0, step.end()) + 1, column=1)
        reason = "a step runs in the image of the job; --image NAME says which one"
        kept.refuse(mark, "srun --container-image", reason)
    reader = _ScriptReader(found, notes, kept)
    task, plan = reader.make_task(text.replace("\r\n", "\n"))
    return Translation(
        kind=Dialect.SLURM,
        what="batch script",
        tasks=() if task is None else (task,),
        kept=kept.list_kept(),
        before=json.dumps(plan),
        notes=(_SUBMITS,) if "sbatch" in plan else (),
    )


def say_missing(text: str, prefix: str, kept: TranslationNotes) -> None:
    """Say which variables and programs a script names that a node lacks."""
    if prefix not in text and not any(each in text for each in PROGRAMS):
        return
    tools = files("cavvy.capabilities.importers.slurm").joinpath("node_tools.py").read_text("utf-8")
    known = {*re.findall(rf'"({prefix}\w*)"', tools), *_VALUES}
    for each in list_missing(text, prefix, known):
        reason = PROGRAMS.get(each.name, "nothing sets this variable here, so it is empty")
        kept.note(each.mark, each.name, reason)


def calls_sbatch(text: str) -> bool:
    """Return whether a script names `sbatch` outside of its comments."""
    return _CALL.search(text) is not None


def make_ready(task: TaskSpec, source: Translation) -> TaskSpec:
    """Return the task with the programs of Slurm or PBS that its script expects on a node."""
    script = task.run if task.run.startswith("#!") else f"#!/bin/bash\n{task.run}"
    run = f"""\
set +e
CAVVY_SLURM="$(mktemp -d)" || exit 1
trap 'rm -rf "$CAVVY_SLURM"' EXIT
CAVVY_SLURM_PYTHON="${{CAVVY_MPI%% *}}"
command -v "$CAVVY_SLURM_PYTHON" >/dev/null 2>&1 || CAVVY_SLURM_PYTHON="$(command -v python3)" || {{
  echo "a batch script of {source.kind} needs Python on the node" >&2
  exit 1
}}
CAVVY_SLURM_WORK="$PWD"
CAVVY_SLURM_PLAN={quote(source.before)}
export CAVVY_SLURM CAVVY_SLURM_PYTHON CAVVY_SLURM_WORK CAVVY_SLURM_PLAN
cat > "$CAVVY_SLURM/slurm_script" {_here(script)}
chmod 700 "$CAVVY_SLURM/slurm_script"
# The programs that the script calls, such as srun, for nodes without {source.kind}; compressed.
"$CAVVY_SLURM_PYTHON" -I -c {quote(_UNPACK)} "$CAVVY_SLURM" {_here(_pack_programs())}
"$CAVVY_SLURM_PYTHON" "$CAVVY_SLURM/tools.py" batch "$CAVVY_SLURM/slurm_script"
exit $?
"""
    return replace(task, run=run)


def _here(text: str) -> str:
    """Return the here-document that gives a command this text; without it, the job ends."""
    end = f"{_END}{sha256(text.encode()).hexdigest()[:16]}"  # which the text does not have
    return f"<<'{end}' || exit 1\n{text.rstrip()}\n{end}"


@cache
def _pack_programs() -> str:
    """Return the files of the programs: a line each, with the name and the compressed text."""
    lines = []
    for name, source in (("tools.py", "node_tools.py"), ("queries.py", "node_queries.py")):
        data = files(__package__).joinpath(source).read_bytes()
        lines.append(f"{name} {b64encode(compress(data, 9)).decode()}")
    return "\n".join(lines)


def _sort(
    option: ScriptOption,
    found: dict[str, ScriptOption],
    notes: ProblemNotes,
    kept: TranslationNotes,
) -> None:
    """Keep an option that is translated, and say what becomes of any other."""
    name = _complete(option.name)
    found[name] = option
    if name in _CARRIED or name == "constraint":
        return
    if name in _REFUSED:
        kept.refuse(option.mark, f"--{name}", _REFUSED[name])
    elif name in _NOTED:
        kept.note(option.mark, f"--{name}", _NOTED[name])
    elif name not in _UNHEEDED and name not in SWITCHES:
        near = difflib.get_close_matches(name, sorted(_EVERY), 1, _CLOSE)
        hint = f"did you mean --{near[0]}?" if near else _UNKNOWN
        notes.add(option.mark, f"sbatch has no option --{shown(name)[1:-1]}", suggestion=hint)


def _complete(name: str) -> str:
    """Return the option that a name means: its beginning is enough, if no other has it."""
    if name in _EVERY:
        return name
    fits = [each for each in (*_EVERY, *_ALIASES) if each.startswith(name)] if name else []
    meant = {_ALIASES.get(each, each) for each in fits}
    return meant.pop() if len(meant) == 1 else name


class _ScriptReader:
    """Reads the values of the options."""

    def __init__(
        self, found: Mapping[str, ScriptOption], notes: ProblemNotes, kept: TranslationNotes
    ) -> None:
        self._found, self._notes, self._kept = found, notes, kept

    def make_task(self, text: str) -> tuple[TaskSpec | None, dict[str, Any]]:
        nodes, tasks, per_node, sizes = self._read_tasks()
        most = per_node if per_node * nodes == tasks else ceil(tasks / nodes)
        kind, gpus, gpus_per_task = self._read_gpus(nodes, most)
        cpus_per_task = self._number("cpus-per-task") or 0
        cpus = self._read_cpus(most, cpus_per_task, gpus)
        memory = self._read_memory(cpus or most, gpus)
        minutes = self._value("time", read_minutes, "minutes, or H:M:S, or D-H:M:S")
        warning = self._read_signal()
        array, parallel, indices = self._read_array()
        name = self._text("job-name")
        env = self._read_env()
        if len(self._notes):
            return None, {}
        ahead = warning["seconds"] if warning else 0
        limit = ceil(minutes) * 60 if minutes else 0  # sbatch rounds up to minutes
        # A script that requeues itself has its time anew in each run, which `node_tools` measures.
        ends = "scontrol requeue" not in text and "requeue" not in self._found
        task = TaskSpec(
            name=slug(name) or "",
            run=text,
            nodes=nodes,
            elastic=sizes,
            image=self._read_image(),
            env=env,
            array=array,
            parallel=parallel,
            resources=ResourceSpec(
                accelerators=self._find_needs(kind, gpus) if gpus else (),
                options=make_options(self._found),
                cpus_min=float(cpus) if cpus else None,
                memory_min_mib=memory,
            ),
            limits=JobLimits(duration=timedelta(seconds=limit) if limit and ends else None),
            retry=self._find_retry(),
            grace=timedelta(seconds=ahead) if ahead else timedelta(seconds=10),
        )
        check_task(task, self._find_marks(), SourceMark(line=1, column=1), self._notes)
        if len(self._notes):
            return None, {}
        plan = {
            "name": name or "slurm_script",
            "nodes": nodes,
            "ntasks": tasks,
            "tasks_follow": sizes is not None and "ntasks" not in self._found,
            "per_node": per_node,
            "tasks_per_node": most,
            "cpus_per_task": cpus_per_task,
            "cpus_per_node": cpus or 0,
            "memory_mib": memory if "mem" in self._found and memory else 0,
            "set": self._list_set(cpus or most, gpus, memory),
            "gpus": gpus,
            "gpus_per_task": gpus_per_task,
            "time_s": limit,
            "signal": warning,
            "array": indices,
            **self._list_as_stated(text),
        }
        return task, plan

    def _list_as_stated(self, text: str) -> dict[str, Any]:
        """Return what the programs on the node need of the script as it states it."""
        found: dict[str, Any] = {
            "output": self._text("output") or self._find_output(text),
            "error": self._text("error"),
            "append": self._text("open-mode").startswith("a"),
            "exclusive": self._check_words(),
            "partition": self._text("partition"),
            "account": self._text("account"),
            "folder": self._read_folder(),
        }
        if calls_sbatch(text):
            found["sbatch"] = {
                "short": SHORT,
                "switches": sorted(SWITCHES),
                "known": sorted({*_EVERY, "wrap"}),
            }
        return found

    def _list_set(self, cpus: int, gpus: int, memory: int | None) -> dict[str, Any]:
        """Return the variables that state the value of an option."""
        found: dict[str, Any] = {
            variable: self._text(name) for variable, name in _VALUES.items() if name in self._found
        }
        if memory and "mem-per-cpu" in self._found:
            found["SLURM_MEM_PER_CPU"] = memory // cpus
        if memory and gpus and "mem-per-gpu" in self._found:
            found["SLURM_MEM_PER_GPU"] = memory // gpus
        return found

    def _find_marks(self) -> dict[str, SourceMark]:
        """Return the option that says the value of each key of a task file."""
        return {
            key: self._found[named[0]].mark
            for key, names in _KEYS.items()
            if (named := [each for each in names if each in self._found])
        }

    def _find_output(self, text: str) -> str:
        """Return the file of output that sbatch makes by default, if the script names it, or ""."""
        if not re.search(r"slurm-[$%{*]|StdOut", text):
            return ""
        return "slurm-%A_%a.out" if "array" in self._found else "slurm-%j.out"

    def _find_retry(self) -> RetryPolicy:
        if "no-requeue" in self._found:
            return RetryPolicy(preemption=0, node=0)
        return RetryPolicy()

    def _text(self, name: str) -> str:
        option = self._found.get(name)
        return option.value if option else ""

    def _value(self, name: str, read: Callable[[str], _T], expected: str) -> _T | None:
        """Return the value of an option, or None if it is absent, or wrong, which is noted."""
        option = self._found.get(name)
        if option is None:
            return None
        try:
            return read(option.value)
        except WrongValue as error:
            self._notes.add(
                option.mark,
                f"--{name}: {error}",
                expected=error.expected or expected,
                suggestion=error.suggestion,
            )
            return None
        except (ValueError, OverflowError):
            message = f"--{name}={shown(option.value)} is not what sbatch expects"
            self._notes.add(option.mark, message, expected=expected)
            return None

    def _number(self, name: str) -> int | None:
        def read(text: str) -> int:
            number = int(text)
            if number < 1:
                raise ValueError(text)
            return number

        return self._value(name, read, "a number of at least 1")

    def _object(self, name: str, message: str, hint: str = "") -> None:
        self._notes.add(self._found[name].mark, message, suggestion=hint)

    def _read_tasks(self) -> tuple[int, int, int, NodeRange | None]:
        """Return the least number of nodes, and of tasks on them, that of tasks on each node (0:
        not stated), and the range of nodes."""

        def read(text: str) -> tuple[int, int]:
            least, _, most = text.partition("-")
            found = int(least), int(most or least)
            if not 0 < found[0] <= found[1]:
                raise ValueError(text)
            return found

        span = self._value("nodes", read, "a number such as 2, or a range such as 2-4")
        tasks, per_node = self._number("ntasks"), self._number("ntasks-per-node") or 0
        per_gpu = self._number("ntasks-per-gpu")
        if per_gpu and tasks is None and not per_node:
            per_node = per_gpu * self._count_gpus(span[0] if span else 1)
        nodes = span[0] if span else ceil((tasks or 1) / per_node) if per_node else 1
        if tasks is not None and span and tasks < nodes:
            nodes = tasks  # as sbatch does, with a warning
            self._kept.note(
                self._found["nodes"].mark,
                "--nodes",
                f"{tasks} tasks need no more than {tasks} nodes",
            )
        most = min(span[1], tasks or span[1]) if span else nodes
        sizes = NodeRange(least=nodes, most=most) if most > nodes else None
        return nodes, tasks or (per_node or 1) * nodes, per_node, sizes

    def _check_words(self) -> bool:
        """Check the options of which Slurm knows a few words. Return whether the job wants whole
        nodes."""
        if (word := self._text("exclusive")) and word.lower() not in _EXCLUSIVE:
            message = f"--exclusive={word} is not what sbatch expects"
            self._object("exclusive", message, f"write no value, or {listed(_EXCLUSIVE)}")
        if (word := self._text("open-mode")) and word[0] not in "at":
            message = f"--open-mode={word} is not what sbatch expects"
            self._object("open-mode", message, "write append or truncate")
        return "exclusive" in self._found

    def _count_gpus(self, nodes: int) -> int:
        """Return the GPUs of a node for `--ntasks-per-gpu`, or 0, which is noted."""
        expected = "a number, or TYPE:NUMBER such as a100:4"
        for name, read in (("gpus-per-node", read_gpus), ("gres", _read_gres), ("gpus", read_gpus)):
            if found := self._value(name, read, expected):
                return ceil(found[1] / nodes) if name == "gpus" else found[1]
        message = _NEEDS_GPUS.format("ntasks-per-gpu")
        self._object("ntasks-per-gpu", message, "write --ntasks, or add --gpus-per-node")
        return 0

    def _read_gpus(self, nodes: int, most: int) -> tuple[str, int, int]:
        """Return the type of the GPUs, or "", their number on each node, and for each task."""
        expected = "a number, or TYPE:NUMBER such as a100:4"
        counts: dict[str, int] = {}
        kinds: dict[str, str] = {}

        def take(name: str, found: tuple[str, int] | None, scale: Callable[[int], int]) -> int:
            if found is None or not found[1]:
                return 0
            counts[name] = scale(found[1])
            if found[0]:
                kinds[name] = found[0]
            return found[1]

        gres = self._value("gres", _read_gres, "gpu:NUMBER or gpu:TYPE:NUMBER, once")
        self._sort_gres()
        take("gres", gres, lambda count: count)
        on_node = self._value("gpus-per-node", read_gpus, expected)
        take("gpus-per-node", on_node, lambda count: count)
        in_all = self._value("gpus", read_gpus, expected)
        take("gpus", in_all, lambda count: ceil(count / nodes))
        each = take(
            "gpus-per-task",
            self._value("gpus-per-task", read_gpus, expected),
            lambda count: count * most,
        )
        if len({*counts.values()}) > 1:
            (one, few), (two, many) = list(counts.items())[:2]
            message = f"--{one} asks for {few} GPUs on a node, and --{two} for {many}"
            self._object(two, message, "keep one of the two lines")
        if len({*map(str.lower, kinds.values())}) > 1:
            message = f"two types of GPUs: {' and '.join(kinds.values())}"
            self._object(list(kinds)[-1], message, "keep one of the two lines")
        kind = next(iter(kinds.values()), "")
        if counts and not kind:
            kind = self._read_constraint()
        elif "constraint" in self._found:
            self._note_constraint()
        return kind, next(iter(counts.values()), 0), each

    def _sort_gres(self) -> None:
        """Say what becomes of generic resources other than GPUs."""
        for part in self._text("gres").split(","):
            name = part.strip().partition(":")[0].removeprefix("gres/")
            if name in _SHARES:
                reason = f"{name} is a part of a GPU; write gpu:1 for a whole one"
                self._kept.refuse(self._found["gres"].mark, "--gres", reason)
            elif name not in ("", "gpu", "none"):
                reason = f"{name} is a resource of a cluster; --gpu asks for accelerators, "
                reason += "and --disk for space"
                self._kept.note(self._found["gres"].mark, "--gres", reason)

    def _note_constraint(self) -> None:
        mark = self._found["constraint"].mark
        self._kept.note(mark, "--constraint", _NOTED["constraint"])

    def _read_constraint(self) -> str:
        """Return the type of GPU that a constraint names, as many clusters have it."""
        from cavvy.catalog.accelerators import find_accelerator

        if "constraint" not in self._found:
            return ""
        words = re.findall(r"[\w.-]+", self._text("constraint"))
        kinds = [word for word in words if re.search(r"[a-zA-Z]", word) and find_accelerator(word)]
        if len(kinds) == 1:
            return str(kinds[0])
        self._note_constraint()
        return ""

    def _find_needs(self, kind: str, gpus: int) -> tuple[AcceleratorNeed, ...]:
        from cavvy.catalog.accelerators import find_accelerator

        if not kind or kind.lower() == "gpu":
            return (AcceleratorNeed(count_min=gpus),)
        name = kind.replace("_", "-")
        if (sized := _WITH_SIZE.fullmatch(name)) and not find_accelerator(name):
            name = f"{sized[1]}-{sized[2]}GB"  # as in v100-32
        found = find_needs(name, str(gpus))
        problem = found.problem
        if not problem and not all(find_accelerator(each.name or "") for each in found.needs):
            problem = f"{kind} is no GPU of the catalog"
        if re.search(r"\dg\.\d+gb", kind.lower()):
            problem = f"{kind} is a slice of a GPU"
        if problem:
            name = next(
                name
                for name in ("gres", "gpus-per-node", "gpus", "gpus-per-task", "constraint")
                if kind in self._text(name)
            )
            reason = f"{problem}; --gpu NAME:COUNT replaces it"
            self._kept.refuse(self._found[name].mark, f"--{name}", reason)
            return (AcceleratorNeed(count_min=gpus),)
        return found.needs

    def _read_cpus(self, most: int, each: int, gpus: int) -> int | None:
        per_gpu = self._number("cpus-per-gpu")
        least = self._number("mincpus")
        if per_gpu and not gpus:
            self._object(
                "cpus-per-gpu",
                _NEEDS_GPUS.format("cpus-per-gpu"),
                "write --cpus-per-task, or add --gpus",
            )
        if each:
            return max(most * each, least or 0)
        return max((per_gpu or 0) * gpus, least or 0) or (most if most > 1 else None)

    def _read_memory(self, cpus: int, gpus: int) -> int | None:
        expected = "a size such as 4000M, 64G or 1T; without a unit, it is in megabytes"
        stated = [name for name in ("mem", "mem-per-cpu", "mem-per-gpu") if name in self._found]
        if len(stated) > 1:
            first, last = stated[0], stated[-1]
            self._object(last, f"--{first} and --{last} exclude each other", "keep one of them")
            return None
        sizes = {name: self._value(name, read_mib, expected) for name in stated}
        if sizes.get("mem") == 0:
            reason = "a node's whole memory; a rented node is the job's alone"
            self._kept.note(self._found["mem"].mark, "--mem", reason)
        if "mem-per-gpu" in sizes and not gpus:
            self._object(
                "mem-per-gpu", _NEEDS_GPUS.format("mem-per-gpu"), "write --mem, or add --gpus"
            )
        factor = {"mem": 1, "mem-per-cpu": cpus, "mem-per-gpu": gpus}
        return next((size * factor[name] for name, size in sizes.items() if size), None)

    def _read_signal(self) -> dict[str, Any] | None:
        """Return what `--signal` says: the number, whether the script gets it, and how long before
        the end.
        """

        def read(text: str) -> dict[str, Any]:
            found = _SIGNAL.fullmatch(text)
            if found is None:
                raise ValueError(text)
            name = found[2].upper()
            names = {each.name.removeprefix("SIG"): int(each) for each in signal.Signals}
            number = int(name) if name.isdigit() else names.get(name.removeprefix("SIG"))
            if number is None or number not in names.values():
                raise ValueError(text)
            seconds = int(found[3] or _DEFAULT_SIGNAL_S)
            return {"number": int(number), "batch": "B" in (found[1] or ""), "seconds": seconds}

        return self._value("signal", read, "a signal such as USR1@120 or B:TERM@60")

    def _read_array(self) -> tuple[tuple[IndexRange, ...], int | None, dict[str, int]]:
        def read(text: str) -> tuple[tuple[IndexRange, ...], int | None]:
            spans, _, most = text.partition("%")
            # sbatch skips [ before an index and ] after it, as in [0-90]%20
            spans = re.sub(r"(^|,)\[|\](?=-|:|,|$)", r"\1", spans)
            # a number alone is an index here, and may be a count in a Cavvy file
            spans = f"{spans}-{spans}" if spans.isdecimal() else spans
            return read_indices(spans), int(most) if most else None

        expected = "indices such as 0-99, 1,3,5, 0-9:2 or 0-99%10, each once"
        value = self._value("array", read, expected)
        if value is None:
            return (), None, {}
        spans, parallel = value
        indices = {
            "count": sum(len(span.indices) for span in spans),
            "least": min(span.first for span in spans),
            "most": max(span.indices[-1] for span in spans),
            "step": spans[0].step if len(spans) == 1 else 1,
        }
        return spans, parallel or None, indices

    def _read_env(self) -> dict[str, str]:
        parts = self._text("export").split(",") if "export" in self._found else []
        env = dict(part.split("=", 1) for part in parts if "=" in part)
        for name in env:
            if not is_variable_name(name):
                hint = "a name has letters, digits and _, and does not begin with a digit"
                self._object("export", f"{name!r} cannot be the name of a variable", hint)
        named = [part for part in parts if part and "=" not in part and part not in ("ALL", "NONE")]
        if named:
            self._kept.note(
                self._found["export"].mark,
                "--export",
                "variables of this machine are not sent; name those that the job needs: "
                + " ".join(f"--env {each}" for each in named),
            )
        return env

    def _read_folder(self) -> str:
        """Return the folder in the working folder in which the script runs, or ""."""
        folder = self._text("chdir")
        if folder.startswith(("/", "~")) or ".." in folder.split("/"):
            reason = "delete it: the script runs in the folder that --workdir FOLDER names"
            self._kept.refuse(self._found["chdir"].mark, "--chdir", reason)
        return folder

    def _read_image(self) -> str | None:
        """Return the image of pyxis, a plug-in of Slurm, which writes # between registry and name:
        https://github.com/NVIDIA/pyxis
        """
        image = self._text("container-image").removeprefix("docker://")
        return image.replace("#", "/", 1) or None


def _read_gres(text: str) -> tuple[str, int] | None:
    """Return the type and number of the GPUs among generic resources."""
    found = None
    for part in text.split(","):
        name, colon, rest = part.strip().partition(":")
        if name in ("gpu", "gres/gpu"):
            if found is not None or (colon and not rest):
                raise ValueError(text)
            found = read_gpus(rest or "1")
        elif not re.fullmatch(r"[\w/.-]+", name):
            raise ValueError(text)
    return found
