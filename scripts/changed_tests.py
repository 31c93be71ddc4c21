"""Print the test files that the changes of this working tree can break; called by
`make test-changed`.

    python scripts/changed_tests.py              changes since main
    python scripts/changed_tests.py REVISION     changes since a revision

A test file is printed if it, or anything that it imports, directly or not, has changed. An import
inside a function counts, one that only type checkers read does not. A provider is loaded by its
name, so a file needs those whose names stand in its strings, and a command of the CLI where a
string begins with it or has `cavvy` before it. The package `cavvy` imports nothing itself: it loads
each name of the Python interface when that is used, so a file that uses `cavvy.Client` needs the
module of the client, and not those of all names. A changed file that is no module, such as a
template or a table, counts as a change of the modules of its package that name it, or else of the
whole package. A changed capability chooses the tests that walk through what all capabilities add,
and those of its room that may find it by its folder.

A file outside the package, such as a page or a script, is read by its path: a test needs it if a
string of the test, or of what it imports, names the file or one of its folders. A program outside
the package, such as a benchmark, counts as imported where strings have its name and its folders.
The tests of the repository read all files, so any change chooses them.

Tests of real servers run programs rather than import them, so they are printed only if they have
changed themselves: `make test-servers` runs all of them.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import grimp

from cavvy.frame.discover import find_capabilities

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "src/cavvy/"
# A package whose modules are loaded by name, and the module that loads them.
LOADED_BY_NAME = {
    "cavvy.providers": "cavvy.providers.registry",
    "cavvy.providers.formats": "cavvy.providers.formats",
    "cavvy.readers": "cavvy.readers",
}
# A change of one of these can break every test.
EVERYWHERE = (
    "tests/conftest.py",
    "tests/fixtures.py",
    "pyproject.toml",
    "constraints.txt",
    "requirements/",
)
PROCESSES = ("system", "hostile")
# Most of these tests read all files of the repository, or all sources.
READS_ALL = "tests/repository/unit/"
# A test whose strings name one of these folders needs all files in it only if it also lists files:
# others look for a program in it, or put it on a path.
WHOLE = ("src", "src/cavvy", "tests")
CAPABILITIES = SOURCE + "capabilities/"
# What finds the capabilities by their folders: a test of a capability's room that needs it may need
# all of the capability.
FINDS = "cavvy.frame.discover"
# What tests of all routes, commands or descriptions import, and the part of a description that they
# walk through; "name" is in each.
WALKS = {
    "cavvy.api.app.list_routes": "routes",
    "cavvy.cli.main.PLACES": "commands",
    "cavvy.frame.discover.find_capabilities": "name",
    "schemathesis": "routes",
}
# The same for what any test of these modules runs, whether it imports them itself or not.
LOADS = {"cavvy.capabilities.serving.gateway.extensions": "gateway_meters"}
LISTS_FILES = {"glob", "rglob", "walk", "iterdir", "ls-files"}


def main(arguments: list[str]) -> None:
    base = arguments[0] if arguments else _git("merge-base", "HEAD", "main").strip()
    changed = _git("diff", "--name-only", base).split("\n")
    changed += _git("ls-files", "--others", "--exclude-standard").split("\n")
    for file in select({name for name in changed if name}, _tests()):
        print(file)


def select(changed: set[str], tests: Iterable[Path]) -> list[str]:
    """The test files, relative to the root, that changes of these files can break."""
    everything = any(name.startswith(EVERYWHERE) for name in changed)
    modules, places = _modules_of(changed), _places_of(changed)
    inner = [name.removeprefix(CAPABILITIES) for name in changed if name.startswith(CAPABILITIES)]
    own = {name.partition("/")[0] for name in inner}
    rooms, walked = tuple(f"tests/{name}/" for name in own), _walked(own, WALKS)
    modules |= _walked(own, LOADS)
    chosen = []
    for test in tests:
        name = test.relative_to(ROOT).as_posix()
        if name in changed:
            chosen.append(name)
        elif changed and test.parent.name not in PROCESSES:
            reads = everything or name.startswith(READS_ALL) or not places.isdisjoint(_names(name))
            reads = reads or not walked.isdisjoint(_read(name)[0])
            if rooms and name.startswith(rooms) and FINDS in _needs(name):
                reads = True
            if reads or not modules.isdisjoint(_needs(name)):
                chosen.append(name)
    return chosen


def _walked(names: set[str], parts: dict[str, str]) -> set[str]:
    """What tests import that walk through a part which one of these capabilities has. `parts` has
    the part's name for what is imported."""
    found = {each.name: each for each in find_capabilities().capabilities}
    return {
        word
        for word, part in parts.items()
        if any(name not in found or getattr(found[name], part) for name in names)
    }


def _places_of(changed: set[str]) -> set[str]:
    """What a string that names one of the changed files, or a folder of it, may be. A test names
    a file in `tests` from its own folder.
    """
    found: set[str] = set()
    for name in changed:
        path = Path(name)
        found |= {name, *(parent.as_posix() for parent in path.parents)} - {"."}
        if name.startswith("tests/"):
            found.add(path.name)
    return found


def _tests() -> list[Path]:
    return sorted(ROOT.glob("tests/**/test_*.py"))


def _modules_of(changed: set[str]) -> set[str]:
    """The modules of Cavvy and the files of tests that the changed files are, or belong to."""
    found: set[str] = set()
    known = _graph().modules
    for name in changed:
        if not name.startswith(SOURCE):
            found.add(name)
            continue
        module = _module(name)
        if name.endswith(".py"):
            found.add(module)
        else:  # a file that a module of its package reads
            package = next(each for each in _parents(module) if each in known)
            inner = {package, *_graph().find_descendants(package)}
            found |= {each for each in inner if _names_file(each, Path(name).name)} or inner
    return found


def _names_file(module: str, name: str) -> bool:
    path = ROOT / "src" / module.replace(".", "/")
    file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    return (
        file.exists()
        and re.search(rf"[\"'/:]{re.escape(name)}[\"']", file.read_text("utf-8")) is not None
    )


def _module(file: str) -> str:
    """`src/cavvy/cli/main.py` is `cavvy.cli.main`; a package is named without `__init__`."""
    return file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _parents(module: str) -> Iterator[str]:
    while module:
        module = module.rpartition(".")[0]
        yield module or "cavvy"


@cache
def _graph() -> grimp.ImportGraph:
    graph = grimp.build_graph("cavvy", cache_dir=None, exclude_type_checking_imports=True)
    for module in graph.find_modules_directly_imported_by("cavvy"):
        graph.remove_import(importer="cavvy", imported=module)
    return graph


@cache
def _interface() -> dict[str, str]:
    """The module of each name that `cavvy` loads when it is used, as it tells type checkers."""
    tree = ast.parse((ROOT / SOURCE / "__init__.py").read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"cavvy.{each.asname or each.name}": node.module for each in node.names}
    return found


@cache
def _names(file: str) -> frozenset[str]:
    """The files and folders that the strings of a file of tests name, and those of the files of
    tests that it imports.
    """
    files = [each for each in _needs(file) if each.startswith("tests/") and each.endswith(".py")]
    found: set[str] = set()
    for each in files:
        said = _read(each)[3]
        found |= said if said & LISTS_FILES else said.difference(WHOLE)
    return frozenset(found)


@cache
def _needs(file: str) -> frozenset[str]:
    """The files of tests that a file of tests imports, directly or not, and the modules of Cavvy
    that these files import, directly or not.
    """
    files, modules, words, waiting = {file}, set[str](), set[str](), [file]
    while waiting:
        at = waiting.pop()
        imported, said, arguments, places = _read(at)
        words |= said
        imported = imported.union(*(_fixtures().get(name, ()) for name in arguments))
        programs = {f"{Path(at).parent}/{name}.py" for name in imported}
        programs &= set().union(*_programs().values())
        for program in (programs | set(_named_programs(said, places))) - files:
            files.add(program)
            waiting.append(program)
        for name in imported:
            name = _interface().get(name, name)
            other = name.replace(".", "/") + ".py"
            if name.startswith("tests.") and other not in files and (ROOT / other).exists():
                files.add(other)
                waiting.append(other)
            elif name in _graph().modules:
                modules |= {name, *_upstream(name)}
                if (run := f"{name}.__main__") in _graph().modules:  # `python -m name` runs it
                    modules |= {run, *_upstream(run)}
            elif name.startswith("cavvy."):
                modules.add(name)  # of a module that has been deleted, or what a module defines
    for name in _loaded(words, modules):
        modules |= {name, *_upstream(name)}
    return frozenset(files | modules)


def _named_programs(words: frozenset[str], places: frozenset[str]) -> Iterator[str]:
    """The programs whose names are among the words, and whose folders are among the places."""
    parts = {part for place in places for part in place.split("/")}
    for word in words & _programs().keys():
        yield from (each for each in _programs()[word] if parts.issuperset(each.split("/")[:-1]))


@cache
def _programs() -> dict[str, set[str]]:
    """The Python files outside the package and the tests, by their names without the suffix."""
    found: dict[str, set[str]] = {}
    for name in _git("ls-files", "--cached", "--others", "--exclude-standard", "*.py").split():
        if not name.startswith((SOURCE, "tests/")) and (ROOT / name).exists():
            found.setdefault(Path(name).stem, set()).add(name)
    return found


def _loaded(words: set[str], modules: set[str]) -> Iterator[str]:
    """The modules that are loaded by these names, if what loads them is among the modules."""
    for package, loader in LOADED_BY_NAME.items():
        if loader in modules:
            for module in _graph().find_children(package):
                name = module.rpartition(".")[2].removesuffix("_cloud")
                if {name, name.replace("_", "-")} & words:
                    yield module
    if "cavvy.cli.main" in modules:
        yield from (module for name, module in main_table().items() if f"{name}()" in words)


@cache
def main_table() -> dict[str, str]:
    """The module of each command."""
    from cavvy.cli.main import PLACES

    return {name: place.partition(":")[0] for name, place in PLACES.items()}


@cache
def _upstream(module: str) -> frozenset[str]:
    return frozenset(_graph().find_upstream_modules(module))


@cache
def _read(file: str) -> tuple[frozenset[str], frozenset[str], frozenset[str], frozenset[str]]:
    """What a file imports, as names of modules; the words of its strings, possible commands also
    with parentheses behind; the shared fixtures that it may ask for, by the arguments of its
    tests and fixtures; and what may be paths: its strings, up to a wildcard. The last also have the
    functions that list files.
    """
    nodes = list(_walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))))
    words, arguments, places, own = set[str](), set[str](), set[str](), set[str]()
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)):
                words.update(re.findall(r"[a-z][a-z0-9_-]*", text))
                words.update(f"{name}()" for name in _list_commands(text))
                places.add(text.partition("*")[0].rstrip("/"))
            case ast.Attribute(attr=name) if name in LISTS_FILES:
                places.add(name)
            case ast.Attribute(attr="__file__", value=package):  # whose folder the file looks at
                if (name := ast.unparse(package)).partition(".")[0] == "cavvy":
                    places.add("src/" + name.replace(".", "/"))
            case ast.FunctionDef() | ast.AsyncFunctionDef() if _gets_fixtures(node):
                arguments.update(each.arg for each in (*node.args.args, *node.args.kwonlyargs))
                if not node.name.startswith("test"):
                    own.add(node.name)
            case ast.ImportFrom(names=names):
                own.update(each.asname or each.name for each in names)
    wanted = arguments - own
    return frozenset(_imports(nodes)), frozenset(words), frozenset(wanted), frozenset(places)


def _list_commands(text: str) -> Iterator[str]:
    """The words of a string that can be a command: the first of each line, and all of those where
    options or `cavvy` come before it.
    """
    for line in text.splitlines():
        words = re.findall(r"[a-z][a-z0-9-]*", line)
        yield from words if line.startswith("-") or "cavvy" in line else words[:1]


def _gets_fixtures(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether pytest calls the function with fixtures for its arguments."""
    fixtures = (ast.unparse(each) for each in node.decorator_list)
    return node.name.startswith("test") or any("fixture" in each for each in fixtures)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a tree that say something, in any order; faster than `ast.walk`."""
    waiting = [node]
    while waiting:
        yield (node := waiting.pop())
        for value in vars(node).values():
            if type(value) is list:
                waiting += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                waiting.append(value)


def _imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Both a and a.b for `from a import b`, the names of `cavvy` that are used, and the modules and
    names that stand in strings, since these are loaded, run or replaced by their names.
    """
    for node in nodes:
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield from (module, *(f"{module}.{alias.name}" for alias in node.names))
            case ast.Attribute(attr=name, value=ast.Name(id="cavvy")):
                yield f"cavvy.{name}"
            case ast.Constant(value=str(text)):
                yield from re.findall(r"\b(?:cavvy|tests)(?:\.\w+)+", text)
                for names in re.findall(r"from cavvy import ([\w, ]+)", text):
                    yield from (f"cavvy.{name}" for name in re.split(r"[, ]+", names))


@cache
def _fixtures() -> dict[str, frozenset[str]]:
    """What each shared fixture imports."""
    tree = ast.parse((ROOT / "tests/fixtures.py").read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in tree.body if isinstance(node, kinds)]
    return {node.name: frozenset(_imports(_walk(node))) for node in found}


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    main(sys.argv[1:])
