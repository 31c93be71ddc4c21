"""The pod fields in a task or in the settings: merges them into a pod, by the rules of a Kubernetes
strategic merge patch, and checks them with dry runs, which create nothing and show the fields that
the API server refuses.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cavvy.providers.base import Refused
from cavvy.providers.kubernetes.api import ApiServerRefused, KubernetesApi

Object = dict[str, Any]
Path = tuple[str | int, ...]

# The fields that identify a list item, in order of preference. List items without any of these
# fields are appended.
_KEYS = ("mountPath", "devicePath", "containerPort", "name", "key", "ip", "topologyKey")
# The fields that Cavvy sets itself, to find its pods and to run its agent in them.
_OWN = (
    ("apiVersion",),
    ("kind",),
    ("metadata", "name"),
    ("metadata", "namespace"),
    ("metadata", "ownerReferences"),
    ("spec", "restartPolicy"),
)
_OWN_IN_CONTAINER = ("name", "command", "args")


async def find_refused(
    api: KubernetesApi, path: str, plain: Object, fields: Mapping[str, Any]
) -> Sequence[str]:
    """Add `fields` to the pod `plain`, and ask the API server whether it accepts this pod. Return
    the fields that the server refuses, each with its reason. `path` is the API path of the
    namespace's pods. Raises TryAgain.
    """
    leaves = list(_list_leaves(fields))
    whole = await _try(api, path, plain, fields, leaves)
    if not whole or await _try(
        api, path, plain, {}, ()
    ):  # the API server refuses the pod even without the fields, so the fields are not the cause
        return whole
    alone = await asyncio.gather(*(_try(api, path, plain, _nest(*leaf), [leaf]) for leaf in leaves))
    return [each for problems in alone for each in problems] or whole


async def _try(
    api: KubernetesApi,
    path: str,
    plain: Object,
    fields: Mapping[str, Any],
    leaves: Sequence[tuple[Path, Any]],
) -> Sequence[str]:
    """Return the problems of a pod that contains these fields, or () if the API server accepts the
    pod or cannot check the pod.
    """
    names = ", ".join(_write(leaf) for leaf, _ in leaves)
    try:
        pod = await api.make(path, overlay_pod(plain, fields), dry_run=True)
    except ApiServerRefused as error:
        # A used-up quota is reported by the launch itself, and some webhooks do not support dry
        # runs.
        if not isinstance(error.provider_error, Refused) or "dry run" in str(error):
            return ()
        return [f"{names}: {error}"]
    if pod is None or "spec" not in pod:  # the name is taken: the pod exists already
        return ()
    return [
        f"{_write(leaf)}: the API server does not know this field"
        for leaf, value in leaves
        if value and not _has(pod, leaf)  # API servers omit fields that are null, false or empty
    ]


def _list_leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the paths and values of the fields. Each list counts as one field, except the list of
    containers: the fields of the first container are listed one by one.
    """
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _list_leaves(each, (*path, key))
    elif path == ("spec", "containers") and isinstance(value, list):
        for at, each in enumerate(value):
            yield from _list_leaves(each, (*path, at)) if at == 0 else [((*path, at), each)]
    else:
        yield path, value


def _nest(path: Path, value: Any) -> Object:
    """Return a pod that contains only the field at `path`."""
    for part in reversed(path):
        value = {part: value} if isinstance(part, str) else [*[{}] * min(part, 1), value]
    found: Object = value
    return found


def _has(pod: Any, path: Path) -> bool:
    """Return whether the pod has a field at this path. The contents of lists are not compared."""
    for part in path:
        if isinstance(part, int):
            return part > 0 or _has(pod[0], path[path.index(part) + 1 :])
        if not isinstance(pod, Mapping) or part not in pod:
            return False
        pod = pod[part]
    return True


def _write(path: Path) -> str:
    words = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return words.removeprefix(".")


def overlay_pod(pod: Object, fields: Mapping[str, Any]) -> Object:
    """Return the pod, merged with `fields`. The first container in `fields` is merged with the
    container that runs the work. Fields that Cavvy sets itself are not changed.
    """
    labels = dict(pod["metadata"]["labels"])
    first, *others = pod["spec"]["containers"]
    wanted = list((fields.get("spec") or {}).get("containers") or ())
    found: Object = _merge(pod, fields)
    for path in _OWN:
        _restore(found, pod, path)
    own = {key: first[key] for key in _OWN_IN_CONTAINER if key in first}
    container = {**_merge(first, wanted[0] if wanted else {}), **own}
    if "args" not in first:
        container.pop("args", None)
    found["spec"]["containers"] = [container, *others, *wanted[1:]]
    found["metadata"]["labels"] |= labels
    return found


def _restore(found: Object, pod: Object, path: Sequence[str]) -> None:
    *parents, last = path
    for name in parents:
        found, pod = found[name], pod[name]
    if last in pod:
        found[last] = pod[last]
    else:
        found.pop(last, None)


def _merge(base: Any, over: Any) -> Any:
    if isinstance(base, Mapping) and isinstance(over, Mapping):
        return {**base, **{key: _merge(base.get(key), value) for key, value in over.items()}}
    if isinstance(base, list) and isinstance(over, list):
        return _merge_lists(base, over)
    return over


def _merge_lists(base: list[Any], over: list[Any]) -> list[Any]:
    found = list(base)
    for each in over:
        key = next((key for key in _KEYS if isinstance(each, Mapping) and key in each), None)
        at = next(
            (
                at
                for at, old in enumerate(found)
                if key is not None and isinstance(old, Mapping) and old.get(key) == each[key]
            ),
            None,
        )
        if at is None:
            found.append(each)
        else:
            found[at] = _merge(found[at], each)
    return found
