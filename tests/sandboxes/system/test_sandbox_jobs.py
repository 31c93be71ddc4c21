"""Sandboxes in jobs of a real embedded server, on this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.pages import ROOT, read_blocks
from tests.system.server_state import home_with_jobs

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with home_with_jobs(tmp_path_factory.mktemp("sandboxes") / "home") as made:
        yield made


def run_program(tmp_path: Path, text: str) -> list[str]:
    """Run a program that uses sandboxes, and return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env=dict(os.environ),
    )
    if "IsolationMissing" in done.stderr:
        pytest.skip(f"jobs of this machine cannot isolate sandboxes: {done.stderr[-500:]}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_sandboxes_of_one_project_share_a_job_and_outlive_their_program(
    home: Path, tmp_path: Path
) -> None:
    first = """
import cavvy
kept = cavvy.Sandbox.create(title="kept", timeout="2m", isolation="best")
kept.write_file("note", "from the first")
with cavvy.Sandbox.create() as other:
    print(other.exec("cat", "/home/sandbox/note").wait())
print(kept.id)
"""
    code, name = run_program(tmp_path, first)
    assert code == "1"  # it sees no file of the other sandbox
    second = f"""
import cavvy
print([each.title for each in cavvy.Sandbox.list()])
found = cavvy.Sandbox.from_id({name!r})
print(found.read_file("note").decode())
print(found.exec("sh", "-c", "ls {home} /etc/shadow /proc/2").stdout.read())
print(found._place.meet)
found.terminate()
print(cavvy.Sandbox.list(), [each.why for each in cavvy.Sandbox.list(ended=True)])
print(len(list(cavvy.Client().jobs())))
"""
    lines = run_program(tmp_path, second)
    meet = lines.pop(3)
    key = Path(f"{meet}.key")
    assert key.stat().st_mode & 0o77 == 0
    shown = [meet.encode(), *(_read(each) for each in Path("/proc").glob("[0-9]*/cmdline"))]
    assert not any(key.read_bytes() in each for each in shown)
    assert lines[:3] == ["['kept']", "from the first", ""]
    assert lines[3] == "[] ['terminated', 'terminated']"
    assert lines[4] == "1"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has just ended
        return b""


def test_the_tutorial(home: Path, tmp_path: Path) -> None:
    """Each program prints what the page shows below it, and the commands work."""
    blocks = read_blocks(ROOT / "docs" / "tutorials" / "sandboxes.md")
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language == "python":
            (tmp_path / block.text.split()[1]).write_text(block.text)
            lines = run_program(tmp_path, block.text)
            assert after is not None
            assert lines == after.text.splitlines(), block.name
    (commands,) = (each.text for each in blocks if each.language == "sh")
    python = Path(sys.executable).parent
    done = subprocess.run(
        ["sh", "-ec", commands],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PATH": f"{python}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
    assert done.stdout.splitlines()[0] == "1"
    assert done.stdout.splitlines()[-1].endswith(" has ended")
