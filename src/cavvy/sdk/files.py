"""Finds and checks the local files that are submitted with a task, and takes a snapshot of them."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

from cavvy.client.errors import SourceChanged
from cavvy.domain.tasks import TaskSpec, VolumeKind
from cavvy.spec.batch_section import PROGRAM, find_rows
from cavvy.spec.ignore import list_files
from cavvy.spec.problems import shown
from cavvy.spec.uses import explain_unused
from cavvy.spec.workdir import FolderSnapshot, FreezeError, check_folder, combine, freeze
from cavvy.task_files import CAVVY, Translation, find_local

MIB = 1 << 20
_SNAPSHOTS = 3  # maximum number of snapshots of files that change before they are uploaded


def find_parts(task: TaskSpec, source: Translation, folder: Path) -> dict[str, Path]:
    """Find the local files to submit with the task. The result maps "" to the local path of the
    working folder. The result also maps the submitted path of each file outside the working folder
    to the file's local path. `folder` is the folder of the task file. Raises FreezeError if one of
    the files does not exist.
    """
    try:
        return _find_parts(task, source, folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: no such user, for `~user`
        named = getattr(error, "filename", None)
        where = f"{shown(str(named))}: " if named else ""
        raise FreezeError(
            f"a local file of the task cannot be read: {where}"
            f"{getattr(error, 'strerror', None) or 'a path names an unknown user after ~'}",
            "check `workdir` and the other paths of the task file",
        ) from error


def _find_parts(task: TaskSpec, source: Translation, folder: Path) -> dict[str, Path]:
    parts = {}
    if task.workdir is not None and task.workdir.path is not None:
        own = source.kind == CAVVY
        path = task.workdir.path
        parts[""] = folder / path if own else find_local(path, folder)
        check_folder(parts[""])
    for each in source.local:
        parts[each.inside] = find_local(each.source, folder)
        if not parts[each.inside].exists():
            hint = f"relative paths are searched for in {folder} and in the current folder"
            missing = f"the task's file or folder {parts[each.inside]} does not exist"
            raise FreezeError(missing, hint)
    if source.kind != CAVVY and "" in parts:
        parts |= _find_ignored(task, parts[""])
    return parts | find_wheel(task, parts.get(""))


def find_wheel(task: TaskSpec, workdir: Path | None) -> dict[str, Path]:
    """Find the wheel of Cavvy that the setup uses, unless the working folder has the wheel."""
    if not task.setup_uses or workdir is None:
        return {}
    from cavvy.client.state import default_home
    from cavvy.spec import uses

    if not uses.is_added(task.setup_uses, workdir):
        return {}
    return {uses.NAME: uses.write_wheel(Path(default_home()) / "cache" / "wheels")}


def _find_ignored(task: TaskSpec, folder: Path) -> dict[str, Path]:
    """Find the files and folders in the working folder that its ignore files leave out, although a
    volume needs them. SkyPilot and dstack upload mounted files separately, so ignore files of the
    working folder do not apply to them.
    """
    sources = {each.source for each in task.volumes if each.kind is VolumeKind.FOLDER} - {"."}
    if not sources:
        return {}
    listed = list_files(folder)
    known = {*listed, *(str(parent) for path in listed for parent in PurePosixPath(path).parents)}
    return {each: folder / each for each in sorted(sources - known) if (folder / each).exists()}


def split_parts(parts: Mapping[str, Path]) -> Iterator[tuple[str, Path, str | None]]:
    """For each part that `find_parts` returns, yield three values: the submitted path, the local
    folder that contains the part, and the name of the file if the part is a single file.
    """
    for inside, path in parts.items():
        single = inside != "" and path.is_file()
        path = path.resolve() if inside else path
        yield inside, path.parent if single else path, path.name if single else None


def check_files(
    task: TaskSpec, parts: Mapping[str, Path], sizes: Mapping[str, int], limit_mib: int
) -> None:
    """Check the files to submit with the task. `parts` is the result of `find_parts`. `sizes` maps
    the path of each file to its size in bytes. `limit_mib` is the server's limit for one file (the
    setting `server.blob_mib`). Raises FreezeError if the server would refuse a file, or if a file
    that the task uses is missing.
    """
    folders = {str(parent) for path in sizes for parent in PurePosixPath(path).parents}
    for inside, path in parts.items():
        if inside and inside not in {*sizes, *folders}:
            raise FreezeError(
                f"the folder {path} has no files to submit",
                "put a file such as .keep into the folder, or create the folder in the commands",
            )
    for volume in task.volumes:
        if volume.kind is VolumeKind.FOLDER and volume.source not in {*sizes, *folders, "."}:
            raise FreezeError(
                f"there is no {volume.source} in the working folder, but the volume at "
                f"{volume.path} needs it",
                "the file does not exist, the folder is empty, or an ignore file excludes it",
            )
    if "" in parts and PROGRAM in parts and (rows := find_rows(task)):
        _check_rows(rows, sizes)
    for message, hint in explain_unused(sizes, task.setup_uses or ()) if "" in parts else ():
        raise FreezeError(message, hint)
    largest, size = max(sizes.items(), key=lambda item: item[1], default=("", 0))
    if size > limit_mib * MIB:
        raise FreezeError(
            f"{largest} has {size / MIB:,.1f} MiB; the server accepts files of at most "
            f"{limit_mib:,} MiB",
            "use `inputs` for data, or raise the setting server.blob_mib",
        )


def _check_rows(rows: str, sizes: Mapping[str, int]) -> None:
    """Raise FreezeError if the rows of a batch are not submitted, or have no content."""
    inside = "" if rows == "." else f"{rows}/"
    found = [
        size
        for path, size in sizes.items()
        if path == rows or (path.startswith(inside) and "/." not in f"/{path[len(inside) :]}")
    ]
    if not found:
        raise FreezeError(
            f"there is no {rows} in the working folder, but the batch reads its rows from it",
            "the file does not exist, the folder is empty, or an ignore file excludes it; change "
            "`batch.input`",
        )
    if not any(found):
        raise FreezeError(f"{rows} is empty, so the batch has no rows", "change `batch.input`")


def freeze_parts(
    task: TaskSpec, parts: Mapping[str, Path], home: Path, limit_mib: int
) -> FolderSnapshot:
    """Check the parts that `find_parts` returns, and take a snapshot of them. `home` is Cavvy's
    state folder, in which the hashes of unchanged files are stored. Raises FreezeError.
    """
    frozen = {
        inside: freeze(folder, cache=home / "cache" / "frozen", state=home, only=only)
        for inside, folder, only in split_parts(parts)
    }
    snapshot = frozen[""] if list(frozen) == [""] else combine(frozen)
    check_files(task, parts, {entry.path: entry.size for entry in snapshot.entries}, limit_mib)
    return snapshot


def send_frozen(
    freeze: Callable[[], FolderSnapshot], send: Callable[[FolderSnapshot], int]
) -> tuple[FolderSnapshot, int]:
    """Take a snapshot with `freeze` and upload it with `send`. If a file changes in between, take a
    new snapshot, up to three in total. Returns the uploaded snapshot and the number of bytes that
    were sent last. Raises FreezeError, ApiError.
    """
    for _ in range(_SNAPSHOTS - 1):
        snapshot = freeze()
        with suppress(SourceChanged):
            return snapshot, send(snapshot)
    snapshot = freeze()
    return snapshot, send(snapshot)
