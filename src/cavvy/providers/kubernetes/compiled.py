"""Adds bytecode to the agent's archive, so that pods need not compile it. It runs in a process of
its own, since only an option of the interpreter leaves columns out of bytecode, and imports only
the standard library.

A config map holds at most 1 MiB. Without columns and docstrings, bytecode is two thirds as large,
and sources, which other versions of Python use, go without docstrings and lines of comments, too.
Tracebacks still name files, lines and functions.
"""

import ast
import importlib.util
import io
import marshal
import subprocess
import sys
import zipfile

_UNCHECKED = 1  # the flag of bytecode that Python uses without comparing it with its source
_BEST = 9  # of zlib's levels of compression


def compile_archive(archive: bytes) -> bytes:
    """Return the archive with a compiled module next to each source file. Only this server's
    version of Python uses the compiled modules.
    """
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-X", "no_debug_ranges", __file__],
        input=archive,
        capture_output=True,
        check=True,
    )
    return done.stdout


def _add_modules(archive: bytes) -> bytes:
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(archive)) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=_BEST) as new,
    ):
        for name in sorted(old.namelist()):
            source = old.read(name)
            if not name.endswith(".py"):
                _write(new, name, source)
                continue
            tree = ast.parse(source)
            source = _without_remarks(source, tree)
            _write(new, name, source)
            code = compile(_without_docstrings(tree), name, "exec", dont_inherit=True)
            head = (
                importlib.util.MAGIC_NUMBER
                + _UNCHECKED.to_bytes(4, "little")
                + importlib.util.source_hash(source)
            )
            _write(new, name + "c", head + marshal.dumps(code))
    return packed.getvalue()


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None and len(node.body) > 1:
            del node.body[0]
    return tree


def _without_remarks(source: bytes, tree: ast.Module) -> bytes:
    """Return the source without docstrings and lines that are comments, with each statement in its
    line."""
    lines, inside = source.splitlines(keepends=True), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno is not None:
            inside.update(range(node.lineno, node.end_lineno))  # these lines go on with a text
    for row, line in enumerate(lines):
        if row not in inside and line.lstrip().startswith(b"#"):
            lines[row] = b"\n"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            assert first.end_lineno is not None
            row, last = first.lineno - 1, first.end_lineno - 1
            lines[row] = lines[row][: first.col_offset] + b'""\n'
            lines[row + 1 : last + 1] = [b"\n"] * (last - row)
    return b"".join(lines)


def _write(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    archive.writestr(entry, content, zipfile.ZIP_DEFLATED, compresslevel=_BEST)


if __name__ == "__main__":
    sys.stdout.buffer.write(_add_modules(sys.stdin.buffer.read()))
