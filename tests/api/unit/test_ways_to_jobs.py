"""Every way to a new job passes the door at which the limits of waiting jobs are checked."""

import ast
from collections.abc import Iterator
from pathlib import Path

import cavvy

_SOURCE = Path(cavvy.__file__).parent
# what makes jobs wait, of the service for jobs
_MAKERS = {"submit", "enqueue", "submit_all", "retry", "retry_array"}
_DOOR = "count_new"
# What users ask for. Each counts its jobs at the door.
_ASKED = {
    "api/routes/arrays.py:retry",
    "api/routes/jobs.py:retry",
    "api/routes/submission.py:start_machine",
    "api/routes/submission.py:submit_graph",
    "api/routes/submission.py:submit_task",
}
# What the server does by itself for something that passed a door of its own: a schedule, which
# counts as a job and has one run at a time, a pool of an operator, and a service, whose least
# replicas were counted.
_BY_ITSELF = {
    "control/control_plane.py:_start_run",
    "control/node_pools.py:_submit",
    "control/serving/reconciler.py:_submit",
}


def test_every_way_to_a_job_passes_the_door() -> None:
    found = dict(_list_ways())
    assert {name for name in found if name.startswith("api/")} == _ASKED
    assert not [name for name in _ASKED if not found[name]], "limits are not checked there"
    tree = ast.parse((_SOURCE / "api/routes/services.py").read_bytes())
    doors = [each for each in ast.walk(tree) if isinstance(each, ast.AsyncWith) and _is_door(each)]
    assert len(doors) == 1, "the least replicas of a service are counted"
    assert {name for name in found if not name.startswith("api/")} == _BY_ITSELF


def _list_ways() -> Iterator[tuple[str, bool]]:
    """Yield each function that makes jobs, and whether it does so only behind the door."""
    for path in sorted(_SOURCE.rglob("*.py")):
        name = path.relative_to(_SOURCE).as_posix()
        if name.partition("/")[0] not in ("api", "control", "server"):
            continue
        for each in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(each, ast.AsyncFunctionDef | ast.FunctionDef):
                all_calls = sum(_is_maker(node) for node in ast.walk(each))
                behind = sum(
                    _is_maker(node)
                    for door in ast.walk(each)
                    if isinstance(door, ast.AsyncWith) and _is_door(door)
                    for node in ast.walk(door)
                )
                if all_calls:
                    yield f"{name}:{each.name}", behind == all_calls


def _is_maker(node: ast.AST) -> bool:
    """Return whether the node calls the service for jobs: `jobs.X`, or `_jobs.X` of an object."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    owner = node.func.value
    called = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
    return node.func.attr in _MAKERS and called in ("jobs", "_jobs")


def _is_door(node: ast.AsyncWith) -> bool:
    calls = [each.context_expr for each in node.items if isinstance(each.context_expr, ast.Call)]
    return any(ast.unparse(each.func).rpartition(".")[2] == _DOOR for each in calls)
