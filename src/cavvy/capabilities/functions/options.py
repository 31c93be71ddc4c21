"""The options of functions and classes, and how they become keys of a task.

This file also runs on nodes, so it imports only the standard library and files that do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any

from cavvy.capabilities.functions.image import FunctionImage
from cavvy.capabilities.functions.lengths import read_length
from cavvy.capabilities.functions.limits import CallLimit, read_limits
from cavvy.capabilities.functions.storage import FunctionVolume, list_secrets, list_volumes
from cavvy.sdk.errors import InvalidArgument

MOST_PRIORITY = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionOptions:
    """The options of a function.

    What each process needs: `image`, `cpu`, `memory` (such as "16GB"), `gpu` (such as "A100:2"),
    `spot`, `secrets` (names, or `cavvy.Secret`), `volumes` (a path on the node, with a
    `cavvy.Volume` or a source of the task file), `env`, and `resources` with any other key of a
    task's resources.

    How calls run: `timeout` of a call, `retries` after an exception, `concurrency` (calls of one
    process at the same time), `max_replicas` (processes; by default as many as the node's CPUs or
    GPUs allow), `min_replicas` (those that start with the job, and are kept
    while a deployed app is not called), `idle` (after which a deployed app without `min_replicas`
    gives its node back), `schedule` (a cron line, for deployed apps), `batch` and `wait` (see
    `cavvy.method`), `priority` (from -100 to 100: calls of a higher one are first), `limit` (how
    many calls run at a time or start in a time: see `cavvy.Limit`), and `once` (calls of a deployed
    app with the same arguments are one call, with one result: see `Function.once`).
    """

    image: FunctionImage | None = None
    cpu: float | None = None
    memory: str | int | None = None
    gpu: str | Sequence[str] | None = None
    spot: str | bool | None = None
    resources: Mapping[str, Any] = field(default_factory=dict)
    secrets: Sequence[str] = ()
    volumes: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    timeout: float | None = None
    retries: int = 0
    concurrency: int = 1
    max_replicas: int | None = None
    min_replicas: int = 0
    idle: float = 300.0
    schedule: str | None = None
    batch: int | None = None
    wait: float = 0.01
    priority: int = 0
    limit: Sequence[CallLimit] = ()
    once: bool = False

    def choose_image(self, image: FunctionImage | None) -> FunctionImage:
        """Return the image of the function, or else that of the app. An image without a container
        is an empty table, which is an image nevertheless."""
        own = image if self.image is None else self.image
        return FunctionImage() if own is None else own

    def to_keys(self, image: FunctionImage | None) -> dict[str, Any]:
        """Return the keys of the task whose processes run the function."""
        keys = self.choose_image(image).to_keys()
        needs: dict[str, Any] = dict(self.resources)
        for name in ("cpu", "memory", "gpu"):
            if (value := getattr(self, name)) is not None:
                needs[name] = value
        if self.spot is not None:
            named = {True: "only", False: "never"}
            needs["spot"] = self.spot if isinstance(self.spot, str) else named[self.spot]
        if needs:
            keys["resources"] = needs
        if self.secrets:
            keys["secrets"] = list(self.secrets)
        keys |= list_volumes(self.volumes)
        if self.env:
            keys["env"] = {**keys.get("env", {}), **self.env}
        return keys

    def to_head(self, function: str = "") -> dict[str, Any]:
        """Return what the broker of the calls must know."""
        limits = [each.to_head(function, number) for number, each in enumerate(self.limit)]
        return {
            **({"limits": limits} if limits else {}),
            "timeout_s": self.timeout,
            "retries": self.retries,
            "concurrency": self.concurrency,
            "max_replicas": self.max_replicas,
            "min_replicas": self.min_replicas,
            "cpu": self.cpu,
            "gpus": _count_gpus(self.gpu),
            "batch": self.batch,
            "wait_s": self.wait,
            "priority": self.priority,
        }


def read_options(
    name: str, keys: Mapping[str, Any], base: FunctionOptions | None
) -> FunctionOptions:
    """Return the options of a function, checked. Those of a method are added to `base`, of its
    class. Raises InvalidArgument.
    """
    known = [each.name for each in fields(FunctionOptions)]
    for key in keys:
        if key not in known:
            near = get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise InvalidArgument(f"{name}: {key} is no option of a function", hint)
    made = dict(keys)
    for key in ("timeout", "idle", "wait"):
        if made.get(key) is not None:
            made[key] = read_length(made[key], f"{name}: {key}")
    _check_numbers(name, made)
    if "limit" in made:
        given = made["limit"]
        made["limit"] = () if given is None else read_limits(name, given)
    image = made.get("image")
    if image is not None and not isinstance(image, FunctionImage):
        hint = "use an image such as cavvy.Image.python().pip_install('numpy')"
        raise InvalidArgument(f"{name}: image={image!r} is no image", hint)
    if "secrets" in made:
        made["secrets"] = list_secrets(made["secrets"])
    for path, source in (made.get("volumes") or {}).items():
        if not isinstance(path, str) or not isinstance(source, str | FunctionVolume):
            raise InvalidArgument(
                f"{name}: volumes={{{path!r}: {source!r}}}",
                'use {"/cache": cavvy.Volume("models")}: a path, and a volume or its source',
            )
    return FunctionOptions(**made) if base is None else replace(base, **made)


def _check_numbers(name: str, made: Mapping[str, Any]) -> None:
    """Raise InvalidArgument if an option that is a number is another one than it may be."""
    for key, least in (
        ("retries", 0),
        ("concurrency", 1),
        ("max_replicas", 1),
        ("min_replicas", 0),
        ("batch", 1),
    ):
        value = made.get(key)
        if value is not None and (
            not isinstance(value, int) or isinstance(value, bool) or value < least
        ):
            raise InvalidArgument(f"{name}: {key}={value!r}", f"use a whole number from {least} up")
    check_priority(name, made.get("priority", 0))


def check_priority(name: str, value: object) -> None:
    """Raise InvalidArgument if this is no priority of a call."""
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or not -MOST_PRIORITY <= value <= MOST_PRIORITY
    ):
        hint = f"use a whole number from -{MOST_PRIORITY} to {MOST_PRIORITY}"
        raise InvalidArgument(f"{name}: priority={value!r}", hint)


def _count_gpus(gpu: str | Sequence[str] | None) -> int:
    first = gpu if isinstance(gpu, str) or gpu is None else next(iter(gpu), None)
    if not first:
        return 0
    count = first.rpartition(":")[2]
    return int(count) if ":" in first and count.isdigit() else 1
