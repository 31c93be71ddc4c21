"""Makes a task of a batch script of PBS.

The lines of #PBS say what the task needs, in the forms of PBS Professional and OpenPBS (`select`)
and of Torque (`nodes=2:ppn=8`). The script itself runs on the first node, as that of Slurm does.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

from cavvy.capabilities.importers.common_fields import find_needs
from cavvy.capabilities.importers.dialects import Dialect
from cavvy.capabilities.importers.own_rules import check_task
from cavvy.capabilities.importers.script_lines import (
    MOST_CHARACTERS,
    DirectiveError,
    ScriptOption,
    split_words,
    take_line,
)
from cavvy.capabilities.importers.slurm.batch_script import say_missing
from cavvy.catalog.accelerators import find_accelerator
from cavvy.domain.tasks import (
    AcceleratorNeed,
    IndexRange,
    JobLimits,
    ResourceSpec,
    RetryPolicy,
    TaskSpec,
)
from cavvy.domain.values import Struct, replace
from cavvy.spec.fields.arrays import read_indices
from cavvy.spec.fields.kinds import WrongValue
from cavvy.spec.kept_keys import TranslationNotes
from cavvy.spec.problems import ProblemNotes, SourceMark, shown, slug
from cavvy.spec.translation import Translation

_LINE = re.compile(r"#PBS(?P<gap>\s+)(?P<words>.*)")
_CLUSTER = "it names something of a PBS cluster"
# options that do not change what the script computes, and why they are left out
_NOTED = {
    "q": f"{_CLUSTER}; --pool NAME runs the job on a pool",
    "A": f"{_CLUSTER}; --project says who pays",
    "P": f"{_CLUSTER}; --project says who pays",
    "p": f"{_CLUSTER}; `priority` in the task file says what goes first",
    "m": "`cavvy notify` sends messages about jobs",
    "M": "`cavvy notify` sends messages about jobs",
    "V": "variables of this machine are not sent; name those that the job needs with --env NAME",
    "u": f"{_CLUSTER}, where you have another user name",
    "w": "the script starts in the working folder",
    "c": "`checkpoint` in a Cavvy file keeps a folder between attempts",
    "R": "files of output stay on the first node until `cavvy cp` fetches them",
}
_UNHEEDED = split_words("z k X G x f b T C")
_REFUSED = {
    "a": "`schedule: {at: TIME}` in a Cavvy file starts a job later",
    "h": "Cavvy has no held jobs; submit the job when it may run",
    "I": "`cavvy dev` opens a shell on a machine",
}
_CARRIED = split_words("N l J t o e j r S v W d")
_SWITCHES = split_words("V h z X I x f")
_ATTRIBUTES = {
    "depend": (True, "it names jobs of a PBS cluster; delete the line, and add --after NAME"),
    "stagein": (True, "`inputs` in a Cavvy file copies files to a node"),
    "stageout": (True, "`outputs` in a Cavvy file copies files from a node"),
    "block": (False, "`cavvy run` follows the job unless -d is given"),
    "umask": (False, "files get the rights that the node's umask gives"),
    "sandbox": (False, "the script starts in the working folder"),
    "group_list": (False, _CLUSTER),
    "x": (False, _CLUSTER),
    "run_count": (False, "retries count from 0"),
}
# resources of -l that do not change what the script computes
_UNUSED = {
    **dict.fromkeys(("place", "naccesspolicy", "qos", "feature", "host", "vnode"), _CLUSTER),
    **dict.fromkeys(("filesystems", "software", "arch", "cput", "pcput", "min_walltime"), _CLUSTER),
    "scratch_shared": "name a volume for files that several jobs share",
    "storage": f"{_CLUSTER}; a volume or `inputs` in a Cavvy file brings data",
}
# resources that are space on a disk of each node
_DISKS = ("file", "jobfs", "scratch", "scratch_local", "scratch_ssd", "localscratch", "tmp")
_GRES = re.compile(r"x=(?i:gres)[:=]gpus?(?:[@:]([0-9]{1,3}))?")
_CRAY = "it counts the processes of `aprun`, which no node has; write select=NODES:ncpus=NUMBER"
_SIZES = {"k": 10, "m": 20, "g": 30, "t": 40, "": 0}
# resources that may stand outside of a chunk
_PRODUCTS = ("gpu_type", "gpu_model", "gputype", "accelerator_model")
_JOB = split_words("ncpus mem vmem pmem pvmem ngpus gpus mpiprocs procs ompthreads") | {*_PRODUCTS}
_KEYS = ("nodes", "resources.cpu", "resources.memory", "resources.gpu")


class _Chunk(Struct, frozen=True, kw_only=True):
    """What each of some equal nodes of a job has. `processes` is how often its name is in the file
    of the nodes; `threads` is for OpenMP, 0 for one a CPU."""

    count: int = 1
    cpus: int = 1
    threads: int = 0
    processes: int = 1
    gpus: int = 0
    kind: str = ""
    memory_mib: int = 0
    disk_mib: int = 0
    is_stated: bool = False


def translate(text: str, notes: ProblemNotes) -> Translation:
    """Translate a batch script; mistakes are added to `notes`."""
    kept = TranslationNotes()
    reader = _PbsScriptReader(notes, kept)
    try:
        for option in read_options(text):
            reader.take(option)
    except DirectiveError as error:
        notes.add(error.mark, error.message, expected=error.expected)
        return Translation(kind=Dialect.PBS, what="batch script")
    say_missing(text, "PBS", kept)
    task, plan = reader.make_task(text.replace("\r\n", "\n"))
    return Translation(
        kind=Dialect.PBS,
        what="batch script",
        tasks=() if task is None else (task,),
        kept=kept.list_kept(),
        before=json.dumps(plan),
    )


def read_options(text: str) -> Iterator[ScriptOption]:
    """Yield the options of a script in the order of its lines. As with qsub, only lines before the
    first command count. Raises DirectiveError.
    """
    left = MOST_CHARACTERS
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith(("#", ":")):
            return
        if found := _LINE.fullmatch(line):
            left = take_line(left, line, number)
            yield from _read_line(found["words"], number, found.start("words") + 1)


def _read_line(text: str, line: int, column: int) -> Iterator[ScriptOption]:
    mark = SourceMark(line=line, column=column)
    try:
        words = shlex.split(text, comments=True)
    except ValueError as error:
        message, expected = f"the line cannot be read: {error}", "quotes in pairs"
        raise DirectiveError(mark, message, expected) from None
    while words:
        word = words.pop(0)
        if len(word) < 2 or word[0] != "-" or not word[1].isalpha():
            message = f"{word!r} is no option of qsub"
            raise DirectiveError(mark, message, "a letter and a value, such as -N NAME")
        name, value = word[1], word[2:]
        if name not in _SWITCHES and not value:
            if not words or (words[0].startswith("-") and name != "p"):
                raise DirectiveError(mark, f"-{name} has no value", f"-{name} VALUE")
            value = words.pop(0)
        yield ScriptOption(name, value, mark)


class _PbsScriptReader:
    """Reads the values of the options."""

    def __init__(self, notes: ProblemNotes, kept: TranslationNotes) -> None:
        self._notes, self._kept = notes, kept
        self._found: dict[str, ScriptOption] = {}
        self._resources: dict[str, tuple[str, SourceMark]] = {}
        self._env: dict[str, str] = {}
        self._marks: dict[str, SourceMark] = {}

    def take(self, option: ScriptOption) -> None:
        """Keep an option that is translated, and say what becomes of any other."""
        name = option.name
        if name in _REFUSED:
            self._kept.refuse(option.mark, f"-{name}", _REFUSED[name])
        elif name in _NOTED:
            self._kept.note(option.mark, f"-{name}", _NOTED[name])
        elif name == "l":
            self._take_resources(option)
        elif name == "W":
            self._take_attributes(option)
        elif name == "v":
            self._take_variables(option)
        elif name in _CARRIED:
            self._found[name] = option
        elif name not in _UNHEEDED:
            hint = "`man qsub` lists its options"
            self._notes.add(option.mark, f"qsub has no option -{name}", suggestion=hint)

    def _take_resources(self, option: ScriptOption) -> None:
        """Keep the resources of -l, such as walltime=1:00:00,mem=4gb or nodes=2:ppn=4."""
        for part in option.value.split(","):
            name, given, value = part.partition("=")
            if name.strip() == "wd" and not given:
                continue  # at NCI: the script starts in the folder from which it was submitted
            if not given or not value:
                expected = "NAME=VALUE, such as select=2:ncpus=8 or walltime=1:00:00"
                self._notes.add(option.mark, f"-l {part} has no value", expected=expected)
            else:
                self._resources[name.strip()] = value.strip(), option.mark

    def _take_attributes(self, option: ScriptOption) -> None:
        name = option.value.partition("=")[0]
        if found := _GRES.fullmatch(option.value):  # of Moab
            self._resources["gpus"] = found[1] or "1", option.mark
            return
        refused, reason = _ATTRIBUTES.get(name, (False, _CLUSTER))
        say = self._kept.refuse if refused else self._kept.note
        say(option.mark, f"-W {name}", reason)

    def _take_variables(self, option: ScriptOption) -> None:
        self._marks["env"] = option.mark
        for part in option.value.split(","):
            name, given, value = part.partition("=")
            if given:
                self._env[name] = value
            elif name:
                reason = f"variables of this machine are not sent; --env {name} sends this one"
                self._kept.note(option.mark, f"-v {name}", reason)

    def make_task(self, text: str) -> tuple[TaskSpec | None, dict[str, Any]]:
        chunk = self._read_chunk()
        seconds = self._read_walltime()
        array, parallel, indices = self._read_array()
        name = self._text("N")
        again = self._text("r")
        if again and again not in ("y", "n"):
            self._object("r", f"-r {again} is not what qsub expects", "y or n")
        if (joins := self._text("j")) and joins not in ("oe", "eo", "n"):
            self._object("j", f"-j {joins} is not what qsub expects", "oe, eo or n")
        folder = self._text("d")
        if folder.startswith(("/", "~")) or ".." in folder.split("/"):
            reason = "delete it: the script runs in the folder that --workdir FOLDER names"
            self._kept.refuse(self._found["d"].mark, "-d", reason)
        if len(self._notes):
            return None, {}
        needs = self._find_needs(chunk)
        task = TaskSpec(
            name=slug(name) or "",
            run=self._add_shell(text),
            nodes=chunk.count,
            env=self._env,
            array=array,
            parallel=parallel,
            resources=ResourceSpec(
                accelerators=needs,
                cpus_min=float(chunk.cpus) if chunk.is_stated and chunk.cpus else None,
                memory_min_mib=chunk.memory_mib or None,
                disk_gib=-(-chunk.disk_mib // 1024) or None,
            ),
            limits=JobLimits(duration=timedelta(seconds=seconds) if seconds else None),
            retry=RetryPolicy(preemption=0, node=0) if again == "n" else RetryPolicy(),
        )
        check_task(task, self._marks, SourceMark(line=1, column=1), self._notes)
        if len(self._notes):
            return None, {}
        joined = self._text("j").startswith("o")
        plan = {
            "system": "pbs",
            "name": name or "pbs_script",
            "nodes": chunk.count,
            "ntasks": chunk.count * chunk.processes,
            "per_node": chunk.processes,
            "tasks_per_node": max(1, chunk.processes),
            "cpus_per_node": chunk.cpus,
            "threads": chunk.threads or chunk.cpus,
            "gpus": chunk.gpus,
            "time_s": seconds,
            "signal": None,
            "output": self._read_path("o"),
            "error": "" if joined else self._read_path("e"),
            "append": False,
            "folder": folder,
            "array": indices,
        }
        return task, plan

    def _text(self, name: str) -> str:
        option = self._found.get(name)
        return option.value if option else ""

    def _object(self, name: str, message: str, expected: str) -> None:
        self._notes.add(self._found[name].mark, message, expected=expected)

    def _read_path(self, name: str) -> str:
        """Return the path of a file of output, without a host before it, or ""."""
        path = self._text(name)
        return path.partition(":")[2] if re.match(r"[\w.-]*:", path) else path

    def _add_shell(self, text: str) -> str:
        """Return the script with the interpreter that -S names."""
        shell = self._text("S").partition(",")[0].partition("@")[0]
        if not shell:
            return text
        return f"#!{shell}\n{text.partition(chr(10))[2] if text.startswith('#!') else text}"

    def _read_walltime(self) -> int:
        """Return the seconds of the walltime, or 0: [[H:]M:]S."""
        text, mark = self._resources.pop("walltime", ("", SourceMark(line=1, column=1)))
        if not text:
            return 0
        self._marks["limits.duration"] = mark
        parts = text.split(".")[0].split(":")
        if len(parts) > 4 or not all(each.isdecimal() and len(each) < 8 for each in parts):
            expected = "hours, minutes and seconds such as 1:30:00, or seconds"
            self._notes.add(mark, f"walltime={shown(text)} is no length of time", expected=expected)
            return 0
        seconds = 0
        for part, factor in zip(reversed(parts), (1, 60, 3600, 86400), strict=False):
            seconds += int(part) * factor
        return seconds

    def _read_array(self) -> tuple[tuple[IndexRange, ...], int | None, dict[str, int]]:
        option = self._found.get("J") or self._found.get("t")
        if option is None:
            return (), None, {}
        spans, _, most = option.value.partition("%")
        if option.name == "t" and spans.isdecimal():
            spans = f"{spans}-{spans}"
        self._marks |= {"array": option.mark, "parallel": option.mark}
        try:
            array = read_indices(spans)
            parallel = int(most) if most else None
        except ValueError as error:
            expected = "indices such as 0-99, 0-99:2 or 0-99%10"
            if isinstance(error, WrongValue) and error.expected:
                expected = error.expected
            message = f"-{option.name}: {error}"
            self._notes.add(option.mark, message, expected=expected)
            return (), None, {}
        indices = {
            "count": sum(len(span.indices) for span in array),
            "least": min(span.first for span in array),
            "most": max(span.indices[-1] for span in array),
            "step": array[0].step if len(array) == 1 else 1,
        }
        return array, parallel, indices

    def _read_chunk(self) -> _Chunk:
        """Return what each node has, by `select`, `nodes`, or by resources of the job."""
        resources = self._resources
        select, mark = resources.pop("select", ("", SourceMark(line=1, column=1)))
        nodes, at = resources.pop("nodes", ("", mark))
        if select:
            chunk = self._read_select(select, mark)
        elif nodes:
            mark, chunk = at, self._read_nodes(nodes, at)
        else:
            chunk = _Chunk()
        self._marks |= dict.fromkeys(_KEYS, mark)
        job: dict[str, str] = {}
        for name, (value, at) in list(resources.items()):
            if name.startswith("mpp"):
                self._kept.refuse(at, f"-l {name}", _CRAY)
            elif name in (*_JOB, *_DISKS):
                job[name] = value
                self._marks |= dict.fromkeys(_KEYS, at) if not (select or nodes) else {}
                resources.pop(name)
            elif name != "walltime":
                reason = _UNUSED.get(name, f"{_CLUSTER}; --gpu, --region and others choose a node")
                self._kept.note(at, f"-l {name}", reason)
        if not job:
            return chunk
        whole = self._add_values(chunk, job, self._marks["nodes"])
        if not {"mem", "vmem"} & {*job}:
            return whole
        # what is not a part of a chunk is of the whole job
        return replace(whole, memory_mib=-(-whole.memory_mib // whole.count))

    def _read_select(self, text: str, mark: SourceMark) -> _Chunk:
        """Read chunks such as 2:ncpus=8:ngpus=1+1:ncpus=4. All nodes of a job are alike."""
        chunks: list[_Chunk] = []
        for part in text.split("+"):
            first, *rest = part.split(":")
            count = "1"
            if first.isdecimal():
                count = first
            else:
                rest.insert(0, first)
            if wrong := [each for each in rest if "=" not in each]:
                expected = "NUMBER:NAME=VALUE, such as 2:ncpus=8"
                self._notes.add(mark, f"select: {wrong[0]!r} is no resource", expected=expected)
                rest = [each for each in rest if "=" in each]
            values = dict(each.partition("=")[::2] for each in rest)
            found = _Chunk(count=self._whole("select", count, mark), is_stated=True)
            chunks.append(self._add_values(found, values, mark))
        alike = {
            (each.cpus, each.threads, each.processes, each.gpus, each.kind, each.memory_mib)
            for each in chunks
        }
        if len(alike) > 1:
            reason = "its nodes differ, and all nodes of a job are alike; `group` joins several"
            self._kept.refuse(mark, "-l select", reason)
        return replace(chunks[0], count=sum(each.count for each in chunks))

    def _read_nodes(self, text: str, mark: SourceMark) -> _Chunk:
        """Read Torque's form: 2:ppn=8:gpus=1."""
        if "+" in text:
            reason = "its nodes differ, and all nodes of a job are alike; `group` joins several"
            self._kept.refuse(mark, "-l nodes", reason)
        first, *rest = text.partition("+")[0].split(":")
        values: dict[str, str] = {}
        for each in rest:
            name, given, value = each.partition("=")
            if given:
                values[name] = value
            elif find_accelerator(each):  # a property of nodes, such as v100
                values[_PRODUCTS[0]] = each
            else:
                reason = f"{_CLUSTER}; --gpu, --region and others choose a node"
                self._kept.note(mark, f"-l nodes={each}", reason)
        count = 1
        if first.isdecimal():
            count = self._whole("nodes", first, mark)
        else:
            self._kept.note(mark, f"-l nodes={first}", _CLUSTER)
        return self._add_values(_Chunk(count=count, is_stated="ppn" in values), values, mark)

    def _add_values(self, chunk: _Chunk, values: Mapping[str, str], mark: SourceMark) -> _Chunk:
        # the number of processes first, since `pmem` is of each
        for name, value in sorted(values.items(), key=lambda each: each[0] in ("pmem", "pvmem")):
            if name in ("ncpus", "ppn", "procs"):
                cpus = self._whole(name, value, mark)
                processes = chunk.processes if name == "ncpus" else cpus
                chunk = replace(chunk, cpus=cpus, is_stated=True, processes=processes)
            elif name == "mpiprocs":
                chunk = replace(chunk, processes=self._whole(name, value, mark))
            elif name in ("ngpus", "gpus"):
                chunk = replace(chunk, gpus=self._whole(name, value, mark))
            elif name in ("mem", "vmem"):
                chunk = replace(chunk, memory_mib=self._read_size(name, value, mark))
            elif name in ("pmem", "pvmem"):  # of each process
                size = self._read_size(name, value, mark) * chunk.processes
                chunk = replace(chunk, memory_mib=max(chunk.memory_mib, size))
            elif name in _DISKS:
                chunk = replace(chunk, disk_mib=self._read_size(name, value, mark))
            elif name in _PRODUCTS:
                chunk = replace(chunk, kind=value)
            elif name == "ompthreads":
                chunk = replace(chunk, threads=self._whole(name, value, mark))
            else:
                reason = _UNUSED.get(name, f"{_CLUSTER}; --gpu, --region and others choose a node")
                self._kept.note(mark, f"-l {name}", reason)
        return chunk

    def _whole(self, name: str, text: str, mark: SourceMark) -> int:
        if re.fullmatch(r"[0-9]{1,9}", text) and (int(text) or name in ("ngpus", "gpus")):
            return int(text)
        message = f"{name}={shown(text)} is not what qsub expects"
        self._notes.add(mark, message, expected="a number of at least 1")
        return 1

    def _read_size(self, name: str, text: str, mark: SourceMark) -> int:
        """Return a size in MiB. Without a unit, it is in bytes; a word (w) has 8 bytes."""
        found = re.fullmatch(r"([0-9]{1,15})([kmgt]?)([bw]?)", text.lower())
        if found is None:
            message = f"{name}={shown(text)} is not what qsub expects"
            self._notes.add(mark, message, expected="a size such as 4000mb or 64gb")
            return 0
        size = int(found[1]) * (8 if found[3] == "w" else 1) << _SIZES[found[2]]
        if not found[2] and size < 1 << 20:
            reason = f"{text} are bytes, as for qsub; write {found[1]}gb if that is meant"
            self._kept.note(mark, f"-l {name}", reason)
        return max(1, -(-size // (1 << 20)))

    def _find_needs(self, chunk: _Chunk) -> tuple[AcceleratorNeed, ...]:
        if not chunk.gpus:
            return ()
        if not chunk.kind:
            return (AcceleratorNeed(count_min=chunk.gpus),)
        found = find_needs(chunk.kind.replace("_", "-"), str(chunk.gpus))
        if found.problem:
            reason = f"{found.problem}; --gpu NAME:COUNT replaces it"
            self._kept.refuse(self._marks["resources.gpu"], "-l select", reason)
        return found.needs
