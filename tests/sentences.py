"""`pytest -p tests.sentences`: every sentence that is made for people is replaced by `x`, to prove
that no program reads one.

The rows, decisions, orders and errors of providers that carry a sentence get `x` when they are
made, in the tests' process and, by `tests/blanked/sitecustomize.py`, in the servers and agents that
tests start. Tests that assert wording are left out by name: `tests/wording.txt`.
"""

import os
from pathlib import Path
from typing import Any

from tests.blanked.blank import blank_all

_HERE = Path(__file__).resolve().parent


def pytest_configure(config: Any) -> None:
    blank_all()
    path = [str(_HERE / "blanked"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    wording = set((_HERE / "wording.txt").read_text().split("\n"))
    left_out = [each for each in items if each.nodeid.partition("[")[0] in wording]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [each for each in items if each.nodeid.partition("[")[0] not in wording]
