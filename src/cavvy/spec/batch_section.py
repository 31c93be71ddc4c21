"""Turns the section `batch` into the keys of an array of jobs. The jobs run the program of batches,
whose file is submitted with the task.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from cavvy.domain.values import replace
from cavvy.spec.engine_section import add_inputs, complete
from cavvy.spec.engines import SERVER_FOLDER
from cavvy.spec.fields.batch import BATCH, BatchKeys
from cavvy.spec.problems import ProblemNotes
from cavvy.spec.tree import MapNode, Node, ScalarNode

PROGRAM = f"{SERVER_FOLDER}/batch.py"
_INPUT = f"{SERVER_FOLDER}/input"
_MISFITS = ("array", "sweep", "service", "session", "schedule", "machine", "best")


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
    root = replace(root, entries=tuple(each for each in rest if each[0].text != "run"))
    if batch is not None and bool(batch.function) == bool(command.strip()):
        message = "`run` and `function` are both set" if command else "the batch runs nothing"
        hint = "delete one of them" if command else "add `function: MODULE:FUNCTION`, or `run`"
        notes.add(node.mark, message, suggestion=hint)
    if batch is None:
        return complete(root, {"run": "true"})
    copied = _place_input(batch.input)
    local = batch.function or not (batch.input.startswith("/") or "://" in batch.input)
    keys: dict[str, str | int] = {
        "run": _write_command(batch, command, copied or batch.input),
        "array": f"0-{batch.workers - 1}",
        **({"workdir": "."} if local else {}),
    }
    return complete(add_inputs(root, [(batch.input, copied)] if copied else []), keys)


def find_batch_files(documents: Sequence[Node]) -> Mapping[str, Path]:
    """Return the program of batches if the file has a batch, by its path in the working folder."""
    for root in documents:
        if isinstance(root, MapNode) and root.get("batch") is not None:
            return {PROGRAM: Path(__file__).parent.parent / "readers" / "batch.py"}
    return {}


def _place_input(source: str) -> str:
    """Return the path to which an input is copied, or "" if it is a path already. The name of a
    file stays, because its ending tells the format."""
    if "://" not in source:
        return ""
    name = source.partition("?")[0].rpartition("/")[2]
    return f"{_INPUT}/{name}" if name else _INPUT


def _write_command(batch: BatchKeys, command: str, path: str) -> str:
    words = ["--input", path, "--output", batch.output, "--rows", str(batch.rows)]
    words += ["--format", batch.format] if batch.format else []
    words += ["--function", batch.function] if batch.function else ["--command", command]
    return f"exec python3 {PROGRAM} {shlex.join(words)}"
