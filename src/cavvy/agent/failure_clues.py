"""Explains common failures from the end of the task's output, such as a file, a Python package or a
program that the task does not have, and says what to do.
"""

from __future__ import annotations

import os
import re
import shutil

from .documents import PORT, PORT_USES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .documents import WorkConfig

_KEPT = 4096  # bytes at the end of the output
_NO_MODULE = re.compile(rb"No module named '?([A-Za-z_][\w.-]*)")
_NO_COMMAND = re.compile(
    rb"(?:^|[\s:'\"])(python[\d.]*|pip[\d.]*)['\"]?: (?:command )?not found"
    rb"|env: '?\W*(python[\d.]*|pip[\d.]*)\W*: No such file"
)
_NO_FILE = re.compile(
    rb"can't open file"
    rb"|No such file or directory"
    rb"|cannot open|can't cd to"
    rb"|Cannot find module"
    rb"|Could not open requirements file"
    rb"|file or directory not found"
    rb"|does not appear to be a Python project"
    rb"|No `?pyproject\.toml"
    rb"|no makefile found|No rule to make target"
    rb"|Could not import module"
)

_NO_PATH = re.compile(
    rb"can't open file|No such file or directory|Could not open requirements file"
)
_PORT_USED = re.compile(rb"[^\n]*(?:address|port \d+ is) already in use[^\n]*", re.IGNORECASE)
_NO_CODE = re.compile(rb"^(?:Import|Syntax|Indentation|Tab)Error\b|^usage: ", re.MULTILINE)
_NUMBER = re.compile(rb"(?i)(?:(?<=:)|(?<=port[ =:])|(?<=port: )|(?<=\', ))\d{2,5}(?![\d.])")
_IGNORED = (
    "files that .gitignore or .cavvyignore excludes are not submitted, and paths are relative to "
    "the submitted folder"
)
_OWN_PACKAGE = (
    "`uses: [cavvy-VERSION-py3-none-any.whl]` in `setup` brings it along, and `pip install "
    "./cavvy-VERSION-py3-none-any.whl` installs it, with the version that `cavvy --version` prints"
)
_MISSING_FILE = re.compile(
    rb"(?:can't open file|No such file or directory:|cannot open) '?([^'\n:]+)"
    rb"|(?:^|[\s:])([^\s:']+): No such file or directory",
    re.MULTILINE,
)
_READ_ONLY = re.compile(rb"Read-only file system|Errno 30\b|EROFS")
# What the output says -> what is wrong and what to do; $1 is the first group. The first cause is
# none of a container, where only read-only mounts are read-only.
_CAUSES: list[tuple[bytes, str]] = [
    (
        _READ_ONLY.pattern + rb"|(?:mv|rm|cp|ln|write config file).*: Device or resource busy",
        "jobs cannot change what the machine, its user or Cavvy obeys, such as /usr, /etc and "
        "`~/.gitconfig` (docs/guides/isolation.md lists it): write to the working folder or to a "
        "folder such as /data, install Python packages in `setup`, and use an `image` for packages "
        "of the system; the job can create new files in the home folder, but those that begin with "
        "a dot stay visible only to the project's jobs",
    ),
    (
        rb"(?:^|[\s:])([\w./+-]+): (?:command )?not found",
        "the node has no program `$1`: install it in `setup`, or use an `image` that has it",
    ),
    (
        rb"line \d+: ([^\s:]+): Permission denied",
        "$1 is not executable: `chmod +x $1` where you submit it, or run `bash $1`",
    ),
    (
        rb"(?:CUDA|HIP) out of memory|OutOfMemoryError: (?:CUDA|HIP)",
        "the memory of the GPU, or of the task's share of it, is full: use smaller batches or "
        "request a larger GPU or share; `cavvy estimate` shows how much memory a training needs",
    ),
    (
        rb"Torch not compiled with CUDA enabled",
        "the PyTorch in the task's environment is built without CUDA: install a build with CUDA "
        "in `setup`, and request a GPU with `resources: {gpu: 1}`",
    ),
    (
        rb"Found no NVIDIA driver|no CUDA-capable device|No CUDA GPUs are available"
        rb"|libcuda\.so\.1: cannot open",
        "the program found no usable GPU: `resources: {gpu: 1}` requests one",
    ),
    (
        rb"No space left on device",
        "a disk of the node is full: `resources: {disk: 100GB}` requests a larger one",
    ),
    (
        rb"^EOFError: EOF when reading a line",
        "the program reads from its standard input, which is empty in a job: pass what it asks for "
        "as arguments or variables; `cavvy dev` gives a program a terminal",
    ),
    (
        rb"gated repo|401 Client Error|Access to model .{1,200} is restricted",
        "a download needs a login: `cavvy secret set HF_TOKEN` stores a token, and `secrets: "
        "[HF_TOKEN]` passes it to the task",
    ),
    (
        rb"Could not resolve host|[Nn]ame resolution|Name or service not known",
        "a host's name could not be resolved: check the name, and whether the node reaches it",
    ),
]


class FailureClues:
    """Keeps the end of the task's output. Call `feed` with each piece of output."""

    def __init__(self) -> None:
        self._end = b""

    def feed(self, data: bytes) -> None:
        self._end = (self._end + data[-_KEPT:])[-_KEPT:]

    def is_known(self) -> bool:
        """Return whether the output names a cause that no file of a checkpoint can have."""
        causes = (_NO_MODULE, _NO_COMMAND, _PORT_USED, _NO_CODE)
        return any(cause.search(self._end) for cause in causes) or any(
            re.search(pattern, self._end, re.MULTILINE) for pattern, _ in _CAUSES
        )

    def explain(self, work: WorkConfig, path: str, folder: str = "") -> str:
        """Return what the failed task probably lacks and how to add it, or "" without a clue.
        `path` is the PATH of the task, and `folder` its working folder."""
        return explain_output(self._end, work, path, folder)


def explain_output(end: bytes, work: WorkConfig, path: str, folder: str = "") -> str:
    """Return what a failed task probably lacks and how to add it, or "" without a clue. `end` is
    the end of the task's output."""
    empty = work.workdir is None and work.git is None
    if modules := _NO_MODULE.findall(end):
        name = modules[-1].decode("ascii", "replace").partition(".")[0]
        return _explain_module(name, work, path, empty)
    if found := _NO_COMMAND.search(end):
        return _explain_command((found[1] or found[2]).decode(), work, path)
    if unsaved := _explain_checkpoint(end, work, folder):
        return unsaved
    if outside := _explain_outside(end, folder):
        return outside
    if empty and _NO_FILE.search(end):
        return (
            "the task started in an empty folder, because it has no `workdir`: keep the task file "
            "and its files in a folder of their own, with `workdir: .` in the task file, or submit "
            "a folder with --workdir FOLDER"
        )
    ignored = "" if work.workdir is None else _IGNORED
    if clue := _explain_file(end, folder):
        return clue + ("; " + ignored if ignored else "")
    if ignored and _NO_PATH.search(end):
        return f"if the missing file is one of yours: {ignored}"
    if used := _PORT_USED.findall(end):
        return _explain_port(used[-1], work)
    if volume := _find_read_only(end, work):
        return f"the task mounts {volume} read-only: leave `:ro` (`read_only`) out to write there"
    for pattern, text in _CAUSES[1:] if work.image else _CAUSES:
        if found := re.search(pattern, end, re.MULTILINE):
            name = found[1].decode(errors="replace") if found.re.groups else ""
            return text.replace("$1", name)
    return ""


def _find_read_only(end: bytes, work: WorkConfig) -> str:
    """Return the path of a read-only volume to which the task has tried to write, or ""."""
    lines = [line for line in end.splitlines() if _READ_ONLY.search(line)]
    told = b"\n".join(lines).decode("utf-8", "replace")
    paths = [each.path for each in work.volumes if each.read_only]
    return next((each for each in paths if re.search(rf"{re.escape(each)}(?![\w.-])", told)), "")


def _explain_port(line: bytes, work: WorkConfig) -> str:
    """Return which port another program uses, from the line of the output that says so."""
    known = {number: name for name, number in work.ports.items()} | {
        work.master_port: "MASTER_PORT"
    }
    if PORT not in work.ports and (stated := work.env.get(PORT, "")).isdigit():
        known[int(stated)] = PORT
    numbers = [int(each) for each in _NUMBER.findall(line)]
    found = next((each for each in numbers if each in known), 0)
    name = known.get(found, "")
    if name in work.ports:
        what = PORT_USES.get(name, name)
        return (
            f"another program of the node uses port {found}, which was chosen for {what} "
            f"(${name}): nothing is wrong with the task, and the next replica gets another port"
        )
    if name == "MASTER_PORT":
        return (
            f"another program of the node uses port {found}, at which the ranks meet "
            "($MASTER_PORT); each attempt gets another one, so `cavvy retry` may be enough"
        )
    if name:
        return f"another program of the node uses port {found}, which the task states in `port`"
    own = f"port {numbers[-1]}" if numbers else "a port"
    return (
        f"another program of the node uses {own}, which the task's program wants: the program of a "
        "service listens on $PORT, the ranks of a training meet at $MASTER_PORT, and other ports "
        "may be taken"
    )


def _list_missing(end: bytes) -> list[str]:
    """Return the files that the output says are missing."""
    return [(a or b).decode(errors="replace").strip() for a, b in _MISSING_FILE.findall(end)]


def _explain_checkpoint(end: bytes, work: WorkConfig, folder: str) -> str:
    """Return that the last missing file is one of the checkpoint folder, to which no submitted file
    belongs."""
    name = (_list_missing(end) or [""])[-1]
    if not folder or not name or work.checkpoint is None:
        return ""
    path, own = os.path.join(folder, name), os.path.join(folder, work.checkpoint.path)
    for top in filter(None, (own, work.checkpoint.storage)):
        inside = os.path.relpath(path, top)
        if not inside.startswith("..") and not os.path.exists(path):
            return (
                f"the checkpoint folder {work.checkpoint.path} has no {inside}: no attempt has "
                "saved this file, or the program was ended while it saved; `cavvy events` shows "
                "from which checkpoint the attempt started"
            )
    return ""


def _explain_outside(end: bytes, folder: str) -> str:
    """Return that the last missing file is outside of the working folder, so that no submitted
    folder would contain it."""
    name = (_list_missing(end) or [""])[-1]
    if not folder or not name.startswith("/") or os.path.exists(name):
        return ""
    if not os.path.relpath(name, folder).startswith(".."):
        return ""
    return (
        f"the job sees no {name} on its node: `inputs` and `volumes` give a job data from outside "
        "of its folder, and `setup` installs what it needs"
    )


def _explain_file(end: bytes, folder: str) -> str:
    """Return which file of the working folder is missing. Files elsewhere give no clue: programs
    also look for files that need not exist.
    """
    for name in reversed(_list_missing(end)):
        inside = os.path.relpath(os.path.join(folder, name), folder) if folder else ".."
        if inside.startswith("..") or os.path.exists(os.path.join(folder, inside)):
            continue
        from difflib import get_close_matches

        beside = os.path.join(folder, os.path.dirname(inside))
        listed = os.listdir(beside) if os.path.isdir(beside) else []
        close = get_close_matches(os.path.basename(inside), listed, n=1)
        meant = (
            f"; did you mean {os.path.join(os.path.dirname(inside), close[0])}?" if close else ""
        )
        return f"the working folder of the job has no {inside}{meant}"
    return ""


def _explain_module(name: str, work: WorkConfig, path: str, empty: bool) -> str:
    if work.image:
        text = f"the image {work.image} has no Python module {name}"
    elif work.setup:
        text = f"the job's own Python environment, which `setup` fills, has no module {name}"
    else:
        text = f"{_find_python(work, path)} has no module {name}"
    if name == "cavvy":  # an index may have another project under this name
        return f"{text}: {_OWN_PACKAGE}"
    text += ": `pip install PACKAGE` in `setup` installs one for the job"
    if work.path and not (work.image or work.setup):
        text += ", or submit the job from a shell in which the environment with it is active"
    own = (
        f"; if {name} is a file of yours: keep it in a folder with the task file, and write "
        "`workdir: .`"
    )
    return text + own * empty


def _explain_command(name: str, work: WorkConfig, path: str) -> str:
    if work.image:
        return f"the image {work.image} has no {name}"
    kind = "pip" if name.startswith("pip") else "python"
    other = kind if name == f"{kind}3" else f"{kind}3"
    if shutil.which(other, path=path):
        return f"the task's PATH has `{other}`, but no `{name}`: write `{other}` in the task"
    return f"the task's PATH has no `{name}`: {path}"


def _find_python(work: WorkConfig, path: str) -> str:
    """Return which Python the task probably used, such as "`python3` (/usr/bin/python3)"."""
    names = ("python3", "python") if "python3" in work.run else ("python", "python3")
    for name in names:
        if (found := shutil.which(name, path=path)) is not None:
            return f"the task's `{name}`, {os.path.abspath(found)},"
    return "the task's Python"
