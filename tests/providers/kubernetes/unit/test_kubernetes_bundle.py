"""The agent of pods fits into a config map, and runs with bytecode that needs no compilation."""

import ast
import base64
import io
import subprocess
import sys
import zipfile
from pathlib import Path

from cavvy.agent.bundle import make_archive
from cavvy.providers.kubernetes.compiled import compile_archive
from cavvy.providers.kubernetes.pods import make_bundle

MOST = 1 << 20  # bytes of all files of a config map, as API servers check it


def read_statements(source: bytes) -> tuple[str, list[tuple[str, int]]]:
    """What a source does, without its docstrings, and the line of each statement."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            assert isinstance(node.body[0], ast.Expr)
            node.body[0].value = ast.Constant("")
    lines = [
        (type(each).__name__, each.lineno) for each in ast.walk(tree) if isinstance(each, ast.stmt)
    ]
    return ast.dump(tree), lines


def test_the_agent_fits_into_a_config_map_with_a_reserve(tmp_path: Path) -> None:
    archive = make_archive()
    bundle = make_bundle(archive)
    packed = base64.b64decode(bundle["binaryData"]["agent.pyz"])
    texts = sum(len(text.encode()) for text in bundle["data"].values())
    assert len(packed) + texts < 0.9 * MOST, (
        "split the agent, or its bundle, before it is too large"
    )

    sources = zipfile.ZipFile(io.BytesIO(archive))
    files = zipfile.ZipFile(io.BytesIO(packed))
    assert {name for name in files.namelist() if not name.endswith(".pyc")} == set(
        sources.namelist()
    )
    for name in sources.namelist():
        assert read_statements(files.read(name)) == read_statements(sources.read(name)), name
    packed_sources = b"".join(map(files.read, sources.namelist()))
    assert b"\n# " not in packed_sources
    assert b"\n# " in b"".join(map(sources.read, sources.namelist()))
    assert {f"{name}c" for name in sources.namelist() if name.endswith(".py")} <= set(
        files.namelist()
    )

    place = tmp_path / "agent.pyz"
    place.write_bytes(packed)
    alone = (name for name in sources.namelist() if b"from ." not in sources.read(name))
    module = next(
        name.removesuffix(".py") for name in alone if "/" not in name and "__" not in name
    )
    code = (
        f"import sys; sys.path.insert(0, {str(place)!r})\n"
        f"import {module} as found\nprint(found.__file__, found.__doc__)"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == [f"{place}/{module}.pyc", "None"], done.stderr


def test_a_text_keeps_its_lines_that_look_like_comments() -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.py", 'X = """\n# of the text\n"""\n# a remark\n')
    found = zipfile.ZipFile(io.BytesIO(compile_archive(packed.getvalue())))
    assert found.read("a.py") == b'X = """\n# of the text\n"""\n\n'
