"""ARCHITECTURE.md shows the architecture as it is."""

import ast
import re
from collections.abc import Container
from pathlib import Path

from cavvy.cli.main import FAMILIES, PLACES

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_lists_exactly_the_modules() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    listed = re.findall(r"^\| `(\w+)/?` \|", page, re.MULTILINE)
    source = ROOT / "src" / "cavvy"
    modules = {p.name for p in source.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    modules |= {p.stem for p in source.glob("*.py") if not p.stem.startswith("__")}
    assert set(listed) == modules
    assert len(listed) == len(modules)


def test_the_page_lists_modules_in_the_order_of_the_import_contract() -> None:
    contract = (ROOT / ".importlinter").read_text().split("layers =\n", 1)[1].split("\n\n", 1)[0]
    floors = [re.findall(r"\w+", re.sub(r"\(\w+\)", "", line)) for line in contract.splitlines()]
    depth = {module: floor for floor, modules in enumerate(floors) for module in modules}
    listed = re.findall(r"^\| `(\w+)/?` \|", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    assert [depth[module] for module in listed] == sorted(depth[module] for module in listed)


def test_the_drawings_name_files_that_exist() -> None:
    drawings = re.findall(r"^```\n(.*?)^```", (ROOT / "ARCHITECTURE.md").read_text(), re.M | re.S)
    named = {name for each in drawings for name in re.findall(r"[a-z_]+(?:/[a-z_]+)+", each)}
    source = ROOT / "src" / "cavvy"
    paths = [path for path in source.rglob("*") if path.suffix == ".py" or path.is_dir()]
    known = {str(path.relative_to(source).with_suffix("")) for path in paths}
    assert named - known - {name.removeprefix("control/") for name in known} == set()
    assert "control/job_service" in named


def test_the_rows_of_what_to_change_name_files_that_exist() -> None:
    """A name without its folder is in one of the folders that the row has named before."""
    rows = re.findall(r"^\| .* \| (.*) \|$", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    missing = []
    for row in rows:
        folders = dict.fromkeys([ROOT / "src/cavvy", ROOT])
        for name in re.findall(r"`([\w/]+(?:/|\.(?:py|csv|js|html|md)))`", row):
            any_name = name.replace("NAME", "*")
            found = [path for each in folders for path in each.glob(any_name)]
            if not found:
                missing.append(name)
            folders |= dict.fromkeys(path if path.is_dir() else path.parent for path in found)
    assert missing == []
    assert len(rows) > 60


def test_the_cli_holds_one_file_for_each_command_or_family_and_modules_that_know_none() -> None:
    cli = ROOT / "src" / "cavvy" / "cli"
    housed = {name for names in FAMILIES.values() for name in names}
    own_ones = {name for name, place in PLACES.items() if place.startswith("cavvy.cli.")}
    assert housed <= own_ones
    commands = (own_ones - housed) | set(FAMILIES)
    folders = {path.parent.name for path in cli.glob("*/*.py")}
    assert {"reach", "task", "view"} <= folders
    own = {path.stem for path in cli.glob("*.py")} - {"__init__", "entry"}
    assert own | (folders - {"reach", "task", "view"}) == commands | {"main"}
    modules = list(cli.glob("*/**/*.py"))
    known = {f"cavvy.cli.{command}" for command in (*commands, "main")}
    assert {path.name: found for path in modules if (found := _list_imports(path) & known)} == {}
    assert _list_imports(cli / "top.py") & known == {
        "cavvy.cli.down"
    }  # a command that stands on another is seen


def _list_imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{each.name}" for each in node.names)}
    return found


def test_any_python_from_3_8_on_reads_what_runs_on_nodes() -> None:
    folders = ("agent", "providers/batch", "providers/hosts/supervisor", "providers/join/remote")
    for path in (path for each in folders for path in (ROOT / "src/cavvy" / each).rglob("*.py")):
        if path.parent.name != "batch" or path.name == "start.py":
            ast.parse(path.read_text(), str(path), feature_version=(3, 8))


def test_no_files_of_a_module_import_each_other_in_a_circle() -> None:
    """Imports for types, and imports within functions, count too."""
    assert _list_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {"b", "c"}
    source = ROOT / "src"
    files = {_name(path, source): path for path in source.rglob("*.py")}
    rooms: dict[str, dict[str, set[str]]] = {}
    for name, path in files.items():
        room = ".".join(name.split(".")[:2])
        near = {each for each in _list_arrows(name, path, files) if each.startswith(room + ".")}
        rooms.setdefault(room, {})[name] = near - {name}
    found = {room: circle for room, arrows in rooms.items() if (circle := _list_circles(arrows))}
    assert found == {}


def test_scripts_and_benchmarks_import_names_that_exist() -> None:
    """mypy does not check these programs, and few of them run in a test."""
    wrong, checked, known = [], 0, dict[str, set[str]]()
    for path in (
        each for part in ("scripts", "benchmarks") for each in (ROOT / part).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            module = node.module
            if module.split(".")[0] not in ("cavvy", "scripts", "benchmarks", "tests"):
                continue
            names = known.setdefault(module, _list_defined(module))
            for name in (each.name for each in node.names):
                checked += 1
                if name not in names and _find_file(f"{module}.{name}") is None:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {module}.{name}")
    assert wrong == []
    assert checked > 400


def _find_file(module: str) -> Path | None:
    place = ROOT.joinpath("src" if module.startswith("cavvy") else "", *module.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((each for each in files if each.is_file()), None)


def _list_defined(module: str) -> set[str]:
    """Return the names that a module defines or imports, outside its functions and classes."""
    file, found = _find_file(module), set[str]()
    for part in ast.parse(file.read_text("utf-8")).body if file else ():
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(part.name)
            continue
        for node in ast.walk(part):
            if isinstance(node, ast.Import | ast.ImportFrom):
                found |= {each.asname or each.name for each in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
    return found


_IMPORT = re.compile(
    r"^ *from (\.*)([\w.]*) import (\([^)]*\)|.*)|^ *import ([\w., ]+)", re.MULTILINE
)


def _list_arrows(name: str, path: Path, files: Container[str]) -> set[str]:
    """Return the files that a file imports. Reading the text takes a tenth of the time of parsing
    it.
    """
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for match in _IMPORT.finditer(path.read_text("utf-8")):
        dots, module, names, whole = match.groups("")
        found |= set(re.findall(r"[\w.]+", whole))
        if dots:
            above = package.split(".")[: len(package.split(".")) + 1 - len(dots)]
            module = ".".join([*above, *([module] if module else [])])
        for each in re.findall(r"\w+", names):
            found.add(inner if (inner := f"{module}.{each}") in files else module)
    return found


def _list_circles(arrows: dict[str, set[str]]) -> set[str]:
    """Return the files of circles, and the files between two circles: what remains once all files
    that import none of the rest, or that none of the rest imports, are taken away.
    """
    left = dict(arrows)
    while True:
        imported = set().union(*(left[each] & left.keys() for each in left)) if left else set()
        ends = {each for each in left if not left[each] & left.keys() or each not in imported}
        if not ends:
            return set(left)
        left = {each: aims for each, aims in left.items() if each not in ends}


def _name(path: Path, source: Path) -> str:
    return ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
