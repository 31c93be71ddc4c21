"""Capabilities are found, and those that cannot be used are left out with the reason."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.own_parts import reads_other_tools
from tests.shared import once_in_group, when_group_ends

from cavvy.frame.capability import Capability
from cavvy.frame.discover import _choose, find_capabilities
from cavvy.frame.entry_points import list_declared

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "capability"
COMPILED = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # programs keep what they compile
OWN = sorted(path.parent.name for path in ROOT.glob("src/cavvy/capabilities/*/capability.py"))


# Most of what a program that looks at Cavvy imports is of others, so one process imports that, and
# each program is a copy of it, with the folders of Cavvy that it is told.
_COPIES = """
import asyncio, click.testing, fastapi, json, os, sqlite3, sys, traceback
assert not [name for name in sys.modules if name.partition(".")[0] == "cavvy"]
for line in sys.stdin:
    code, folders = json.loads(line)
    read, write = os.pipe()
    if not (copy := os.fork()):
        status = 1
        try:
            os.dup2(write, 1)
            os.dup2(write, 2)
            sys.path[1:1] = folders
            exec(code, {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    os.close(write)
    with open(read) as output:
        text = output.read()
    print(json.dumps([os.waitpid(copy, 0)[1], text]), flush=True)
"""


class Programs:
    """Runs programs in copies of a process that has no module of Cavvy yet."""

    def __init__(self) -> None:
        words = [sys.executable, "-W", "ignore", "-c", _COPIES]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(words, env={**COMPILED, "PYTHONPATH": ""}, **pipes)  # type: ignore[call-overload]

    def run(self, code: str, *folders: Path) -> str:
        """What the program prints, with these folders first on its path."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([code, [*map(str, folders)]]) + "\n")
        self._process.stdin.flush()
        status, text = json.loads(self._process.stdout.readline())
        assert status == 0, text
        return str(text)

    def end(self) -> None:
        self._process.communicate()


@once_in_group
def start_programs() -> Programs:
    started = Programs()
    when_group_ends(started.end)
    return started


def list_commands(source: Path, *more: Path) -> dict[str, object]:
    """The commands by section, and what is left out, of the Cavvy in a folder."""
    code = (
        "import json, cavvy\nfrom cavvy.cli.main import LEFT_OUT, PLACES, SECTIONS, cli\n"
        "print(json.dumps([cavvy.__file__, SECTIONS, LEFT_OUT, PLACES]))\n"
    )
    found = json.loads(start_programs().run(code, source, *more))
    file, sections, left_out, places = found
    assert Path(file).is_relative_to(source)
    return {"sections": sections, "left out": left_out, "places": places}


def test_own_capabilities_are_found_by_their_folders() -> None:
    found = find_capabilities()
    assert [each.name for each in found.capabilities] == OWN
    assert found.faults == {}
    for each in found.capabilities:
        assert all((ROOT / "docs" / page).exists() for page in each.docs)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with what Python has compiled of it, which most of the time of its
    programs would go into.
    """
    made = tmp_path_factory.mktemp("copy") / "src"
    shutil.copytree(ROOT / "src", made, ignore=shutil.ignore_patterns("*.egg-info", "*.pyc.*"))
    return made


@contextmanager
def left_out(name: str, source: Path, folder: Path) -> Iterator[None]:
    """While the block runs, the copy lacks a capability."""
    place = source / "cavvy" / "capabilities" / name
    shutil.move(place, folder / name)
    try:
        yield
    finally:
        shutil.move(folder / name, place)


@pytest.mark.parametrize("name", OWN)
def test_the_rest_works_without_a_capability(name: str, source: Path, tmp_path: Path) -> None:
    """Whole suites without each one: `scripts/drills/without.py`."""
    taken, standing = list_taken(name)
    whole, shown = list_whole(), look_at_whole()
    with left_out(name, source, tmp_path):
        rest, left = list_commands(source), look(source)
        users = list_users(name, source)
    gone = {command.name for each in taken for command in each.commands}
    assert gone <= set(whole["places"])  # type: ignore[call-overload]
    assert set(rest["left out"]) == standing  # type: ignore[call-overload]
    for title, rows in whole["sections"].items():  # type: ignore[attr-defined]
        kept = [word for word in rows if word not in gone]
        assert list(rest["sections"].get(title, ())) == kept  # type: ignore[attr-defined]
    assert left.logged == shown.logged == []
    typed = {"__init__.py"} if any(each.exports for each in taken) else set()
    assert users - typed <= {
        each.name for each in find_capabilities().capabilities if name in (*each.needs, *each.uses)
    }
    assert bool(shown.tables - left.tables) == any(each.tables for each in taken)
    assert bool(shown.routes - left.routes) == any(each.routes for each in taken)
    assert shown.pages - left.pages == {
        page.path for each in taken for page in (*each.pages, *each.actions, *each.data)
    }
    for before, after in zip(shown[:3], left[:3], strict=True):
        assert after <= before


def test_type_checkers_read_what_capabilities_export() -> None:
    """`cavvy` imports it only for them; what runs asks the capabilities."""
    tree = ast.parse((ROOT / "src/cavvy/__init__.py").read_text("utf-8"))
    (typed,) = [
        each.body
        for each in tree.body
        if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING"
    ]
    found = {
        name.asname: f"{each.module}:{name.name}"
        for each in typed
        if isinstance(each, ast.ImportFrom) and _is_installed(each.module or "")
        for name in each.names
    }
    named = {
        each.name: each.place
        for one in find_capabilities().capabilities
        if one.name in OWN
        for each in one.exports
    }
    assert found == named


def _is_installed(module: str) -> bool:
    parts = module.split(".")
    return parts[:2] == ["cavvy", "capabilities"] and parts[2] in OWN


def list_taken(name: str) -> tuple[list[Capability], set[str]]:
    """What goes with a capability: it and those that stand on it, and the names of these."""
    found = find_capabilities().capabilities
    standing = set[str]()
    while (
        more := {each.name for each in found if not {name, *standing}.isdisjoint(each.needs)}
        - standing
    ):
        standing |= more
    return [each for each in found if each.name in {name, *standing}], standing


def list_users(name: str, source: Path) -> set[str]:
    """The capabilities whose code names another one; a file of the core counts by its path."""
    files = [
        path.relative_to(source / "cavvy").parts
        for path in source.rglob("*.py")
        if f"cavvy.capabilities.{name}." in path.read_text("utf-8")
    ]
    return {parts[1] if parts[0] == "capabilities" else "/".join(parts) for parts in files}


def test_imports_between_capabilities_are_those_that_they_declare() -> None:
    text = (ROOT / ".importlinter").read_text()
    apart = text[text.index("[importlinter:contract:capabilities-apart]") :]
    listed = re.findall(r"capabilities\.(\w+)\.\*\* -> cavvy\.capabilities\.(\w+)\.\*\*", apart)
    assert len(listed) == apart.count("->")
    assert {pair for pair in listed if {*pair} <= {*OWN}} == {
        (each.name, other)
        for each in find_capabilities().capabilities
        for other in (*each.needs, *each.uses)
        if other in OWN
    }


@reads_other_tools
def test_own_files_are_read_without_those_of_other_tools(source: Path, tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text("name: own\nrun: echo hi\n")
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --nodes=2\nsrun hostname\n")
    (tmp_path / "pool.yaml").write_text("name: p\nmax: 2\nresources: {cpu: 2}\n")
    code = """
from cavvy.spec import SpecError
from cavvy.task_files import ReadOptions, load_script, load_task
from cavvy.task_files.pools import read_pool

def refused(file, **options):
    try:
        load_task(file, options=ReadOptions(**options))
    except SpecError as error:
        return str(error)

assert load_task("task.yaml").task.name == "own"
assert load_task("task.yaml", options=ReadOptions(dialect="cavvy")).task.run
assert read_pool(open("pool.yaml").read(), file="pool.yaml", project="default").max_nodes == 2
assert load_script("job.sbatch", []) is None
print(refused("job.sbatch"), refused("task.yaml", dialect="slurm"), sep="\\n")
"""
    readers = [each.name for each in find_capabilities().capabilities if each.task_files]
    with ExitStack() as stack:
        for name in readers:
            stack.enter_context(left_out(name, source, tmp_path))
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**COMPILED, "PYTHONPATH": str(source)},
        )
    assert done.returncode == 0, done.stderr
    assert "the file is a script, not a task file" in done.stdout
    assert "-- bash job.sbatch` runs the script" in done.stdout
    assert "--as slurm: unknown tool" in done.stdout


class Look(NamedTuple):
    """What the API's description, a new database and the console of a Cavvy show, whose
    `cavvy --help` ran. `logged` is what its log says.
    """

    routes: frozenset[str]
    tables: frozenset[str]
    pages: frozenset[str]
    logged: list[str]


_LOOK = """
import json, logging
logged = []
class Keep(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())
logging.getLogger("cavvy").addHandler(Keep())
from click.testing import CliRunner
from cavvy.cli.main import cli
assert CliRunner().invoke(cli, ["--help"]).exit_code == 0
from types import SimpleNamespace
from cavvy.api.app import make_app
from cavvy.control.own_reconcilers import OwnReconcilers
plane = SimpleNamespace(own=OwnReconcilers(None))
paths = [path for path in make_app(SimpleNamespace(control_plane=plane)).openapi()["paths"]]
from cavvy.store.open import MemoryStore
session = MemoryStore()._session
tables = [row[0] for row in session.run("SELECT name FROM sqlite_master WHERE type = 'table'")]
from cavvy.console.app import Console
class Nobody:
    shared = True
    connect = None
console = Console(Nobody(), "s", None)
pages = [each.path for each in console._make_app().routes if hasattr(each, "endpoint")]
print(json.dumps([paths, tables, pages, logged]))
"""


@cache
def list_whole() -> dict[str, object]:
    return list_commands(ROOT / "src")


@cache
def look_at_whole() -> Look:
    return look(ROOT / "src")


def look(source: Path, *more: Path) -> Look:
    printed = start_programs().run(_LOOK, source, *more)
    routes, tables, pages, logged = json.loads(printed.splitlines()[-1])
    return Look(frozenset(routes), frozenset(tables), frozenset(pages), logged)


def install_example(folder: Path) -> Path:
    """Install examples/capability into a folder; return the file with its entry points."""
    shutil.copytree(EXAMPLE / "cavvy_reminders", folder / "cavvy_reminders")
    metadata = folder / "cavvy_reminders-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: reminders\nVersion: 1.0\n")
    points = metadata / "entry_points.txt"
    points.write_text("[cavvy.capabilities]\nreminders = cavvy_reminders.capability\n")
    return points


def test_a_package_of_someone_else_adds_a_command(tmp_path: Path) -> None:
    points = install_example(tmp_path)
    found = list_commands(ROOT / "src", tmp_path)
    names = list(found["sections"]["Run and watch"])  # type: ignore[index]
    assert names[names.index("ps") + 1] == "remind"
    assert found["left out"] == {}

    points.write_text("[cavvy.capabilities]\nruns = cavvy_reminders.capability\ngone = no.such\n")
    found = list_commands(ROOT / "src", tmp_path)
    assert "remind" not in found["sections"]["Run and watch"]  # type: ignore[index]
    assert found["left out"] == {
        "gone": "ModuleNotFoundError: No module named 'no'",
        "runs": "ValueError: cavvy_reminders.capability: its name is 'reminders', expected 'runs'",
    }


def test_a_module_that_is_named_like_the_group_is_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = install_example(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "importlib.metadata", raising=False)
    points.write_text("[submitit]\nexecutor = cavvy.capabilities.importers.submitit_executor:A\n")
    assert list_declared("cavvy.capabilities") == []
    assert "importlib.metadata" not in sys.modules


def test_a_package_of_someone_else_adds_all_that_capabilities_can_add(tmp_path: Path) -> None:
    install_example(tmp_path)
    usual, more = look_at_whole(), look(ROOT / "src", tmp_path)
    assert more.routes - usual.routes == {"/v1/projects/{project}/reminders"}
    assert more.tables - usual.tables == {"reminders"}
    assert more.pages - usual.pages == {"/reminders"}
    assert more.logged == usual.logged


def test_what_needs_a_missing_capability_is_left_out() -> None:
    made = {
        "base": Capability("base", ""),
        "chat": Capability("chat", "", needs=("models",)),
        "edge": Capability("edge", "", needs=("base",)),
        "more": Capability("more", "", needs=("chat",)),
    }
    found = _choose(dict.fromkeys(made, ""), {}, lambda name, _: made[name])
    assert [each.name for each in found.capabilities] == ["base", "edge"]
    assert found.faults == {
        "chat": "it needs models, which is not installed",
        "more": "it needs chat, which is not installed",
    }


def test_code_of_others_that_ends_the_process_is_left_out() -> None:
    def read(name: str, module: str) -> Capability:
        raise SystemExit(3)

    assert _choose({"bad": "x"}, {}, read) == ((), {"bad": "SystemExit: 3"})
