"""Translates SkyPilot's `file_mounts` and `volumes` into inputs, outputs and volumes."""

import re
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Any

from cavvy.capabilities.importers.common_fields import move_to_secret
from cavvy.capabilities.importers.readers import as_text, child, entries, flag_at, items, text_at
from cavvy.capabilities.importers.skypilot.needs import read_size
from cavvy.domain.tasks import MountMode, Transfer, Volume, VolumeKind, Workdir
from cavvy.domain.values import Struct, replace
from cavvy.spec.fields.kinds import WrongValue
from cavvy.spec.fields.places import check_path, read_place, read_source
from cavvy.spec.kept_keys import TranslationNotes, mark_of
from cavvy.spec.problems import SourceMark, slug
from cavvy.spec.sent_folders import is_credentials
from cavvy.spec.tree import Node, ScalarNode

_URL = re.compile(r"([a-z0-9+.-]+)://", re.IGNORECASE)
_SENT_EVERY = timedelta(seconds=30)
_MOUNTED = (
    "the bucket is mounted, which needs /dev/fuse on the node, and the bucket's keys as secrets of "
    "the project or a role of the node; `mode: copy` needs neither"
)
_UPLOADED = (
    "Cavvy submits the local files with the job and does not read the files in {url}; every 30 s "
    "and when the work ends, Cavvy sends to {url} the files that the work has changed"
)
# Cavvy's URL scheme for buckets, by the name of the store or of the store's cloud
_STORES = {
    **{"s3": "s3", "aws": "s3", "gcs": "gs", "gcp": "gs", "azure": "az"},
    **{"r2": "r2", "nebius": "nebius", "oci": "oci", "ibm": "cos", "coreweave": "cw"},
    "vastdata": "vastdata",
}
# The URL schemes of stores that use S3's protocol. The variable `_ENDPOINT` holds one address,
# which applies to all buckets of a job.
_LIKE_S3 = ("s3", "r2", "nebius", "oci", "cos", "cw", "vastdata")
_ENDPOINT = "AWS_ENDPOINT_URL_S3"
_BLOB = re.compile(r"https://([a-z0-9]+)\.blob\.core\.windows\.net/", re.IGNORECASE)


class _UnsetVariable(WrongValue):
    """Raised if a path or name contains a variable that has no value. The user can set the variable
    on the command line.
    """


class TranslatedMounts(Struct, frozen=True, kw_only=True):
    """The files that a task has in addition to its working folder."""

    inputs: tuple[Transfer, ...] = ()
    outputs: tuple[Transfer, ...] = ()
    volumes: tuple[Volume, ...] = ()
    secrets: tuple[str, ...] = ()


def read_mounts(
    table: Node, workdir: Workdir | None, clouds: Collection[str], kept_keys: TranslationNotes
) -> TranslatedMounts:
    """Translate the supported mounts, and refuse all other mounts. Local files are submitted with
    the working folder. If `clouds` has exactly one cloud, a bucket without a store is assumed to be
    in the store of that cloud, otherwise in S3.
    """
    found = TranslatedMounts()
    stores: set[str] = set()
    usual = _STORES.get(next(iter(clouds)), "s3") if len(clouds) == 1 else "s3"
    for key, value in entries(child(table, "file_mounts")):
        where = f"file_mounts.{key.text}"
        try:
            one = _read_or_move(key, value, workdir, usual, kept_keys)
            one = _use_s3(one, stores)
        except WrongValue as error:
            unset = isinstance(error, _UnsetVariable)
            kept_keys.refuse(key.mark, where, str(error), until_submitted=unset)
            continue
        for note in _list_notes(value, one):
            kept_keys.note(key.mark, where, note)
        found = TranslatedMounts(
            inputs=(*found.inputs, *one.inputs),
            outputs=(*found.outputs, *one.outputs),
            volumes=(*found.volumes, *one.volumes),
            secrets=(*found.secrets, *one.secrets),
        )
    secrets = (_ENDPOINT,) if stores - {"s3"} else ()
    for name in secrets:
        reason = (
            f"the job reads the address of the {min(stores)} store from the secret {name}; set it "
            f"with `cavvy secret set {name}`"
        )
        kept_keys.note_at(table, "file_mounts", reason)
    volumes = (*found.volumes, *_read_volumes(table, kept_keys))
    return replace(found, volumes=volumes, secrets=(*found.secrets, *secrets))


def _read_or_move(
    key: ScalarNode,
    value: Node,
    workdir: Workdir | None,
    usual: str,
    kept_keys: TranslationNotes,
) -> TranslatedMounts:
    """Translate one mount. A local file with credentials becomes a secret. Raises WrongValue."""
    where, target = f"file_mounts.{key.text}", _read_target(key.text)
    local = as_text(value) if isinstance(value, ScalarNode) else ""
    if name := move_to_secret(local, target, where, key.mark, kept_keys):
        return TranslatedMounts(secrets=(name,))
    return _read_mount(value, target, workdir, usual, kept_keys)


def _use_s3(found: TranslatedMounts, stores: set[str]) -> TranslatedMounts:
    """Use S3's URL scheme for the buckets of a mount if their store uses S3's protocol. Adds the
    original schemes to `stores`. Raises WrongValue if the additions would leave more than one
    scheme in `stores`.
    """
    urls = [each.source for each in found.inputs] + [each.target for each in found.outputs]
    schemes = stores | {url.partition(":")[0] for url in urls} & set(_LIKE_S3)
    if len(schemes) > 1:
        names = " and ".join(f"{each}://" for each in sorted(schemes))
        raise WrongValue(
            f"one job cannot use buckets of {names}: {_ENDPOINT} applies to all buckets"
        )
    stores |= schemes
    for each in stores:
        found = replace(
            found,
            inputs=tuple(
                replace(one, source=re.sub(f"^{each}:", "s3:", one.source)) for one in found.inputs
            ),
            outputs=tuple(
                replace(one, target=re.sub(f"^{each}:", "s3:", one.target)) for one in found.outputs
            ),
        )
    return found


def _read_mount(
    value: Node, target: str, workdir: Workdir | None, usual: str, kept_keys: TranslationNotes
) -> TranslatedMounts:
    """Translate one mount. Raises WrongValue if the mount is not supported."""
    node = value if isinstance(value, ScalarNode) else child(value, "source")
    paths = [as_text(each) for each in (node, *items(node)) if isinstance(each, ScalarNode)]
    urls = [path for path in paths if _URL.match(path)]
    name = text_at(value, "name")
    if urls and len(paths) > 1:
        raise WrongValue("several sources cannot share a target; give each source its own target")
    if urls and name:
        raise WrongValue(
            f"Cavvy does not copy {urls[0]} to a bucket {name}; copy it yourself, and use the "
            "bucket as the source"
        )
    if urls:
        whole = urls[0] if isinstance(value, ScalarNode) else urls[0].rstrip("/") + "/"
        bucket = _read_url(whole)
    else:
        bucket = _read_bucket(value, name, usual)
    if paths and not urls:
        sent = Transfer(source=target, target=bucket, every=_SENT_EVERY)
        outputs = (sent,) if bucket and _is_written(value) else ()
        volumes = _read_local(paths, target, workdir, kept_keys)
        return TranslatedMounts(volumes=volumes, outputs=outputs)
    if not bucket:
        raise _UnsetVariable(
            "the name of the bucket or source is empty; set the variable in the name with --env"
        )
    mount = _find_mount(value, bucket)
    brought = Transfer(
        source=bucket,
        target=target,
        mount=mount,
        writable=mount is not None and _is_written(value),
    )
    return TranslatedMounts(inputs=(brought,))


def _read_local(
    paths: list[str], target: str, workdir: Workdir | None, kept_keys: TranslationNotes
) -> tuple[Volume, ...]:
    """Return the volumes that mount local paths: a single path at `target`, several paths each at
    `target/NAME`. Raises WrongValue.
    """
    found: list[Volume] = []
    for path in paths:
        _check_local(path, workdir)
        if is_credentials(path):
            raise WrongValue(f"{path} contains credentials, which are not uploaded; use `secrets`")
        name = path.rstrip("/").rpartition("/")[2]
        end = target if len(paths) == 1 else f"{target}/{name}"
        shown = kept_keys.submit_local(path, workdir, end)
        found += [shown] if shown else []
    return tuple(found)


def _list_notes(value: Node, found: TranslatedMounts) -> Iterator[str]:
    """Yield a sentence for each difference between the translation and a SkyPilot mount."""
    if isinstance(value, ScalarNode):
        return
    if not found.inputs:
        if found.outputs:
            yield _UPLOADED.format(url=found.outputs[0].target)
        return
    if not text_at(value, "source"):
        yield f"the bucket {found.inputs[0].source} must exist; Cavvy does not create it"
    if found.inputs[0].mount is not None:
        yield _MOUNTED
    elif _mode(value) != "COPY":
        yield "the source is not mounted; its files are copied to the node before the work starts"


def _check_local(path: str, workdir: Workdir | None) -> None:
    """Raise WrongValue if a local path cannot be submitted."""
    if "$" in path:
        raise _UnsetVariable(
            f"{path} contains a variable without a value; set the variable with --env"
        )
    if workdir is not None and workdir.path is None:
        raise WrongValue(
            f"a local path ({path}) cannot be added to a git repository; clone the repository in "
            "`setup`, and delete `workdir`"
        )


def _read_target(text: str) -> str:
    """Return the path of a mount on the node: an absolute path, or a path within the home folder or
    the working folder. Raises WrongValue.
    """
    if text.rstrip("/") == "~/sky_workdir":
        raise WrongValue("this is the working folder; write its source as `workdir`")
    if text.startswith("~/sky_workdir/"):
        text = text.removeprefix("~/sky_workdir/")
    try:
        return read_place(text)
    except WrongValue as error:
        raise WrongValue(f"{text} cannot be a target: {error}") from error


def _read_bucket(table: Node, name: str | None, usual: str) -> str:
    """Return the URL of the bucket with this name, or "" if there is no name. Raises WrongValue."""
    if isinstance(table, ScalarNode) or not name:
        return ""
    if "$" in name:
        raise _UnsetVariable(
            f"the bucket name {name} contains a variable without a value; set the variable with "
            "--env"
        )
    store = (text_at(table, "store") or usual).lower()
    store = _STORES.get(store, store)
    if store not in _STORES.values():
        raise WrongValue(f"Cavvy cannot reach buckets of the store {store}")
    path = text_at(table, "_bucket_sub_path") or ""
    return f"{store}://{name}/" + (f"{path.strip('/')}/" if path else "")


def _read_url(text: str) -> str:
    if "$" in text:
        raise _UnsetVariable(
            f"{text} contains a variable without a value; set the variable with --env"
        )
    scheme, _, rest = text.partition("://")
    if scheme == "cos":  # cos://REGION/BUCKET/KEY
        rest = rest.partition("/")[2]
    try:
        if scheme in _LIKE_S3:
            return scheme + read_source(f"s3://{rest}").removeprefix("s3")
        return read_source(_BLOB.sub("az://", text))
    except WrongValue as error:
        raise WrongValue(f"the source cannot be fetched: {error}") from error


def _mode(value: Node) -> str:
    return (text_at(value, "mode") or "MOUNT").upper()


def _find_mount(value: Node, url: str) -> MountMode | None:
    """Return how the bucket at the URL is mounted; None copies its files."""
    if isinstance(value, ScalarNode) or url.partition(":")[0] not in (*_LIKE_S3, "gs", "az"):
        return None
    modes = {"MOUNT": MountMode.MOUNT, "MOUNT_CACHED": MountMode.CACHED}
    return modes.get(_mode(value))


def _is_written(value: Node) -> bool:
    """Return whether files that the work writes into the mount must reach the bucket."""
    if isinstance(value, ScalarNode):
        return False
    config = child(value, "config")
    read_only = any(flag_at(child(config, each), "read_only") for each in ("mount", "mount_cached"))
    return (
        _mode(value) != "COPY"
        and not read_only
        and not (text_at(value, "type") or "").upper().endswith("_RO")
    )


def _read_volumes(table: Node, kept_keys: TranslationNotes) -> tuple[Volume, ...]:
    found: list[Volume] = []
    for key, value in entries(child(table, "volumes")):
        name = as_text(value) if isinstance(value, ScalarNode) else text_at(value, "name")
        size = None if name else read_size(text_at(value, "size") or "")
        new: dict[str, Any] = {}
        if size is not None:  # a new volume that exists only for this job
            kind = text_at(child(value, "config"), "storage_class_name") or ""
            name, new = slug(key.text), {"size_gib": size, "type": kind, "keep": False}
        _add_volume(found, name, key.text, f"volumes.{key.text}", key.mark, kept_keys, **new)
    for each in items(child(table, "volume_mounts")):
        mark = mark_of(each, "path")
        _add_volume(
            found,
            text_at(each, "volume_name"),
            text_at(each, "path") or "",
            "volume_mounts",
            mark,
            kept_keys,
        )
    return tuple(found)


def _add_volume(
    found: list[Volume],
    name: str | None,
    path: str,
    where: str,
    mark: SourceMark,
    kept_keys: TranslationNotes,
    **new: Any,
) -> None:
    """Add a volume to `found`. `new` has the attributes of a volume to create. Without `new`, the
    volume must already exist at the provider.
    """
    try:
        if not name:
            raise WrongValue("the volume has no name, and Cavvy creates no volume for a single job")
        if not path.startswith("/"):
            raise WrongValue(f"{path} is not an absolute path")
        found.append(Volume(kind=VolumeKind.NAMED, source=name, path=check_path(path), **new))
    except WrongValue as error:
        kept_keys.refuse(mark, where, f"the volume cannot be attached: {error}")
