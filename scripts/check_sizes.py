"""Check that files and functions stay small; called by `make check`.

A file may have 600 lines. A function may have 60 lines, 300 tokens and a complexity of 20. Tokens
are counted by `tokenize`, without comments and layout. The complexity of a function is 1, and 1
more for each `if`, conditional expression, loop, `except`, `case` other than a bare `_`,
comprehension and `if` in a comprehension, and for each operand after the first of `and` and `or`.
Nested functions are included. Templates (programs that users change) are exempt. The exceptions are
listed in `sizes_to_split.txt`. An entry in this list that is no longer needed is an error too.
"""

import ast
import io
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent
SOURCE = ROOT.parent / "src" / "cavvy"
TO_SPLIT = ROOT / "sizes_to_split.txt"
FILE_LINES, FUNCTION_LINES, TOKENS, COMPLEXITY = 600, 60, 300, 20
EXEMPT_FOLDERS = {"templates"}
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
_BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler)


def list_faults() -> list[str]:
    """Everything that exceeds a limit and is not listed, and every entry that is no longer
    needed."""
    listed = set(TO_SPLIT.read_text().splitlines())
    large: dict[str, str] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not EXEMPT_FOLDERS & set(path.parts):
            large |= measure(name, path.read_text())
    done = [
        f"{name} is within bounds or gone: take it out of {TO_SPLIT.name}"
        for name in sorted(listed - large.keys())
    ]
    return [fault for name, fault in large.items() if name not in listed] + done


def measure(name: str, text: str) -> dict[str, str]:
    """The parts of a file that are too large: entry for the list -> message."""
    lines = text.count("\n")
    large = {}
    if lines > FILE_LINES:
        large[name] = f"{name}: {lines} lines, at most {FILE_LINES}"
    tokens = _list_token_lines(text)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            over = ", ".join(_measure_function(node, tokens))
            if over:
                large[f"{name} {node.name}"] = f"{name}:{node.lineno} {node.name}: {over}"
    return large


def _list_token_lines(text: str) -> list[int]:
    """The line of each token; an f-string is one token, as it was before Python 3.12."""
    lines, depth = [], 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if token.type not in _LAYOUT and not depth:
            lines.append(token.start[0])
        depth += (kind == "FSTRING_START") - (kind == "FSTRING_END")
    return lines


def _measure_function(
    node: ast.FunctionDef | ast.AsyncFunctionDef, tokens: list[int]
) -> Iterator[str]:
    end = node.end_lineno or node.lineno
    sizes = (
        ("lines", end - node.lineno + 1, FUNCTION_LINES),
        ("tokens", sum(node.lineno <= line <= end for line in tokens), TOKENS),
        ("complexity", complexity_of(node), COMPLEXITY),
    )
    return (f"{size} {what}, at most {bound}" for what, size, bound in sizes if size > bound)


def complexity_of(function: ast.AST) -> int:
    return 1 + sum(_branches(node) for node in ast.walk(function))


def _branches(node: ast.AST) -> int:
    match node:
        case ast.BoolOp():
            return len(node.values) - 1
        case ast.comprehension():
            return 1 + len(node.ifs)
        case ast.match_case(pattern=ast.MatchAs(pattern=None), guard=None):
            return 0
        case ast.match_case():
            return 1
    return int(isinstance(node, _BRANCHES))


if __name__ == "__main__":
    found = list_faults()
    print("\n".join(found) or "sizes: all within bounds")
    sys.exit(1 if found else 0)
