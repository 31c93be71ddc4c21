"""Makes a task of a script of Python or of a shell, a notebook, a Makefile, an MLflow project or a
file of `accelerate config`: its command, and how to install what it needs.

`cavvy run train.py --gpu H100:8 -- --lr 0.1` runs `torchrun … train.py --lr 0.1` if the script uses
`torch.distributed`, after the dependencies that the script states in its head (PEP 723), or that a
file beside or above it states.
"""

import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from shlex import join, quote
from typing import Any

from cavvy.capabilities.importers.accelerate_configs import is_accelerate_config, read_accelerate
from cavvy.capabilities.importers.dependency_files import FileSetup, find_file_setup
from cavvy.capabilities.importers.detect import is_batch_name
from cavvy.capabilities.importers.mlflow_projects import NAME as PROJECT
from cavvy.capabilities.importers.mlflow_projects import read_project
from cavvy.capabilities.importers.notebooks import SUFFIX, read_notebook, read_notebook_text
from cavvy.capabilities.importers.ray_lines import is_here
from cavvy.capabilities.importers.script_names import list_missing
from cavvy.task_files.foreign import ScriptTask

# https://packaging.python.org/en/latest/specifications/inline-script-metadata/
_HEAD, _HEAD_END = "# /// script", "# ///"
# Only uv knows what the table `tool.uv` says: of which index or repository a package is.
_UV = (
    "python3 -m pip install uv && uv sync --quiet --active --inexact "
    '--python "$(command -v python3)" --script {script}'
)
_COPY_HEAD = """\
head="$(mktemp -d)/head.py"
cat > "$head" <<'END'
{head}
END
{sync}"""
# The process group, or what reads the variables that torchrun sets.
_DISTRIBUTED = re.compile(
    r"\btorch\.distributed\b|\bfrom torch import distributed\b|\binit_process_group\("
    r"|environ(?:\.get\(|\[)\s*[\"'](?:LOCAL_RANK|WORLD_SIZE)[\"']"
)
# What torch.distributed.launch gives each process, and torchrun only as a variable.
_LOCAL_RANK = re.compile(r"add_argument\(\s*[\"'](--local[_-]rank)[\"']")
_READS_VARIABLE = re.compile(r"[\"']LOCAL_RANK[\"']")
_COMMENT = re.compile(r"^[ \t]*#.*$", re.MULTILINE)
# A script that starts its processes itself.
_SPAWNS = re.compile(r"\bmp\.spawn\(|multiprocessing\.spawn\(|\bnotebook_launcher\(")
_TORCHRUN = (
    'torchrun --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC_PER_NODE" '
    '--master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"'
)
_MOST_READ = 1 << 20  # characters
_INTERPRETERS = {".py": "python3", ".sh": "bash", ".bash": "bash"}
_MAKEFILES = ("Makefile", "makefile", "GNUmakefile")
_OTHER_SYSTEMS = (
    ("#BSUB", "LSF", re.compile(r"^#BSUB\s+-", re.MULTILINE)),
    ("#$", "Grid Engine", re.compile(r"^#\$\s+-[a-zA-Z]", re.MULTILINE)),
    ("#COBALT", "Cobalt", re.compile(r"^#COBALT\s+-", re.MULTILINE)),
    ("#PJM", "a Fujitsu system", re.compile(r"^#PJM\s+-", re.MULTILINE)),
    ("#OAR", "OAR", re.compile(r"^#OAR\s+-", re.MULTILINE)),
    (
        "#SBTACH",
        "nothing (#SBATCH may be meant)",
        re.compile(r"^#(?!SBATCH)SB[TACH]{4}\s+-", re.MULTILINE),
    ),
)
_OF_SLURM = re.compile(
    r"(?:^[ \t]*(?:\w+=\S*[ \t\\\n]+)*|^[^#\n]*(?:\$\(|`)[ \t]*)"
    r"(srun|sbatch|salloc|squeue|scontrol)\b",
    re.MULTILINE,
)
# A command that starts one process for each of several GPUs of a node, and how many after it.
_LAUNCHES = re.compile(
    r"\b(torchrun|accelerate launch|deepspeed|torch\.distributed\.(?:run|launch))\b"
)
_PROCESSES = re.compile(r"\s--(?:nproc[-_]per[-_]node|num[-_]processes|num_gpus)[= ](\d{1,3})\b")
_ON_CPUS = re.compile(r"\s--(?:use_)?cpu\b")
_RAY_SUBMIT = re.compile(r"^[ \t]*ray job submit\b((?:[^\n\\]|\\.|\\\n)*)", re.MULTILINE)
_DIRECTIVES = re.compile(r"^#(SBATCH|PBS)\s", re.MULTILINE)


def read_start(path: Path) -> str:
    """Return the text of a notebook, or the start of another script, which says how it runs.
    Raises ValueError for a notebook that is too large, OSError and UnicodeDecodeError.
    """
    if path.suffix == SUFFIX:
        return read_notebook_text(path)
    with path.open(encoding="utf-8") as file:
        return file.read(_MOST_READ + 1)


def is_script(path: Path, text: str) -> bool:
    """Return whether a file is a script without directives of a batch system. A task file may name
    Cavvy as its interpreter.
    """
    first = text.partition("\n")[0]
    if is_batch_name(path.name) and first.startswith("#!"):
        return False
    found = _DIRECTIVES.search(text)
    if found and (first.startswith("#!") or (found[1] == "PBS" and text.lstrip().startswith("#"))):
        return False
    if path.suffix in (".yaml", ".yml", ".json"):
        return is_accelerate_config(text)
    known = path.suffix in (*_INTERPRETERS, SUFFIX) or path.name in (*_MAKEFILES, PROJECT)
    return known or (first.startswith("#!") and "cavvy" not in first and not _looks_like_yaml(path))


def read_script(
    path: Path, text: str, arguments: Sequence[str], here: Path, *, processes: int
) -> ScriptTask:
    """Return the task of a script in the folder `here`, or elsewhere. `processes` is how many GPUs
    its job has. Raises ValueError for a head that cannot be read.
    """
    suffix, path = path.suffix, path.resolve()  # a link may lead to a file with another name
    folder = here if path.is_relative_to(here) else path.parent
    name = str(path.relative_to(folder))
    keys: dict[str, Any] = {}
    notes: list[str] = []
    if folder != here:
        keys["workdir"] = str(folder)
    if suffix == SUFFIX:
        setup = find_file_setup(path, folder, notes)
        found, said = read_notebook(path, text, arguments, name, setup)
        return ScriptTask(keys=_add_setup({**keys, **found}, setup), notes=(*notes, *said))
    if path.name == PROJECT:
        found, said = read_project(path, text, arguments)
        if folder != path.parent or folder != here:
            keys["workdir"] = str(path.parent)
        return ScriptTask(keys={**keys, **found}, notes=(*notes, *said))
    if suffix in (".yaml", ".yml", ".json"):
        found, said = read_accelerate(path, name, text, arguments)
        script = here / arguments[0]
        if script.suffix == ".py" and script.is_file():
            setup = _find_setup(script, script.read_text("utf-8"), here, notes)
            found = _add_setup(found, setup)
        return ScriptTask(keys={**keys, **found}, notes=(*notes, *said))
    notes += _list_unread(text)
    if processes == 1:
        notes += _list_launches(path.name, text)
    command = [*_find_interpreter(path, suffix, text), name, *arguments]
    if command[0] == "python3":
        code = _COMMENT.sub("", text)
        if processes > 1 and _DISTRIBUTED.search(code) and not _SPAWNS.search(code):
            keys["run"] = f"exec {_TORCHRUN} {_write_rank(code, command[1:])}"
            notes.append(
                f"{path.name} uses torch.distributed, so torchrun starts it once for each of the "
                f"{processes} GPUs"
            )
        keys.setdefault("run", f"exec {join(command)}")
        keys = _add_setup(keys, _find_setup(path, text, folder, notes))
    keys.setdefault("run", f"exec {join(command)}")
    return ScriptTask(keys=keys, notes=tuple(notes))


def _write_rank(code: str, words: Sequence[str]) -> str:
    """Return the script and its arguments, as words of a shell; with the option for the rank of a
    process, if the script has it and does not read the variable of torchrun.
    """
    found = _LOCAL_RANK.search(code)
    if found is None or _READS_VARIABLE.search(code):
        return join(words)
    script = f'exec python3 "$0" {found[1]}="$LOCAL_RANK" "$@"'
    return f"--no-python sh -c {quote(script)} {join(words)}"


def _list_unread(text: str) -> list[str]:
    """Say what a script has for a batch system that is not read, or not by a plain script."""
    notes = [
        f"lines of {word} are for {system}, and are not read: options such as --gpu, --cpu and "
        "--array say what the job needs"
        for word, system, pattern in _OTHER_SYSTEMS
        if pattern.search(text)
    ]
    if found := _OF_SLURM.search(text):
        notes.append(
            f"the script calls {found[1]}, which only batch scripts find: --as slurm reads it as "
            "one of Slurm"
        )
    elif missing := next((each.name for each in list_missing(text, "SLURM_", ())), ""):
        notes.append(
            f"the script uses {missing}, which only batch scripts have: --as slurm reads it as one "
            "of Slurm"
        )
    submits = _RAY_SUBMIT.search(text)
    if submits and "ray start" not in text and _submits_here(submits[1]):
        notes.append(
            "the script submits a job to a cluster of Ray on its own machine, and starts none: "
            "`cavvy run -- ray job submit … -- COMMAND` runs such a line as a job"
        )
    return notes


def _list_launches(name: str, text: str) -> list[str]:
    """Say that a script starts processes for several GPUs, for which its job does not ask."""
    found = []
    for each in re.split(r"[\n;|&]", _COMMENT.sub("", text).replace("\\\n", " ")):
        launcher = _LAUNCHES.search(each)
        processes = launcher and _PROCESSES.search(each, launcher.end())
        if launcher and processes and not _ON_CPUS.search(each):
            found.append((launcher[1], int(processes[1])))
    program, count = max(found, key=lambda each: each[1], default=("", 1))
    if count < 2:
        return []
    return [
        f"{name} starts {count} processes with {program}, and its job has at most one GPU; if each "
        f"process needs one, add for example --gpu A100:{count}"
    ]


def _submits_here(words: str) -> bool:
    """Return whether words of `ray job submit` name no cluster, or one on the same machine."""
    found = re.search(r"--address[= ]+[\"']?([^\s\"']+)", words)
    return found is None or is_here(found[1])


def _looks_like_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml", ".json")


def _find_interpreter(path: Path, suffix: str, text: str) -> list[str]:
    """Raises ValueError if nothing says which program runs the script."""
    if path.name in _MAKEFILES:
        return ["make", "-f"]
    if text.startswith("#!"):
        words = text.partition("\n")[0][2:].split()
        program = PurePath(words[0]).name if words else ""
        if program == "env":
            words = [word for word in words[1:] if word != "-S"]
            program = words[0] if words else ""
        if program.startswith("python"):
            return ["python3", *words[1:]]
        if words[:2] == ["uv", "run"] and suffix == ".py":
            return ["python3"]  # the setup installs what the head states
        if program:
            return [program, *words[1:]]
    if suffix not in _INTERPRETERS:
        raise ValueError(f"{path}:1: the line `#!` names no program, such as #!/bin/bash")
    return [_INTERPRETERS[suffix]]


def _find_setup(path: Path, text: str, folder: Path, notes: list[str]) -> FileSetup | None:
    """Return the setup that installs the dependencies of a script, or None without any."""
    found = _find_head(path, text)
    if found is None:
        return find_file_setup(path, folder, notes)
    line, head = found
    if version := head.get("requires-python"):
        notes.append(f"{path.name} needs Python {version}; the node's own python3 runs it")
    needs = [str(each) for each in head.get("dependencies", ())]
    if not needs:
        return None
    notes.append(f"the setup installs what the head of {path.name} states: {', '.join(needs)}")
    tools = head.get("tool")
    if isinstance(tools, dict) and (options := tools.get("uv")):
        return _make_uv_setup(path, line, text, options, folder)
    return FileSetup(keys={"run": f"python3 -m pip install {join(needs)}", "uses": []})


def _make_uv_setup(path: Path, line: int, text: str, options: object, folder: Path) -> FileSetup:
    """Return the setup for a head with a table for uv. The head alone is enough, unless it names
    packages by their paths, which need all files. Raises ValueError for a path elsewhere.
    """
    places = list(_list_paths(options))
    for each in places:
        if not (path.parent / each).resolve().is_relative_to(folder):
            raise ValueError(
                f"{path}:{line}: the head names a package at {each}, outside of the job's folder; "
                "start it in a folder with both, or name the package's index or repository"
            )
    if places:
        name = str(path.relative_to(folder))
        return FileSetup(keys={"run": _UV.format(script=quote(name))})
    (_, content), *_ = _list_heads(text.split("\n"))
    head = "\n".join((_HEAD, *content, _HEAD_END))
    run = _COPY_HEAD.format(head=head, sync=_UV.format(script='"$head"'))
    return FileSetup(keys={"run": run, "uses": []})


def _list_paths(options: object) -> Iterator[str]:
    """Yield the paths of packages and indexes in a table for uv."""
    match options:
        case {"path": str(path)}:
            yield path
        case dict():
            for each in options.values():
                yield from _list_paths(each)
        case list():
            for each in options:
                yield from _list_paths(each)


def _add_setup(keys: dict[str, Any], setup: FileSetup | None) -> dict[str, Any]:
    """Return the keys of a task with the setup, and with the line that its command begins with."""
    if setup is None:
        return keys
    keys = {"setup": setup.keys, **keys}
    return {**keys, "run": f"{setup.begin}\n{keys['run']}"} if setup.begin else keys


def _find_head(path: Path, text: str) -> tuple[int, dict[str, Any]] | None:
    """Return the line and the metadata of the head of a script, or None if it has none. Raises
    ValueError.
    """
    found = list(_list_heads(text.split("\n")))
    if not found:
        return None
    if len(found) > 1:
        raise ValueError(f"{path}: the head `# /// script` appears twice; keep one of them")
    line, content = found[0]
    try:
        return line, tomllib.loads("\n".join(each[2:] for each in content))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path}:{line}: the head `# /// script` is no TOML: {error}") from None


def _list_heads(lines: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield the number of each head's first line, and its lines without the first and last. Each
    line is looked at once, also of a file that begins heads without an end.
    """
    lines = [each.rstrip() for each in lines]
    number = 0
    while number < len(lines):
        number += 1
        if lines[number - 1] != _HEAD:
            continue
        begin, last = number, 0
        while number < len(lines) and (lines[number] == "#" or lines[number].startswith("# ")):
            if lines[number] == _HEAD_END:
                last = number
            number += 1
        if last > begin:
            yield begin, lines[begin:last]
