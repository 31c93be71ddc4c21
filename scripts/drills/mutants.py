"""Change one operator in `control/decide/` at a time, and count the changes that unit tests detect.

    python scripts/drills/mutants.py [--sample 200] [--seed 1] [--only standby] [TESTS ...]
    python scripts/drills/mutants.py --folder costs tests/costs/unit/test_*.py
    python scripts/drills/mutants.py --loops --folder providers/vast \
        tests/providers/clouds/contract/*_vast.py

A mutant is one function or method in which a comparison, an `and` or `or`, a condition or a result
is inverted. For each mutant, the tests that call the function run in a forked process, in the given
order, until one fails. A test that needs an event loop is skipped, unless `--loops` says that it
runs too. By default, the tests are the unit tests of decisions. `--folder` names another folder of
`src/cavvy`.
"""

import argparse
import ast
import asyncio
import copy
import importlib
import inspect
import json
import os
import signal
import sys
import tempfile
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
TESTS = ["test_decide_*.py", "test_control_[fsw]*.py", "test_warm_keep_policy.py"]
LONGEST_S = 120
Function = ast.FunctionDef | ast.AsyncFunctionDef
FLIPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


def flip(node: ast.AST) -> bool:
    """Change the node in place. Returns False if the node has nothing to change."""
    match node:
        case ast.Compare():
            node.ops = [FLIPS[type(node.ops[0])](), *node.ops[1:]]
        case ast.BoolOp():
            node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        case ast.If() | ast.IfExp():
            node.test = ast.UnaryOp(op=ast.Not(), operand=node.test)
        case ast.Return(value=ast.Constant(value=bool(value))):
            node.value = ast.Constant(value=not value)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            node.value = ast.Constant(value=None)
        case _:
            return False
    return True


@dataclass(frozen=True)
class Mutant:
    """One function of a module, or method of one of its classes, with the node of this number
    inverted.
    """

    module: ModuleType
    owner: str | None
    function: Function
    number: int

    def __str__(self) -> str:
        node = list(ast.walk(self.function))[self.number]
        line = getattr(node, "lineno", self.function.lineno)
        name = Path(str(self.module.__file__)).name
        return f"{name}:{line} {self.function.name}: {type(node).__name__}"

    @property
    def text(self) -> str:
        """What is changed, without its line: two versions of a file have samples of the same."""
        node = list(ast.walk(self.function))[self.number]
        return f"{self.owner} {self.function.name} {type(node).__name__} {ast.unparse(node)}"

    @property
    def key(self) -> str:
        """The function's file and name, as in `find_callers`."""
        return f"{self.module.__file__} {self.function.name}"

    def apply(self) -> None:
        """Replace the function's code in place, so that all importers call the changed function."""
        changed = copy.deepcopy(self.function)
        flip(list(ast.walk(changed))[self.number])
        changed.decorator_list, changed.returns = [], None
        for argument in ast.walk(changed.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None  # it may name what is imported for types only
        text = ast.fix_missing_locations(ast.Module(body=[changed], type_ignores=[]))
        code = compile(text, str(self.module.__file__), "exec")
        space = vars(self.module)
        found = (vars(space[self.owner]) if self.owner else space)[self.function.name]
        found = getattr(found, "fget", None) or inspect.unwrap(getattr(found, "__func__", found))
        codes = (each for each in code.co_consts if isinstance(each, CodeType))
        found.__code__ = next(each for each in codes if each.co_name == changed.name)


def list_mutants(module: ModuleType) -> Iterator[Mutant]:
    """Yield all mutants of a module's functions, and of its classes' methods that do not need the
    cell of `super()`.
    """
    tree = ast.parse(Path(str(module.__file__)).read_text())
    for owner, function in list_functions(tree):
        if owner and any(isinstance(n, ast.Name) and n.id == "super" for n in ast.walk(function)):
            continue
        for number, node in enumerate(ast.walk(function)):
            if flip(copy.copy(node)):
                yield Mutant(module, owner, function, number)


def list_functions(tree: ast.Module) -> Iterator[tuple[str | None, Function]]:
    """Yield a module's functions and methods, each with the name of its class."""
    for top in tree.body:
        if isinstance(top, Function):
            yield None, top
        elif isinstance(top, ast.ClassDef):
            yield from ((top.name, each) for each in top.body if isinstance(each, Function))


def list_modules(folder: str, only: str | None) -> Iterator[ModuleType]:
    """Yield the modules of a folder of `src/cavvy`."""
    for path in sorted((SOURCE / "cavvy" / folder).rglob("[a-z]*.py")):
        if only in (None, path.stem):
            name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
            yield importlib.import_module(name)


class Drill:
    """Runs the collected tests once without changes, and then once for each mutant."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        tests = session.items
        if not self._options.loops:
            asyncio.run = _refuse  # type: ignore[assignment]  # it never returns
            tests = [each for each in tests if "anyio_backend" not in each.fixturenames]  # type: ignore[attr-defined]
        modules = [*list_modules(self._options.folder, self._options.only)]
        mutants = [mutant for module in modules for mutant in list_mutants(module)]
        mutants.sort(key=lambda each: zlib.crc32(each.text.encode(), self._options.seed))
        mutants = mutants[: self._options.sample]
        callers = find_callers(tests)
        alive = []
        for mutant in mutants:
            items = [tests[number] for number in callers.get(mutant.key, ())]
            if not _notices(items, mutant):
                alive.append(mutant)
                print("alive:", mutant, "" if items else "(no test calls it)", flush=True)
        print(f"{len(mutants) - len(alive)} of {len(mutants)} mutants die")
        return True


def find_callers(items: Sequence[pytest.Item]) -> Mapping[str, Sequence[int]]:
    """Return the numbers of the tests that call each function of Cavvy, keyed by the function's
    file and name. Raises UsageError if a test fails.
    """
    with tempfile.TemporaryFile("w+") as file:

        def record() -> bool:
            found: defaultdict[str, list[int]] = defaultdict(list)
            for number, item in enumerate(items):
                called: set[tuple[str, str]] = set()

                def note(frame: FrameType, *_: object, called: set[Any] = called) -> None:
                    called.add((frame.f_code.co_filename, frame.f_code.co_name))

                threading.setprofile(note)
                sys.setprofile(note)
                failed = _fails(item)
                sys.setprofile(None)
                threading.setprofile(None)
                if failed:
                    return True
                for path, name in tuple(called):
                    if path.startswith(str(SOURCE)):
                        found[f"{path} {name}"].append(number)
            json.dump(found, file)
            file.flush()
            return False

        if _run_apart(record, 10 * LONGEST_S):
            raise pytest.UsageError("a test fails without any mutant")
        file.seek(0)  # both processes share its position
        found: Mapping[str, Sequence[int]] = json.load(file)
        return found


def _notices(items: Sequence[pytest.Item], mutant: Mutant) -> bool:
    """Whether one of the tests fails with the mutant."""

    def run() -> bool:
        mutant.apply()
        return any(_fails(item) for item in items)

    return _run_apart(run)


def _run_apart(run: Callable[[], bool], longest_s: int = LONGEST_S) -> bool:
    """Whether `run` returns True, ends its process or takes too long. `run` runs in a separate
    process.
    """
    child = os.fork()
    if child == 0:
        signal.alarm(longest_s)  # an endless loop counts as detected
        sys.stdout.flush()
        os._exit(run())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0


def _refuse(main: Any, **_: object) -> None:
    main.close()
    pytest.skip("a decision needs no event loop")


def _fails(item: Any) -> bool:
    reports = runtestprotocol(item, nextitem=None, log=False)
    return any(report.failed for report in reports)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sample", type=int, default=None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", default="control/decide")
    parser.add_argument("--only")
    parser.add_argument("--loops", action="store_true")
    parser.add_argument("tests", nargs="*")
    given = parser.parse_args()
    paths = given.tests or [
        str(path) for name in TESTS for path in sorted(ROOT.glob(f"tests/*/unit/{name}"))
    ]
    quiet = ["-q", "-s", "-n", "0", "-p", "no:cacheprovider", "-p", "no:cov"]
    sys.exit(pytest.main([*quiet, *paths], plugins=[Drill(given)]))
