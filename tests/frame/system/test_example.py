"""The example's own test, with the example installed: a real server and the real command."""

import os
import subprocess
import sys
from pathlib import Path

from tests.frame.unit.test_discover import EXAMPLE, install_example


def test_the_example_adds_a_table_a_route_a_command_and_a_reconciler(tmp_path: Path) -> None:
    install_example(tmp_path)
    lines = [
        line
        for path in EXAMPLE.rglob("*")
        if path.suffix in (".py", ".toml", ".html", ".sql")
        for line in path.read_text().splitlines()
    ]
    assert len(lines) <= 150
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_reminders.py"]
    (tmp_path / "test_reminders.py").write_text((EXAMPLE / "test_reminders.py").read_text())
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path)}
    for name in ("CAVVY_CONFIG", "CAVVY_CONTEXT", "CAVVY_PROJECT"):
        environment.pop(name, None)
    done = subprocess.run(
        run, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
