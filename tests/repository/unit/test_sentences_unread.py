"""Sentences are for people: no code takes one apart to find out what happened."""

import ast
import re
from pathlib import Path

SRC = Path(__file__).resolve().parents[3] / "src" / "cavvy"

NAMES = frozenset({"reason", "stop_reason", "exit_reason", "detail", "hint", "message", "why"})
NAMES |= {"problem", "error", "said"}
WITH_TEXT = frozenset({"event", "message", "again", "told"})  # whose `text` is a sentence
READERS = frozenset(
    {"startswith", "endswith", "partition", "rpartition", "removeprefix", "removesuffix", "split"}
    | {"rsplit", "find", "index", "search", "match", "fullmatch", "lower"}
)
# Who owns the words: a user's file, an engine whose errors its own provider sorts, or the screen.
ALLOWED = {
    "spec/fields/": "the words of a user's file",
    "providers/kubernetes/": "what API servers answer",
    "providers/pbs/": "what PBS prints",
    "providers/azureml": "the API tells missing capacity and quotas in its text alone",
    "providers/azure/": "only the message tells a quota from other refusals",
    "providers/ecs/": "the API tells missing capacity and a full queue in its text alone",
    "providers/sagemaker": "the API tells missing capacity and taken names in its text",
    "providers/vertex": "the API tells missing capacity and quotas in its text alone",
    "providers/tpu/": "the API tells missing capacity and quotas in its text alone",
    "providers/oci/": "only the message tells missing capacity from other internal errors",
    "providers/ray/calls.py": "what Ray's dashboard answers",
    "providers/hosts/connection.py": "what ssh prints",
    "providers/hosts/ssh_link.py": "what a host's shell prints; a line names its host once",
    "providers/ssh/provider.py": "a line on the screen names its host once",
    "providers/hosts/fleet/gangs.py": "the reason of a wait names its host once",
    "capabilities/estimates/script_argument.py": "Python tells a relative import from others in its text alone",
    "capabilities/estimates/tracer/one_process.py": "PyTorch tells a missing variable from other values in its text alone",
    "cli/view/formatting.py": "words that the line above has on the screen are left out",
    "client/tunnel.py": "a JSON object",
    "agent/work/mpi.py": "a JSON object",
    "train/world.py": "a gloo error names its source file",
    "agent/work/torchrun.py": "as in train/world.py",
    "providers/hosts/supervisor/service.py": "an exit code in a file",
}
# A cloud's provider gives this reason itself: "only the message tells a full zone from wrong values".
OWN_REASON = re.compile(r"^ *# .*\bonly the message\b", re.MULTILINE | re.IGNORECASE)


def name_of(node: ast.expr) -> str:
    """What the text is called: `job.reason`, `str(error)` and `reason.lower()` are its sentence."""
    match node:
        case ast.Call(func=ast.Name(id="str"), args=[inner]):
            return name_of(inner)
        case ast.Call(func=ast.Attribute(value=inner, attr="lower" | "strip")):
            return name_of(inner)
        case ast.Attribute(attr=name) if name in NAMES:
            return name
        case ast.Attribute(value=ast.Name(id=owner), attr="text") if owner in WITH_TEXT:
            return "text"
        case ast.Name(id=name) if name in NAMES:
            return name
    return ""


def read_sentences(tree: ast.AST) -> list[int]:
    """Lines on which a sentence is taken apart."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=attr), args=args):
                reads = attr in READERS and (name_of(value) or any(map(name_of, args)))
            case ast.Compare(left=ast.Constant(value=str()), ops=[ast.In() | ast.NotIn()]):
                reads = name_of(node.comparators[0])
            case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq()], comparators=[other]):
                constant = any(
                    isinstance(each, ast.Constant) and each.value for each in (left, other)
                )
                reads = constant and (name_of(left) or name_of(other))
            case _:
                reads = ""
        if reads:
            found.append(node.lineno)
    return found


def test_no_code_reads_a_sentence() -> None:
    found, used = [], set()
    for path in sorted(SRC.rglob("*.py")):
        name = path.relative_to(SRC).as_posix()
        if lines := read_sentences(ast.parse(path.read_text())):
            allowed = next((each for each in ALLOWED if name.startswith(each)), None)
            if name.startswith("providers/") and OWN_REASON.search(path.read_text()):
                continue
            found += [] if allowed else [f"{name}:{line}" for line in lines]
            used.add(allowed)
    assert found == [], "carry a fact as a field and make the sentence where it is shown"
    assert ALLOWED.keys() <= used, f"needed no more: {sorted(ALLOWED.keys() - used)}"


def test_what_reads_a_sentence_is_found() -> None:
    for code in (
        "attempt.reason.startswith('GPU')",
        "'quota' in str(error).lower()",
        "job.reason.partition(': ')[0]",
        "PATTERN.search(event.text)",
        "event.text == 'submitted'",
    ):
        assert read_sentences(ast.parse(code)), code
    for code in ("text.split(',')", "reason or 'x'", "row.reason == other.reason"):
        assert not read_sentences(ast.parse(code)), code
