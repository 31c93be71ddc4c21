"""Finds mistakes that the task file alone does not show: missing folders, unknown names, and
requests that no offer meets. `cavvy validate` and `run` use these checks.

Also asks the server whether it would accept a task, without a submission. `cavvy run --dry-run`,
`plan` and `validate` do so, to refuse what `cavvy run` refuses.
"""

import getpass
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from cavvy.cli.reach.providers import load_settings
from cavvy.cli.reach.session import make_failure, make_patience, task_project
from cavvy.cli.task.checkpoint_notes import list_checkpoint_notes, object_to_checkpoint
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.client import ApiError
from cavvy.client.state import default_home
from cavvy.domain.offers import list_sellers
from cavvy.domain.tasks import ResourceSpec, SpotPolicy, TaskSpec
from cavvy.domain.values import Struct, replace
from cavvy.sdk.files import MIB, check_files, find_parts, split_parts
from cavvy.spec import SpecError
from cavvy.spec.problems import SpecProblem
from cavvy.spec.support import object_to_service
from cavvy.spec.workdir import FreezeError, list_folder
from cavvy.task_files import CAVVY, Translation

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.wire import SubmissionCheck
    from cavvy.planner.explain import Explanation
    from cavvy.store.snapshot import CatalogSnapshot
    from cavvy.task_files import LoadedTask, ReadOptions

# whole GPUs that are shown if no provider has a MIG instance, and offers that are read for them
_WHOLES, _WHOLES_READ = 3, 50


def check_task(
    file: str, source: Translation, folder: Path, *, whole: bool = False, text: str | None = None
) -> Sequence[str]:
    """Check that the task's files exist and that no option is misspelt. The task's providers,
    regions and instance types must be in the catalog or at a configured provider. If `whole` is
    true, the sizes of the task's files must be permitted, too, and at least one offer must meet the
    task's resources and limits, or a note says that none does, if the file is of another tool.
    `folder` is the folder of the task file, and `text` what is submitted instead of its own text.
    Configured providers are
    queried only about names that the catalog lacks. Returns notes about what only a provider that
    is not configured can tell, and about checkpoints. Raises SpecError with all problems, or
    CommandFailure.
    """
    texts, notes = _explain_size(file, text), list[str]()
    for task in source.tasks:
        if missing := object_to_files(task, source, folder, sizes=whole):
            texts.append(missing)
        notes += list_checkpoint_notes(task)
        if task.service is not None and (objection := object_to_service(task)):
            texts.append(f"{objection}; delete the key or change its value")
        unknown = [*_list_misspelt(task), *_list_unknown(task)]
        texts += unknown
        if whole and not unknown and (impossible := _explain_impossible(task, folder)):
            # the file of another tool was written for its cluster, which may have what no list has
            is_gap = impossible.is_gap or source.kind != CAVVY
            (notes if is_gap else texts).append(impossible.text)
    if texts:
        found = [
            SpecProblem(file=file, line=0, column=0, message=each) for each in dict.fromkeys(texts)
        ]
        raise SpecError(found, source.guess)
    return list(dict.fromkeys(notes))


def object_to_files(task: TaskSpec, source: Translation, folder: Path, *, sizes: bool) -> str:
    """Return why the task's local files cannot be submitted, or "". The sizes of the files are
    checked only if `sizes` is set.
    """
    try:
        parts = find_parts(task, source, folder)
        if objection := object_to_checkpoint(task, parts):
            return objection
        if sizes and parts:
            limit_mib = load_settings().whole("server.blob_mib")
            check_files(task, parts, _list_sizes(parts), limit_mib)
    except FreezeError as error:
        return str(error)
    return ""


def _list_sizes(parts: Mapping[str, Path]) -> dict[str, int]:
    sizes = {}
    for inside, folder, only in split_parts(parts):
        found, _ = list_folder(folder, state=Path(default_home()), only=only)
        for entry, _ in found:
            path = f"{inside}/{entry.path}" if inside else entry.path
            sizes[inside if only else path] = entry.size
    return sizes


def _explain_size(file: str, text: str | None) -> list[str]:
    """Return why the server would refuse a request that contains the text of the file, or an empty
    list if the server would accept the request.
    """
    limit = load_settings().whole("server.request_mib")
    size = os.path.getsize(file) if os.path.isfile(file) else 0
    if text is not None:
        size = len(text.encode(errors="replace"))
    if 2 * size <= limit * MIB:
        return []
    return [
        f"the file is too large: a request contains its {size / MIB:.1f} MiB twice, and the server "
        f"refuses requests of more than {limit} MiB; raise the setting server.request_mib"
    ]


def _list_misspelt(task: TaskSpec) -> list[str]:
    options = [each for need in task.resources.choices for each in need.options]
    if not options:
        return []
    from cavvy.cli.task.unknown import misspelt_options

    return list(dict.fromkeys(misspelt_options(options)))


def _list_unknown(task: TaskSpec) -> list[str]:
    needs = [
        need
        for need in task.resources.choices
        if need.providers or need.regions or need.instance is not None
    ]
    if not needs:
        return []
    from cavvy.cli.task.market import ask_market
    from cavvy.cli.task.unknown import list_silent, list_unlisted, unknown_names
    from cavvy.providers import registry
    from cavvy.store.snapshot import CatalogSnapshot
    from cavvy.store.snapshot.layout import SnapshotError

    installed = registry.list_known()
    try:
        with CatalogSnapshot.open() as snapshot:
            needs = [need for need in needs if unknown_names(snapshot, need, installed)]
            market = ask_market() if needs else None
            if market is None or market.list_problems(needs[0]):
                return []  # A provider that does not answer may have these names.
            if market is not None:
                needs = [
                    need for need in needs if not list_unlisted(snapshot, need, market.answers)
                ]
            choices = task.resources.choices
            heard = [each for each in choices if not list_silent(snapshot, each, market.offers)]
            if heard:  # the alternatives of silent providers are not needed
                needs = [need for need in needs if need in heard]
            texts = [unknown_names(snapshot, need, installed, market.offers) for need in needs]
    except SnapshotError:
        return []
    return [line for text in dict.fromkeys(texts) for line in text.splitlines()]


class _Impossible(Struct, frozen=True):
    """Why no offer meets a task. `is_gap` is true if only the price list of a provider that is not
    configured lacks one: it may sell what the task needs."""

    text: str
    is_gap: bool = False


def _explain_impossible(task: TaskSpec, folder: Path) -> _Impossible | None:
    """Return why no offer of the catalog or of a configured provider meets the task's resources and
    limits. Returns None if an offer meets the resources and limits, or if a provider that might
    have such an offer is not configured or did not answer. Raises CommandFailure.
    """
    from cavvy.cli.task.market import ask_market
    from cavvy.cli.task.profiles import with_rates
    from cavvy.planner.candidates import join_reasons, tasks_of
    from cavvy.planner.explain import explain, say_no_offer
    from cavvy.planner.rank import plan
    from cavvy.store.snapshot import CatalogSnapshot
    from cavvy.store.snapshot.layout import SnapshotError

    reasons, gaps = list[str](), list[str]()
    now = datetime.now(UTC)
    # If the task has no limits, any matching offer is enough.
    enough = None if _is_limited(task) else 1
    try:
        with CatalogSnapshot.open() as snapshot:
            listed = {provider for provider, _, _ in snapshot.regions()}
            for each in tasks_of(with_rates(task, folder)):
                need = each.resources
                if enough is None and fits_one(snapshot, each, now):
                    return None
                found = snapshot.match(need, limit=enough)
                if plan(each, found.offers, now=now).placements:
                    return None
                market = ask_market()
                matches = [*market.match(need).values(), market.complete(found)]
                made = plan(each, [offer for m in matches for offer in m.offers], now=now)
                known = {*listed, *market.answers}
                unknown = [each for each in need.providers if not list_sellers((each,)) & known]
                if market.list_problems(need) or made.placements or unknown:
                    return None
                if gap := _explain_gap(snapshot, need, market.answers):
                    gaps.append(gap)
                    continue
                reasons.append(
                    _explain_instance(snapshot, need) or say_no_offer(each, explain(matches, made))
                )
    except SnapshotError:
        return None
    return _Impossible(gaps[0], is_gap=True) if gaps else _Impossible(join_reasons(reasons))


def fits_one(snapshot: "CatalogSnapshot", task: TaskSpec, now: datetime) -> bool:
    """Return whether an offer of the catalog is within the task's limits, without reading all."""
    from cavvy.planner.placements import Objective, PlanningContext, RankingView
    from cavvy.planner.rank import plan
    from cavvy.planner.shortlist import shorten
    from cavvy.planner.transfers import group_places

    found = snapshot.match_lots(task.resources, misses=0, group=group_places(task, {}, sends=False))
    lots, _ = shorten(
        task,
        found.lots,
        now=now,
        by=Objective.COST,
        situation=PlanningContext(),
        view=RankingView(limit=1),
    )
    return bool(plan(task, snapshot.read_lots(found, lots), now=now).placements)


def _explain_instance(snapshot: "CatalogSnapshot", need: ResourceSpec) -> str:
    """Return who has MIG instances, and what a whole GPU costs, if the need is for instances only.
    Otherwise, return ""."""
    from cavvy.planner.explain import ask_for_wholes, say_no_instance

    wholes = ask_for_wholes(need)
    if wholes is None:
        return ""
    return say_no_instance(need, snapshot.match(wholes, limit=1, misses=0).offers)


def lead_to_wholes(task: "TaskSpec", found: "Explanation") -> tuple["Explanation", str]:
    """Return the explanation with whole GPUs as nearest misses, and who has instances, if the task
    needs MIG instances."""
    from cavvy.planner.explain import (
        ask_for_wholes,
        misses_instance,
        replace_misses,
        say_no_instance,
    )
    from cavvy.store.snapshot import CatalogSnapshot
    from cavvy.store.snapshot.layout import SnapshotError

    need, wholes = task.resources, ask_for_wholes(task.resources)
    if wholes is None or not misses_instance(need, found):
        return found, ""
    try:
        with CatalogSnapshot.open() as snapshot:
            offers = snapshot.match(wholes, limit=_WHOLES_READ, misses=0).offers
    except SnapshotError:
        offers = ()
    best = list({each.provider: each for each in reversed(offers)}.values())[::-1][:_WHOLES]
    return replace_misses(found, need, best), say_no_instance(need, best)


def _explain_gap(
    snapshot: "CatalogSnapshot", need: ResourceSpec, configured: Container[str]
) -> str:
    """Return a note if the price list lacks the accelerators only at providers that the task names
    and that are not configured, while others sell machines with them, or only their spot prices, or
    if it lacks a region or an instance type of these providers. Otherwise, return ""."""
    from cavvy.cli.task.unknown import list_unlisted
    from cavvy.planner.explain import wish

    silent = [each for each in list_sellers(need.providers) if each not in configured]
    if unlisted := list_unlisted(snapshot, need, configured):
        return _say_gap(" and no ".join(unlisted), silent)
    if not silent or not need.accelerators:
        return ""
    anywhere = ResourceSpec(accelerators=need.accelerators, spot=SpotPolicy.AUTO)
    there = replace(anywhere, providers=need.providers)
    if snapshot.match(there, limit=1).offers:
        # spot prices change by the hour, and the list has those of some types only
        spot = replace(there, spot=SpotPolicy.ONLY)
        if need.spot is not SpotPolicy.ONLY or snapshot.match(spot, limit=1).offers:
            return ""
        return _say_gap(f"{wish(anywhere)} on spot capacity", silent)
    if not snapshot.match(anywhere, limit=1).offers:
        return ""
    return _say_gap(wish(anywhere), silent)


def _say_gap(what: str, silent: Sequence[str]) -> str:
    whom = " and ".join(silent)
    return (
        f"the price list has no {what} at {whom}, but it is a part of what is sold there; once "
        f"{whom} is configured, its own answer counts (`cavvy check {silent[0]}` says what is "
        "missing)"
    )


def _is_limited(task: TaskSpec) -> bool:
    limits = task.limits
    stated = (limits.budget, limits.duration, limits.deadline, limits.deadline_after)
    return any(limit is not None for limit in stated)


_PATIENCE_S = 5.0  # how long `plan` and `validate` repeat a request that no server answers


def ask_server(
    client: "ApiClient",
    loaded: "LoadedTask",
    file: str,
    params: Mapping[str, str],
    project: str | None,
    name: str | None = None,
    *,
    own_consent: bool = False,
) -> "SubmissionCheck":
    """Let the server apply the checks of a submission. With `own_consent`, the price is also stated
    if the user has agreed to it before, for a machine or a pool. Raises ApiError, CommandFailure.
    """
    from cavvy.cli.task.profiles import text_with_rates
    from cavvy.domain.jobs import RunOrigin

    return client.check_submission(
        text_with_rates(loaded.text, loaded.task, loaded.folder),
        project=task_project(project, loaded.task),
        path=file,
        params=params,
        origin=RunOrigin(
            task_text=loaded.text, dialect=loaded.source.kind, overrides=loaded.overrides
        ),
        name=name,
        user=getpass.getuser(),
        own_consent=own_consent,
    )


def find_refusal(
    file: str,
    params: Mapping[str, str],
    options: "ReadOptions",
    project: str | None,
    *,
    files: bool,
) -> CommandFailure | None:
    """Return why `cavvy run` would refuse the task although its file is valid. The server is asked
    if it is running. The local files are checked if `files` is set.

    Returns None if `cavvy run` would accept the task, and for files that the caller explains: files
    of services, and files with keys that `cavvy run` refuses. Prints a note if the server was not
    asked about something that only the server knows.
    """
    from cavvy.spec import SpecError
    from cavvy.task_files import load_tasks

    try:
        tasks = load_tasks(file, params, now=datetime.now(UTC), options=options)
    except SpecError:
        return None
    loaded = tasks[0]
    if files:
        for each in tasks:
            if why := object_to_files(each.task, each.source, each.folder, sizes=True):
                return CommandFailure(why, exit_code=2)
    try:
        with _running_server() as client:
            if client is None:
                if refusal := _find_missing_optuna(tasks):
                    return refusal
                _note_unknown(loaded, "no server is running")
                return None
            price = _find_price(client, tasks, file, params, project)
    except ApiError as error:
        if error.code == "no-offer":  # a matter of the configured providers, not of the task
            note_out(f"`cavvy run` would refuse this task now: {error.message}")
            return None
        if error.passing or error.code == "not-found":  # a server of an older version
            _note_unknown(loaded, error.message)
            return None
        return make_failure(error)
    if price:
        note_out(f"`cavvy run` asks for your consent first: {price}")
    return None


def _find_price(
    client: "ApiClient",
    tasks: "Sequence[LoadedTask]",
    file: str,
    params: Mapping[str, str],
    project: str | None,
) -> str:
    """Let the server check the tasks. Return the price to which the user must first agree."""
    if len(tasks) == 1:
        return ask_server(client, tasks[0], file, params, project).consent_needed
    from cavvy.cli.task.submission import GraphFile, check_graph

    project = task_project(project, tasks[0].task)
    return check_graph(client, GraphFile(tasks=tasks, file=file, params=params, project=project))


@contextmanager
def _running_server() -> Iterator["ApiClient | None"]:
    """Yield a client of the server, or None if no server is running on this machine."""
    from cavvy.client.contexts import may_have_server
    from cavvy.client.state import default_home

    if not may_have_server(default_home()):  # the client need not be imported
        yield None
        return
    from cavvy.client import Unreachable, connect

    try:
        client = connect(start=False, patience=make_patience(_PATIENCE_S))
    except Unreachable:
        yield None
        return
    with client:
        yield client


def _find_missing_optuna(tasks: "Sequence[LoadedTask]") -> CommandFailure | None:
    """Return why the server that `cavvy run` would start with this Python would refuse a search."""
    from importlib.util import find_spec

    if find_spec("optuna") is not None or all(each.task.search is None for each in tasks):
        return None
    from cavvy.packages import extra_command

    return CommandFailure(
        "search: Optuna, which decides which values jobs get, is not installed",
        f"install it: {extra_command('tuning')}",
    )


def _note_unknown(loaded: "LoadedTask", why: str) -> None:
    from cavvy.domain.tasks import list_secrets

    task = loaded.task
    asked = ["secrets"] * bool(list_secrets(task)) + ["machine"] * (task.machine is not None)
    asked += ["pool"] * (task.pool is not None)
    if asked:
        what = " and its ".join(asked)
        note_out(
            f"whether the task's {what} exist was not checked: {why}; "
            "`cavvy run --dry-run` starts the server and checks this"
        )
