"""Merges a task's pod fields into a pod, by the rules of a Kubernetes strategic merge patch."""

from collections.abc import Mapping, Sequence
from typing import Any

Object = dict[str, Any]

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
