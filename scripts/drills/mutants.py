"""Change one operator in `control/decide/` at a time, and count the changes that unit tests detect.

    python scripts/drills/mutants.py [--sample 200] [--seed 1] [--only standby] [TESTS ...]

A mutant is one function in which a comparison, an `and` or `or`, a condition or a result is
inverted. For each mutant, the tests run in a forked process, in the given order, until one fails. A
test that needs an event loop is skipped. By default, the tests are the unit tests of decisions.
"""

import argparse
import ast
import asyncio
import copy
import importlib
import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parents[2]
DECIDE = ROOT / "src" / "cavvy" / "control" / "decide"
TESTS = ["test_decide_*.py", "test_control_[fsw]*.py", "test_warm_keep_policy.py"]
LONGEST_S = 120
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
    """One function of a module, with the node of this number inverted."""

    module: ModuleType
    function: ast.FunctionDef
    number: int

    def __str__(self) -> str:
        node = list(ast.walk(self.function))[self.number]
        line = getattr(node, "lineno", self.function.lineno)
        name = Path(str(self.module.__file__)).name
        return f"{name}:{line} {self.function.name}: {type(node).__name__}"

    def apply(self) -> None:
        """Replace the function's code in place, so that all importers call the changed function."""
        changed = copy.deepcopy(self.function)
        flip(list(ast.walk(changed))[self.number])
        text = ast.fix_missing_locations(ast.Module(body=[changed], type_ignores=[]))
        scratch = dict(vars(self.module))
        exec(compile(text, str(self.module.__file__), "exec"), scratch)
        vars(self.module)[self.function.name].__code__ = scratch[self.function.name].__code__


def list_mutants(module: ModuleType) -> Iterator[Mutant]:
    """Yield all mutants of a module's functions."""
    tree = ast.parse(Path(str(module.__file__)).read_text())
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            for number, node in enumerate(ast.walk(function)):
                if flip(copy.copy(node)):
                    yield Mutant(module, function, number)


class Drill:
    """Runs the collected tests once without changes, and then once for each mutant."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        asyncio.run = _refuse  # type: ignore[assignment]  # it never returns
        names = sorted(path.stem for path in DECIDE.glob("[a-z]*.py"))
        modules = [
            importlib.import_module(f"cavvy.control.decide.{name}")
            for name in names
            if self._options.only in (None, name)
        ]
        mutants = [mutant for module in modules for mutant in list_mutants(module)]
        random.Random(self._options.seed).shuffle(mutants)
        mutants = mutants[: self._options.sample]
        if _notices(session.items):
            raise pytest.UsageError("a test fails without any mutant")
        alive = []
        for mutant in mutants:
            if not _notices(session.items, mutant):
                alive.append(mutant)
                print("alive:", mutant, flush=True)
        print(f"{len(mutants) - len(alive)} of {len(mutants)} mutants die")
        return True


def _notices(items: list[pytest.Item], mutant: Mutant | None = None) -> bool:
    """Whether a test fails with the mutant. Runs the tests in a separate process."""
    child = os.fork()
    if child == 0:
        signal.alarm(LONGEST_S)  # an endless loop counts as detected
        if mutant is not None:
            mutant.apply()
        sys.stdout.flush()
        os._exit(any(_fails(item) for item in items))
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
    parser.add_argument("--only")
    parser.add_argument("tests", nargs="*")
    given = parser.parse_args()
    unit = ROOT / "tests" / "unit"
    paths = given.tests or [str(path) for name in TESTS for path in sorted(unit.glob(name))]
    quiet = ["-q", "-s", "-n", "0", "-p", "no:cacheprovider", "-p", "no:cov"]
    sys.exit(pytest.main([*quiet, *paths], plugins=[Drill(given)]))
