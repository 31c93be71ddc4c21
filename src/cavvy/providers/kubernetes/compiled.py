"""Adds bytecode to the agent's archive, so that pods need not compile it. It runs in a process of
its own, since only an option of the interpreter leaves columns out of bytecode, and imports only
the standard library.

A config map holds at most 1 MiB. Without columns and docstrings, bytecode is two thirds as large,
and so are sources without comments and docstrings, which other versions of Python use; tracebacks
still name files, lines and functions.
"""

import ast
import importlib.util
import io
import marshal
import subprocess
import sys
import tokenize
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
            if name.endswith(".py"):
                source = _without_remarks(source)
            _write(new, name, source)
            if name.endswith(".py"):
                code = compile(_without_docstrings(source), name, "exec", dont_inherit=True)
                head = (
                    importlib.util.MAGIC_NUMBER
                    + _UNCHECKED.to_bytes(4, "little")
                    + importlib.util.source_hash(source)
                )
                _write(new, name + "c", head + marshal.dumps(code))
    return packed.getvalue()


def _without_docstrings(source: bytes) -> ast.Module:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None and len(node.body) > 1:
            del node.body[0]
    return tree


def _without_remarks(source: bytes) -> bytes:
    """Return the source without comments and docstrings, with each statement in its line."""
    lines = source.splitlines(keepends=True)
    cuts = [
        (*token.start, token.end[1])
        for token in tokenize.tokenize(io.BytesIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    text = [line.decode() for line in lines]
    for row, begin, end in cuts:
        text[row - 1] = text[row - 1][:begin].rstrip() + text[row - 1][end:]
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            assert first.end_lineno is not None
            row, last = first.lineno - 1, first.end_lineno - 1
            text[row] = text[row][: first.col_offset] + '""\n'
            text[row + 1 : last + 1] = ["\n"] * (last - row)
    return "".join(text).encode()


def _write(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    archive.writestr(entry, content, zipfile.ZIP_DEFLATED, compresslevel=_BEST)


if __name__ == "__main__":
    sys.stdout.buffer.write(_add_modules(sys.stdin.buffer.read()))
