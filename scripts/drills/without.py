"""Runs the tests without capabilities: `python scripts/drills/without.py NAME… [PYTEST…]`.

Each NAME is taken out of a copy of the tree that git knows, alone; `NAME+NAME` are taken out
together, and `each` stands for all, one after the other. With a capability go its tests, and the
capabilities that need it. In each copy, pytest runs the tests that need no real servers, or what
its arguments choose, at low priority. The pages still describe what was taken out, so tests that
compare pages with the code are left out.

The end says what ran and what failed. What fails in a copy from which nothing was taken, too, is
named, but is no fault of a capability.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from cavvy.frame.discover import find_capabilities

ROOT = Path(__file__).resolve().parents[2]
CAPABILITIES = ROOT / "src/cavvy/capabilities"
_USUAL = ["-m", "not system", "tests"]
# what compares the pages, which describe all capabilities, with the code
_OF_PAGES = (
    "tests/repository/unit/test_docs_pages.py",
    "tests/repository/unit/test_page_blocks.py",
    "tests/repository/unit/test_page_links.py",
    "tests/repository/unit/test_architecture.py",
    "tests/cli/unit/test_commands_named.py",
    "tests/api/api/test_api_docs.py",
    "tests/train/torch/test_train_guides.py::test_a_guides_commands_are_understood",
)
_NICE = 10


class Run(NamedTuple):
    """What the tests of one copy have done."""

    gone: Sequence[str]
    passed: int
    skipped: int
    failed: dict[str, str]  # the test, and the first line of its error
    cpu_s: float
    status: int  # how pytest ended

    def describe(self) -> str:
        if self.status not in (0, 1):
            return f"pytest ended with status {self.status}: see its output above"
        ran = f"{self.passed} passed, {len(self.failed)} failed, {self.skipped} skipped"
        return f"{ran}, {self.cpu_s:.0f} CPU s"


def list_gone(names: Sequence[str]) -> Sequence[str]:
    """The capabilities that go when these are taken out: they, and those that need one of them."""
    gone, found = set(names), find_capabilities().capabilities
    while more := {each.name for each in found if not gone.isdisjoint(each.needs)} - gone:
        gone |= more
    return sorted(gone)


def copy_without(gone: Sequence[str], target: Path) -> None:
    """Copy the tree without capabilities and their tests."""
    folders = [f"src/cavvy/capabilities/{name}/" for name in gone]
    left_out = (*folders, *(f"tests/{name}/" for name in gone))
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for file in filter(None, listed.stdout.split("\0")):
        source = ROOT / file
        if file.startswith(left_out) or not source.is_file():
            continue
        path = target / file
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, path, follow_symlinks=False)


def run(gone: Sequence[str], chosen: Sequence[str]) -> Run:
    """Run tests in a copy without capabilities."""
    with tempfile.TemporaryDirectory(prefix="wo-") as folder:
        target = Path(folder, "tree")
        copy_without(gone, target)
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "--tb=short"]
        command += ["--continue-on-collection-errors", f"--junitxml={report}"]
        command += ["-o", "junit_family=xunit1", "--basetemp", str(Path(folder, "t"))]
        command += [f"--deselect={path}" for path in _OF_PAGES]
        paths = os.pathsep.join((str(target / "src"), str(target)))
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        status = subprocess.run(
            [*command, *chosen],
            cwd=target,
            env={**os.environ, "PYTHONPATH": paths},
            preexec_fn=lambda: os.nice(_NICE),
            check=False,
        ).returncode
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        results = list(_read(report)) if report.exists() else []
    failed = {name: why for name, what, why in results if what == "failed"}
    counts = [sum(what == kind for _, what, _ in results) for kind in ("passed", "skipped")]
    return Run(gone, counts[0], counts[1], failed, cpu_s, status)


def _read(report: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each test, how it ended, and the first line of its error."""
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "")
        if file := case.get("file"):
            module = file.removesuffix(".py").replace("/", ".")
            inner = case.get("classname", "").removeprefix(module).strip(".").split(".")
            name = "::".join(filter(None, (file, *inner, name)))
        else:  # a file that cannot be read
            name = name.replace(".", "/") + ".py"
        kinds = {child.tag: child for child in case}
        wrong = next((kinds[tag] for tag in ("failure", "error") if tag in kinds), None)
        if wrong is not None:
            lines = (wrong.text or "").splitlines()
            told = [line[1:].strip() for line in lines if line.startswith("E ")]
            yield name, "failed", (told or [wrong.get("message", "")])[0][:200]
        else:
            yield name, "skipped" if "skipped" in kinds else "passed", ""


def main() -> None:
    own = sorted(path.parent.name for path in CAPABILITIES.glob("*/capability.py"))
    words = list(takewhile(lambda word: {*word.split("+")} <= {"each", *own}, sys.argv[1:]))
    chosen = sys.argv[1 + len(words) :] or _USUAL
    if not words:
        sys.exit(f"{__doc__}\nThe capabilities are {', '.join(own)}.")
    sets = [names for word in words for names in (own if word == "each" else [word])]
    runs = [run(list_gone(names.split("+")), chosen) for names in sets]
    failed = sorted({name.split("::")[0] for each in runs for name in each.failed})
    options = [word for word in chosen if not (ROOT / word.split("::")[0]).exists()]
    known = run([], [*options, *failed]).failed if failed else {}
    print("\nWithout", "what ran", sep="\t")
    for each in runs:
        print(" + ".join(each.gone), each.describe(), sep="\t")
        for name, why in each.failed.items():
            also = " (fails in the whole tree, too)" if name in known else ""
            print(f"\t{name}{also}: {why}")
    faults = sum(name not in known for each in runs for name in each.failed)
    odd = [each for each in runs if each.status not in (0, 1)]
    print(f"{faults} tests fail without a capability, and pass in the whole tree")
    sys.exit(bool(faults or odd))


if __name__ == "__main__":
    main()
