"""Finds mistakes that a task file alone does not show: missing folders, unknown names, and requests
that no offer meets. `cavvy validate` and `run` use these checks.
"""

from pathlib import Path

from cavvy.domain.tasks import Task
from cavvy.importers import Dialect, Translation, find_local
from cavvy.spec import SpecError
from cavvy.spec.problems import SpecProblem
from cavvy.spec.workdir import FreezeError, check_folder


def check_task(file: str, source: Translation, folder: Path, *, offers: bool = False) -> None:
    """Check that the task's files exist, and that its providers, regions and instance types are in
    the catalog or at a configured provider. With `offers`, also check that an offer meets its
    resources. `folder` is the task file's folder. The configured providers are asked only about
    what the catalog lacks. Raises SpecError with all problems, and CommandFailure.
    """
    texts: list[str] = []
    for task in source.tasks:
        try:
            find_parts(task, source, folder)
        except FreezeError as error:
            texts.append(str(error))
        unknown = _list_unknown(task)
        impossible = _explain_impossible(task) if offers and not unknown else ""
        texts += unknown + [impossible] * bool(impossible)
    if texts:
        found = [
            SpecProblem(file=file, line=0, column=0, message=each) for each in dict.fromkeys(texts)
        ]
        raise SpecError(found)


def find_parts(task: "Task", source: "Translation", folder: Path) -> dict[str, Path]:
    """The local paths of the working folder (under the key "") and of the files outside it that are
    submitted with the task (by their path in the submitted folder). `folder` is the task file's
    folder. Raises FreezeError if one of the files does not exist.
    """
    parts = {}
    if task.workdir is not None and task.workdir.path is not None:
        own = source.kind == Dialect.CAVVY
        path = task.workdir.path
        parts[""] = folder / path if own else find_local(path, folder)
        check_folder(parts[""])
    for each in source.local:
        parts[each.inside] = find_local(each.source, folder)
        if not parts[each.inside].exists():
            hint = f"it was searched for in {folder} and in the current folder"
            missing = f"the task's file or folder {parts[each.inside]} does not exist"
            raise FreezeError(missing, hint)
    return parts


def _list_unknown(task: Task) -> list[str]:
    needs = [
        need
        for need in task.resources.choices
        if need.providers or need.regions or need.instance is not None
    ]
    if not needs:
        return []
    from cavvy.cli.task.available import match_configured
    from cavvy.cli.task.unknown import unknown_names
    from cavvy.providers import registry
    from cavvy.store.snapshot import CatalogSnapshot
    from cavvy.store.snapshot.layout import SnapshotError

    installed = registry.list_known()
    try:
        with CatalogSnapshot.open() as snapshot:
            needs = [need for need in needs if unknown_names(snapshot, need, installed)]
            live = match_configured(needs[0], None) if needs else None
            if live is None or live.problems:
                return []  # a provider that does not answer may know the names
            texts = [unknown_names(snapshot, need, installed, live.offers) for need in needs]
    except SnapshotError:
        return []
    return [line for text in dict.fromkeys(texts) for line in text.splitlines()]


def _explain_impossible(task: Task) -> str:
    """Why no offer of the catalog or of a configured provider meets the task's resources; "" if one
    does, or if a provider that could did not answer or is not configured. Raises CommandFailure.
    """
    from cavvy.cli.task.available import match_configured
    from cavvy.planner.candidates import join_reasons, tasks_of
    from cavvy.planner.explain import explain, say_no_offer
    from cavvy.planner.placements import PlacementPlan
    from cavvy.store.snapshot import CatalogSnapshot
    from cavvy.store.snapshot.layout import SnapshotError

    reasons: list[str] = []
    nothing = PlacementPlan(placements=(), considered=0, kept=0)
    try:
        with CatalogSnapshot.open() as snapshot:
            listed = {provider for provider, _, _ in snapshot.regions()}
            for each in tasks_of(task):
                need = each.resources
                found = snapshot.match(need, limit=1)
                live = None if found.matched else match_configured(need, None)
                if live is None or live.problems or any(m.matched for m in live.matches.values()):
                    return ""
                if set(need.providers) - listed - set(live.matches):
                    return ""
                matches = [*live.matches.values(), found]
                reasons.append(say_no_offer(each, explain(matches, nothing)))
    except SnapshotError:
        return ""
    return join_reasons(reasons)
