"""The processes of a run share out the files whose asserts pytest rewrites."""

import os
import subprocess
import sys
from pathlib import Path

from tests.rewriting import list_share

ROOT = Path(__file__).resolve().parents[2]


def test_each_file_is_in_one_share(tmp_path: Path) -> None:
    for name in ("a/test_1.py", "a/b/test_2.py", "c/test_3.py", "c/cases.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    shares = [list_share([tmp_path / "a", tmp_path / "c"], process, 2) for process in range(2)]
    found = [file.name for share in shares for file in share]
    assert sorted(found) == ["test_1.py", "test_2.py", "test_3.py"]


def test_a_process_caches_the_files_of_its_share(tmp_path: Path) -> None:
    """One process of two that select no test: it has cached its file before it collects any."""
    for number in (1, 2):
        (tmp_path / f"test_{number}.py").write_text("def test_it():\n    assert 1 + 1 == 2\n")
    (tmp_path / "conftest.py").write_text(
        "import sys\nimport pytest\nfrom tests.rewriting import rewrite_share\n"
        "sys.dont_write_bytecode = False\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection(session):\n"
        "    rewrite_share(session.config, 1, 2)\n"
        "    pytest.exit('shared out', 0)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    cached = [file.name.split(".")[0] for file in (tmp_path / "__pycache__").glob("test_*.pyc")]
    assert cached == ["test_2"]
