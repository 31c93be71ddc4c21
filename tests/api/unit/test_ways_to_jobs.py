"""Every way to a new job passes the door at which the limits of waiting jobs are checked."""

import ast
from collections.abc import Iterator
from pathlib import Path

import cavvy

_SOURCE = Path(cavvy.__file__).parent
_ROOMS = ("api", "control", "server", "capabilities")
# what makes jobs wait, of the service for jobs
_MAKERS = {"submit", "enqueue", "submit_all", "retry", "retry_array"}
_DOOR = "count_new"
# What users ask for. Each counts its jobs at the door.
_ASKED = {
    "api/routes/arrays.py:retry",
    "api/routes/bulk_submission.py:_store",
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
    "capabilities/serving/control/reconciler.py:_submit",
}

# Where consent to pay comes from. What passes it on from its caller is not listed. A coding agent
# (`cavvy mcp`) has only what its user has agreed to for one task: `own_consent` leaves out the
# stored consents at admission, and `is_free_only` leaves them out while the job waits.
_CONSENTS = {
    # of this request
    "api/routes/bulk_submission.py:_check_all": {"ask.consent"},
    "api/routes/bulk_submission.py:_find_shape": {"ask.consent"},
    "api/routes/pools.py:apply": {"ask.consent"},
    "capabilities/serving/routes/services.py:_start": {"ask.consent"},
    "capabilities/serving/routes/services.py:admit": {"ask.consent"},
    "capabilities/serving/stored_services.py:serving": {"self.consented"},
    "api/routes/submission.py:_admit": {"ask.consent"},
    "api/routes/submission.py:_try_admit": {"ask.consent"},
    "api/routes/submission.py:start_machine": {"ask.consent"},
    "api/routes/submission.py:move_job": {"ask.consent"},
    # a command of people, whom it has asked
    "capabilities/choose/compare.py:_run_places": {"yes"},
    "capabilities/dev/command.py:_resume_session": {"consent"},
    "capabilities/dev/command.py:retry": {"consent"},
    "capabilities/estimates/bench.py:_measure": {"yes"},
    "capabilities/estimates/kernel_bench.py:measure_job": {"consent"},
    "capabilities/functions/deployed.py:_make_part": {"consent"},
    "capabilities/functions/deployed.py:_submit": {"consent"},
    "capabilities/functions/deployed.py:deploy_app": {"consent"},
    "capabilities/functions/dev.py:_serve_web": {"self._consent"},
    "capabilities/functions/jobs.py:find": {"self._app.consent"},
    "capabilities/functions/program.py:deploy_program": {"consent"},
    "capabilities/functions/program.py:dev_program": {"consent"},
    "capabilities/functions/program.py:run_program": {"consent"},
    "capabilities/functions/web_deploy.py:deploy_web": {"consent"},
    "capabilities/sandboxes/hosts.py:_submit": {
        "needs.consent",
        "needs.consent or (sent.budget and (not needs.free))",
    },
    "capabilities/serving/deploy_command.py:_start": {"consent"},
    "capabilities/serving/serve_command.py:ask_server": {"consent"},
    "capabilities/serving/serve_command.py:serve_file": {"consent"},
    # a coding agent's: the user has answered a question, and a budget limits what it starts
    "capabilities/mcp/spending.py:submit": {"agreed"},
    "capabilities/mcp/spending.py:serve": {"True"},
    # to look at prices; nothing is stored
    "api/routes/submission.py:_rank": {"True"},
    "api/routes/submission.py:check_pool": {"True"},
    "api/routes/submission.py:_look_in_pool": {"True"},
    "api/routes/submission.py:check_offers": {"True"},
    # stored earlier, for a machine or a pool: not for jobs of coding agents
    "api/routes/submission.py:admit_task": {"found.machine.consented"},
    "api/routes/submission.py:_admit_to_pool": {"pool.consented and (not own)"},
    "control/decide/node_pools.py:follow_pool": {
        "job.consented or (pool.consented and (not is_free_only(job)))"
    },
    "control/decide/warm_pool.py:record_holder": {
        "row.consented or (job.consented and job.user == user)"
    },
    "control/machine_service.py:record": {"row.consented or (consented and user == row.user)"},
    # of the program that calls deployed functions, or stored earlier by the same account
    "capabilities/functions/app.py:lookup": {"consent"},
    "capabilities/functions/deployed.py:find_function": {"consent"},
    "capabilities/functions/deployed.py:submit_part": {"consent"},
    "capabilities/functions/dispatcher.py:_submit": {
        "caller.consent or (document.consent and part.account is not None and (part.account == (caller.account or '')))"
    },
    "capabilities/functions/routes.py:call_function": {"consent"},
    "capabilities/functions/routes.py:_store": {"int(ask.consent)"},
    "capabilities/functions/routes.py:_view_part": {"ask.consent and account == row.account"},
    "capabilities/functions/stored_calls.py:_send": {"self._consent"},
    "capabilities/functions/deployed.py:_find": {"part.consent or self._consent"},
    # stored earlier, for a script that names sbatch itself, and only without a limit of its costs
    "capabilities/importers/slurm/submission.py:submit": {"job.consented and cap_of(job) is None"},
    # stored earlier, for the same work; a service of a coding agent has its budget
    "control/control_plane.py:_start_run": {"schedule.consented"},
    "control/decide/requests.py:retry_job": {"moved.consented"},
    "control/node_pools.py:_submit": {"pool.consented"},
    "capabilities/serving/control/reconciler.py:_submit": {"service.consented"},
    "capabilities/serving/control/reconciler.py:update": {"service.consented"},
}


def _is_installed(name: str) -> bool:
    """Whether a place is of the core, or of a capability that is there."""
    parts = name.split("/")
    return parts[0] != "capabilities" or (_SOURCE / parts[0] / parts[1]).is_dir()


def test_every_consent_to_pay_is_on_the_list() -> None:
    kept = {name: words for name, words in _CONSENTS.items() if _is_installed(name)}
    assert _list_consents() == kept


def test_every_way_to_a_job_passes_the_door() -> None:
    found = dict(_list_ways())
    assert {name for name in found if name.startswith("api/")} == _ASKED
    assert not [name for name in _ASKED if not found[name]], "limits are not checked there"
    tree = ast.parse((_SOURCE / "capabilities/serving/routes/services.py").read_bytes())
    doors = [each for each in ast.walk(tree) if isinstance(each, ast.AsyncWith) and _is_door(each)]
    assert len(doors) == 1, "the least replicas of a service are counted"
    by_itself = {name for name in _BY_ITSELF if _is_installed(name)}
    assert {name for name in found if not name.startswith("api/")} == by_itself


def _list_consents() -> dict[str, set[str]]:
    """Return what each function takes for consent to pay, if its caller does not say so."""
    found = dict[str, set[str]]()
    for name, tree in _list_trees(b"consent", *_ROOMS):
        for each in ast.walk(tree):
            if not isinstance(each, ast.AsyncFunctionDef | ast.FunctionDef):
                continue
            given = {
                node.targets[0].id: node.value
                for node in ast.walk(each)
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
            }
            for value in _list_values(each):
                if isinstance(value, ast.Name):  # a parameter, or a variable of the function
                    value = given.get(value.id, value)
                text = ast.unparse(value)
                if text != "consented":
                    found.setdefault(f"{name}:{each.name}", set()).add(text)
    return found


def _list_values(function: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            yield from (
                each.value for each in node.keywords if each.arg in ("consented", "consent")
            )
        elif isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "consented":
            yield node.value


def _list_trees(word: bytes, *rooms: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the modules of these rooms in which the word stands; most have nothing to find."""
    for room in rooms:
        for path in sorted((_SOURCE / room).rglob("*.py")):
            if word in (text := path.read_bytes()):
                yield path.relative_to(_SOURCE).as_posix(), ast.parse(text)


def _list_ways() -> Iterator[tuple[str, bool]]:
    """Yield each function that makes jobs, and whether it does so only behind the door."""
    for name, tree in _list_trees(b"jobs", *_ROOMS):
        for each in ast.walk(tree):
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
