"""Commands import only what they need, so that they start quickly."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cavvy.cli.main import SECTIONS

HEAVY = (
    *("asyncio", "sqlite3", "ssl", "cavvy.task_files", "cavvy.planner.deadline", "cavvy.store"),
    *("jinja2", "starlette", "cavvy.console"),
)
# what only some tasks and commands need
EXTRAS = (
    *(
        "cavvy.capabilities.importers.translators",
        "cavvy.capabilities.importers.shapes",
        "cavvy.capabilities.importers.scripts",
        "cavvy.planner.estimate",
        "cavvy.capabilities.estimates.tracer",
        "cavvy.capabilities.tuning.session",
        "cavvy.train",
    ),
    *("cavvy.providers.formats", "cavvy.readers", "cavvy.cloud_functions"),
)
COMMANDS = [name for rows in SECTIONS.values() for name in rows]
NO_PLUGINS = "importlib.metadata"  # reads the metadata of packages; needed only for plug-ins


def list_heavy(arguments: list[str], home: str, heavy: tuple[str, ...] = HEAVY) -> list[str]:
    """The modules of `heavy` that are loaded after a command has run in a new process."""
    code = (
        "import sys\nfrom cavvy.cli.main import cli\n"
        f"try: cli({arguments!r})\nexcept SystemExit: pass\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={"CAVVY_HOME": home, "PATH": "/usr/bin:/bin"},
    )
    return [name for name in heavy if repr(name) in done.stdout.splitlines()[-1]]


@pytest.fixture(scope="module")
def loaded_for_help(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What of HEAVY each command's help loads, each in a process forked from one that has imported
    the start of every command."""
    code = (
        "import json, os, sys\nfrom cavvy.cli.main import cli\n"
        f"for name in {COMMANDS!r}:\n"
        "    if os.fork():\n"
        "        if os.wait()[1]: sys.exit('the child of ' + name + ' failed')\n"
        "        continue\n"
        "    try: cli([name, '--help'])\n"
        "    except SystemExit: pass\n"
        f"    print('\\nLOADED', name, json.dumps([each for each in {HEAVY!r} if each in sys.modules]))\n"
        "    sys.stdout.flush()\n"
        "    os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={"CAVVY_HOME": str(tmp_path_factory.mktemp("home")), "PATH": "/usr/bin:/bin"},
    )
    rows = [line.split(" ", 2)[1:] for line in done.stdout.splitlines() if line[:7] == "LOADED "]
    return {name: json.loads(told) for name, told in rows}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_imports_nothing_heavy(name: str, loaded_for_help: dict[str, list[str]]) -> None:
    assert loaded_for_help[name] == []


def test_offers_import_only_the_catalog_if_nothing_is_configured(tmp_path: object) -> None:
    heavy = (
        "asyncio",
        "ssl",
        "hashlib",
        "difflib",
        "logging",
        "cavvy.capabilities.importers.reader",
        "cavvy.planner",
    )
    heavy += ("cavvy.client.client", "cavvy.spec", "cavvy.providers.base")
    assert list_heavy(["offers", "A100", "--limit", "1"], str(tmp_path), heavy) == []


def test_offers_read_no_metadata_without_third_party_providers(tmp_path: object) -> None:
    found = list_heavy(["offers", "--gpu", "A100", "--limit", "1"], str(tmp_path), (NO_PLUGINS,))
    assert found == []


def test_plan_loads_nothing_that_only_gangs_or_other_tasks_need(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text("run: echo hi\n")
    offers = "cavvy.providers.local.provider"
    heavy = ("cavvy.agent.documents", "cavvy.agent.work.hide", "cavvy.providers.hosts.fleet.gangs")
    heavy += ("cavvy.providers.local.gangs", "cavvy.planner.deadline.forecast", offers)
    heavy += ("cavvy.spec.describe", "cavvy.cli.plan.document")
    assert list_heavy(["plan", str(tmp_path / "task.yaml")], str(tmp_path), heavy) == [offers]


def test_a_cavvy_file_loads_no_extra(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text("run: echo hi\n")
    arguments, reads = ["validate", str(tmp_path / "task.yaml")], "cavvy.task_files"
    heavy = (*EXTRAS, "zipfile", "email", reads)
    assert list_heavy(arguments, str(tmp_path), heavy) == [reads]


def test_servers_and_agents_start_without_extras() -> None:
    code = (
        "import sys, cavvy.server.embedded, cavvy.api.app, cavvy.agent.main\n"
        f"print([name for name in {EXTRAS!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
