"""Print the test files that the changes of this working tree can break; called by
`make test-changed`.

    python scripts/changed_tests.py              changes since main
    python scripts/changed_tests.py REVISION     changes since a revision

A test file is printed if it, or anything that it imports, directly or not, has changed. An import
inside a function counts. A command of the CLI and a provider are loaded by their names, so a file
needs those whose names stand in its strings. A changed file that is no module, such as a template
or a table, counts as a change of its whole package. Tests of real servers run programs rather than
import them, so they are printed only if they have changed themselves: `make test-servers` runs all
of them.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
SOURCE = "src/cavvy/"
# A package whose modules are loaded by name, and the module that loads them.
LOADED_BY_NAME = {
    "cavvy.cli": "cavvy.cli.main",
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


def main(arguments: list[str]) -> None:
    base = arguments[0] if arguments else _git("merge-base", "HEAD", "main").strip()
    changed = _git("diff", "--name-only", base).split("\n")
    changed += _git("ls-files", "--others", "--exclude-standard").split("\n")
    for file in select({name for name in changed if name}, _tests()):
        print(file)


def select(changed: set[str], tests: Iterable[Path]) -> list[str]:
    """The test files, relative to the root, that changes of these files can break."""
    everything = any(name.startswith(EVERYWHERE) for name in changed)
    modules = _modules_of(changed)
    chosen = []
    for test in tests:
        name = test.relative_to(ROOT).as_posix()
        by_process = test.parent.name in PROCESSES
        if name in changed or (not by_process and (everything or modules & _needs(name))):
            chosen.append(name)
    return chosen


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
            found |= {package, *_graph().find_descendants(package)}
    return found


def _module(file: str) -> str:
    """`src/cavvy/cli/main.py` is `cavvy.cli.main`; a package is named without `__init__`."""
    return file.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _parents(module: str) -> Iterator[str]:
    while module:
        module = module.rpartition(".")[0]
        yield module or "cavvy"


@cache
def _graph() -> grimp.ImportGraph:
    return grimp.build_graph("cavvy", cache_dir=None)


@cache
def _needs(file: str) -> frozenset[str]:
    """The files of tests that a file of tests imports, directly or not, and the modules of Cavvy
    that these files import, directly or not.
    """
    files, modules, words, waiting = {file}, set[str](), set[str](), [file]
    while waiting:
        imported, said, arguments = _read(waiting.pop())
        words |= said
        imported = imported.union(*(_fixtures().get(name, ()) for name in arguments))
        for name in imported:
            other = name.replace(".", "/") + ".py"
            if name.startswith("tests.") and other not in files and (ROOT / other).exists():
                files.add(other)
                waiting.append(other)
            elif name in _graph().modules:
                modules |= {name, *_upstream(name)}
    for name in _loaded(words, modules):
        modules |= {name, *_upstream(name)}
    return frozenset(files | modules)


def _loaded(words: set[str], modules: set[str]) -> Iterator[str]:
    """The modules that are loaded by these names, if what loads them is among the modules."""
    for package, loader in LOADED_BY_NAME.items():
        if loader in modules:
            for module in _graph().find_children(package):
                name = module.rpartition(".")[2].removesuffix("_cloud")
                if {name, name.replace("_", "-")} & words:
                    yield module
    if "cavvy.cli.main" in modules:
        yield from (module for name, module in main_table().items() if name in words)


@cache
def main_table() -> dict[str, str]:
    """The module of each command."""
    from cavvy.cli.main import PLACES

    return {name: place.partition(":")[0] for name, place in PLACES.items()}


@cache
def _upstream(module: str) -> frozenset[str]:
    return frozenset(_graph().find_upstream_modules(module))


@cache
def _read(file: str) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """What a file imports, as names of modules, the words of its strings, and the arguments of its
    functions, some of which are fixtures.
    """
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    words, arguments = set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)):
                words.update(re.findall(r"[a-z][a-z0-9_-]*", text))
            case ast.arg(arg=name):
                arguments.add(name)
    return frozenset(_imports(tree)), frozenset(words), frozenset(arguments)


def _imports(tree: ast.AST) -> Iterator[str]:
    """Both a and a.b for `from a import b`, and the modules that are named in strings, since these
    are loaded, run or replaced by their names.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield from (module, *(f"{module}.{alias.name}" for alias in node.names))
            case ast.Constant(value=str(text)) if text.startswith(("cavvy.", "tests.")):
                yield text


@cache
def _fixtures() -> dict[str, frozenset[str]]:
    """What each shared fixture imports."""
    tree = ast.parse((ROOT / "tests/fixtures.py").read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: frozenset(_imports(node)) for node in tree.body if isinstance(node, kinds)}


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    main(sys.argv[1:])
