"""Finds mistakes that need more than the task file to detect: missing folders, unknown names, and
requests that no offer meets. `cavvy validate` and `run` use these checks.
"""

import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from cavvy.cli.reach.providers import load_settings
from cavvy.client.state import default_home
from cavvy.domain.tasks import Task, VolumeKind
from cavvy.importers import Dialect, Translation, find_local
from cavvy.spec import SpecError
from cavvy.spec.problems import SpecProblem
from cavvy.spec.workdir import FreezeError, check_folder, list_folder

MIB = 1 << 20


def check_task(file: str, source: Translation, folder: Path, *, whole: bool = False) -> None:
    """Check that the task's files exist, and that its providers, regions and instance types are in
    the catalog or at a configured provider. With `whole`, also check the sizes of its files, and
    that an offer meets its resources and limits. `folder` is the task file's folder. The
    configured providers are asked only about what the catalog lacks. Raises SpecError with all
    problems, and CommandFailure.
    """
    texts = _explain_size(file)
    for task in source.tasks:
        try:
            parts = find_parts(task, source, folder)
            if whole and parts:
                check_files(task, _list_sizes(parts))
        except FreezeError as error:
            texts.append(str(error))
        unknown = _list_unknown(task)
        impossible = _explain_impossible(task, folder) if whole and not unknown else ""
        texts += unknown + [impossible] * bool(impossible)
    if texts:
        found = [
            SpecProblem(file=file, line=0, column=0, message=each) for each in dict.fromkeys(texts)
        ]
        raise SpecError(found)


def check_files(task: Task, sizes: Mapping[str, int]) -> None:
    """Check the files that are submitted with the task, given their sizes in bytes by path. Raises
    FreezeError if the server would refuse them, or if the task uses a part that does not exist.
    """
    folders = {str(parent) for path in sizes for parent in PurePosixPath(path).parents}
    for volume in task.volumes:
        if volume.kind is VolumeKind.FOLDER and volume.source not in {*sizes, *folders, "."}:
            raise FreezeError(
                f"there is no {volume.source} in the working folder, but the volume at "
                f"{volume.path} needs it",
                "it does not exist, or an ignore file excludes it",
            )
    limit = load_settings().whole("server.blob_mib")
    path, size = max(sizes.items(), key=lambda item: item[1], default=("", 0))
    if size > limit * MIB:
        raise FreezeError(
            f"{path} has {size / MIB:,.1f} MiB; the server takes files of at most {limit:,} MiB",
            "use `inputs` for data, or raise the setting server.blob_mib",
        )


def split_parts(parts: Mapping[str, Path]) -> Iterator[tuple[str, Path, str | None]]:
    """For each part that `find_parts` returns: its path in the submitted folder, the folder that
    has it, and its name if it is a single file.
    """
    for inside, path in parts.items():
        single = inside != "" and path.is_file()
        path = path.resolve() if inside else path
        yield inside, path.parent if single else path, path.name if single else None


def _list_sizes(parts: Mapping[str, Path]) -> dict[str, int]:
    sizes = {}
    for inside, folder, only in split_parts(parts):
        found, _ = list_folder(folder, state=Path(default_home()), only=only)
        for entry, _ in found:
            path = f"{inside}/{entry.path}" if inside else entry.path
            sizes[inside if only else path] = entry.size
    return sizes


def _explain_size(file: str) -> list[str]:
    """Why the server would refuse the request with the file's text; [] if it would not."""
    limit = load_settings().whole("server.request_mib")
    size = os.path.getsize(file) if os.path.isfile(file) else 0
    if 2 * size <= limit * MIB:
        return []
    return [
        f"the file has {size / MIB:.1f} MiB; a request contains it twice, and the server takes "
        f"requests of at most {limit} MiB: raise the setting server.request_mib"
    ]


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


def _explain_impossible(task: Task, folder: Path) -> str:
    """Why no offer of the catalog or of a configured provider meets the task's resources and
    limits; "" if one does, or if a provider that could did not answer or is not configured. Raises
    CommandFailure.
    """
    from cavvy.cli.task.available import match_configured
    from cavvy.cli.task.profiles import with_rates
    from cavvy.planner.candidates import join_reasons, tasks_of
    from cavvy.planner.explain import explain, say_no_offer
    from cavvy.planner.rank import plan
    from cavvy.store.snapshot import CatalogSnapshot
    from cavvy.store.snapshot.layout import SnapshotError

    reasons: list[str] = []
    now = datetime.now(UTC)
    enough = None if _is_limited(task) else 1  # without limits, any offer that matches will do
    try:
        with CatalogSnapshot.open() as snapshot:
            listed = {provider for provider, _, _ in snapshot.regions()}
            for each in tasks_of(with_rates(task, folder)):
                need = each.resources
                found = snapshot.match(need, limit=enough)
                if plan(each, found.offers, now=now).placements:
                    return ""
                live = match_configured(need, None)
                matches = [*live.matches.values(), found]
                made = plan(each, [offer for m in matches for offer in m.offers], now=now)
                unknown = set(need.providers) - listed - set(live.matches)
                if live.problems or made.placements or unknown:
                    return ""
                reasons.append(say_no_offer(each, explain(matches, made)))
    except SnapshotError:
        return ""
    return join_reasons(reasons)


def _is_limited(task: Task) -> bool:
    limits = task.limits
    stated = (limits.budget, limits.duration, limits.deadline, limits.deadline_after)
    return any(limit is not None for limit in stated)
