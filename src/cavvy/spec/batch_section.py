"""Turns the section `batch` into the keys of an array of jobs. The jobs run the program of batches,
whose file is submitted with the task.

The section `batch`: the rows that a function or a command processes, in shards.
"""

import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import Struct, replace
from cavvy.spec.engine_section import add_transfers, complete, make_scalar
from cavvy.spec.engines import SERVER_FOLDER
from cavvy.spec.fields.kinds import FieldSpec, WrongValue, choice, section, text_kind, whole
from cavvy.spec.fields.places import inner_path, read_source, read_target
from cavvy.spec.problems import ProblemNotes, shown
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode

PROGRAM = f"{SERVER_FOLDER}/batch.py"
_INPUT = f"{SERVER_FOLDER}/input"
# The results of a job before they are copied to a bucket, beside the worker's own files.
_KEPT = f"{SERVER_FOLDER}/batch"
_RESULTS, _STATE = f"{_KEPT}/results", f"{_KEPT}/state"
_COMMAND = f"exec python3 {PROGRAM} "
# lines of `setup` that write no files of the working folder
_INSTALLS = re.compile(r"\s*(#|(python3? -m |uv )?pip3? install [^;&|]*$)")
_EVERY = "1m"  # between two checkpoints, which lose nothing if the node's end is announced
_MISFITS = ("array", "sweep", "service", "session", "schedule", "machine", "best")

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


class RowFormat(StrEnum):
    """The format of the input."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    WEBDATASET = "webdataset"
    IMAGES = "images"


class BatchKeys(Struct, frozen=True, kw_only=True):
    """The keys of a batch, which becomes an array of jobs. `input` is a path in the working folder,
    an absolute path or a URL. `rows` is the maximum of a shard, and `workers` the number of jobs.
    """

    input: str
    output: str
    function: str = ""
    format: str = ""
    rows: int = 1000
    workers: int = 4
    region: str = ""


def _read_input(text: str) -> str:
    clean = text.strip()
    return read_source(text) if "://" in clean or clean.startswith("/") else inner_path(text)


def _read_output(text: str) -> str:
    clean = text.strip()
    if clean.startswith("/") or "://" in clean:
        return read_target(text).rstrip("/") or "/"
    raise WrongValue(
        f"{shown(text)} is not an absolute path",
        suggestion="write the absolute path of a folder that all nodes share, or a bucket's URL",
    )


def _read_function(text: str) -> str:
    if not _FUNCTION.fullmatch(text.strip()):
        hint = "for embed.py with the function `run`, write embed:run"
        raise WrongValue(f"{shown(text)} does not name a function", suggestion=hint)
    return text.strip()


BATCH = section(
    "batch",
    lambda table: table.make(BatchKeys),
    input=FieldSpec(
        text_kind(
            "a file or folder of the working folder, an absolute path, or a URL", _read_input
        ),
        required=True,
    ),
    output=FieldSpec(
        text_kind(
            "an absolute path such as /data/results, or a URL such as s3://bucket/out", _read_output
        ),
        required=True,
    ),
    function=text_kind("a function such as embed:run", _read_function),
    format=choice(RowFormat, {"json": RowFormat.JSONL, "tar": RowFormat.WEBDATASET}),
    rows=whole(1, 1_000_000),
    workers=whole(1, 1000),
    region=text_kind("a region such as us-east-1", str.strip),
)


def expand_batch(root: MapNode, notes: ProblemNotes) -> MapNode:
    """Return the tree with the keys that the section `batch` stands for, instead of the section.
    Mistakes are added to `notes`."""
    node = root.get("batch")
    if node is None:
        return root
    batch: BatchKeys | None = BATCH.read(node, notes)
    run = root.get("run")
    command = run.text if isinstance(run, ScalarNode) else ""
    rest = tuple(each for each in root.entries if each[0].text != "batch")
    for key, _ in rest:
        if key.text in _MISFITS:
            message = f"`{key.text}` cannot be used with `batch`, which makes an array of jobs"
            notes.add(key.mark, message, suggestion="delete one of them")
        if key.text == "checkpoint" and batch is not None and "://" in batch.output:
            message = "a batch whose output is a URL has a checkpoint of its own"
            notes.add(key.mark, message, suggestion="delete `checkpoint`")
    root = replace(root, entries=tuple(each for each in rest if each[0].text != "run"))
    if batch is not None and bool(batch.function) == bool(command.strip()):
        message = "`run` and `function` are both set" if command else "the batch runs nothing"
        hint = "delete one of them" if command else "add `function: MODULE:FUNCTION`, or `run`"
        notes.add(node.mark, message, suggestion=hint)
    if batch is None:
        return complete(root, {"run": "true"})
    if _is_inside(batch.output, batch.input):
        message = f"the output {batch.output} is inside the input {batch.input}"
        hint = "choose a folder beside it, because a later batch would read the results as rows"
        notes.add(node.mark, message, suggestion=hint)
    copied = _place_input(batch.input)
    local = batch.function or not (batch.input.startswith("/") or _is_brought(root, batch.input))
    keys: dict[str, str | int] = {
        "run": _write_command(batch, command, copied or batch.input),
        "array": f"0-{batch.workers - 1}",
        **({"workdir": "."} if local else {}),
    }
    root = add_transfers(root, "inputs", [(batch.input, copied)] if copied else [], batch.region)
    if "://" in batch.output:
        root = add_transfers(root, "outputs", [(_RESULTS, f"{batch.output}/")], batch.region)
        root = _add_checkpoint(root, batch)
    return complete(root, keys)


def find_batch_files(documents: Sequence[Node]) -> Mapping[str, Path]:
    """Return the program of batches if the file has a batch, by its path in the working folder."""
    for root in documents:
        if isinstance(root, MapNode) and root.get("batch") is not None:
            return {PROGRAM: Path(__file__).parent.parent / "readers" / "batch.py"}
    return {}


def find_rows(task: TaskSpec) -> str:
    """Return the path of a batch's rows in the submitted working folder. Returns "" if the rows
    come from elsewhere: a URL, one of the inputs, a path of the node, or commands of `setup` that
    may write them. Returns "" also if another command replaces that of the batch.
    """
    if not task.run.startswith(_COMMAND):
        return ""
    words = shlex.split(task.run)
    path = words[words.index("--input") + 1]
    targets = [each.target.rstrip("/") for each in task.inputs]
    brought = any(f"{path}/".startswith(f"{each}/") for each in targets)
    lines = (task.setup or "").splitlines()
    written = any(line.strip() and not _INSTALLS.match(line) for line in lines)
    return "" if path.startswith("/") or brought or written else path


def _is_brought(root: MapNode, source: str) -> bool:
    """Return whether the rows reach the working folder by a URL or as one of the inputs."""
    node = root.get("inputs")
    items = node.items if isinstance(node, ListNode) else ()
    nodes = [each.get("target") for each in items if isinstance(each, MapNode)]
    targets = [each.text.rstrip("/") for each in nodes if isinstance(each, ScalarNode)]
    return "://" in source or any(f"{source}/".startswith(f"{each}/") for each in targets)


def _is_inside(output: str, source: str) -> bool:
    """Return whether an absolute path is inside the folder of another one, or is this folder."""
    if not (output.startswith("/") and source.startswith("/")):
        return False
    source = posixpath.normpath("/" + source.lstrip("/"))
    return posixpath.commonpath((posixpath.normpath("/" + output.lstrip("/")), source)) == source


def _place_input(source: str) -> str:
    """Return the path to which an input is copied, or "" if it is a path already. The name of a
    file stays, because its ending tells the format."""
    if "://" not in source:
        return ""
    name = source.partition("?")[0].rpartition("/")[2]
    return f"{_INPUT}/{name}" if name else _INPUT


def _add_checkpoint(root: MapNode, batch: BatchKeys) -> MapNode:
    """Return the tree with a checkpoint, in the bucket of the results if it is one."""
    table = {"path": _KEPT, "every": _EVERY}
    if batch.output.startswith(("s3://", "gs://", "az://")):
        table["storage"] = f"{batch.output}/.batch"
        table |= {"region": batch.region} if batch.region else {}
    node = complete(MapNode(mark=root.mark, entries=()), table)
    return replace(root, entries=(*root.entries, (make_scalar(root.mark, "checkpoint"), node)))


def _write_command(batch: BatchKeys, command: str, path: str) -> str:
    apart = "://" in batch.output
    output = _RESULTS if apart else batch.output
    words = ["--input", path, "--output", output, "--rows", str(batch.rows)]
    words += ["--striped", "--state", _STATE] if apart else []
    words += ["--format", batch.format] if batch.format else []
    words += ["--function", batch.function] if batch.function else ["--command", command]
    return f"{_COMMAND}{shlex.join(words)}"
