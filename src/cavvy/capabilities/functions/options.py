"""The options of functions and classes, and how they become keys of a task.

This file also runs on nodes, so it imports only the standard library and files that do.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from typing import Any

from cavvy.capabilities.functions.image import FunctionImage
from cavvy.capabilities.functions.storage import FunctionVolume, list_secrets, list_volumes
from cavvy.sdk.errors import InvalidArgument

Length = str | int | float | timedelta
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


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
    `cavvy.method`), `priority`, and `once` (calls of a deployed app with the same arguments are one
    call, with one result: see `Function.once`).
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

    def to_head(self) -> dict[str, Any]:
        """Return what the broker of the calls must know."""
        return {
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


def read_length(value: Length, what: str) -> float:
    """Return a length of time in seconds: a number, a timedelta, or a string such as "1h30m".
    Raises InvalidArgument.
    """
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return float(value)
    if isinstance(value, str):
        text = value.replace(" ", "")
        parts = _PART.findall(text)
        if parts and "".join(number + unit for number, unit in parts) == text:
            return float(sum(float(number) * _UNITS[unit] for number, unit in parts))
    raise InvalidArgument(
        f"{what}={value!r} is no length of time", 'write it as 90, "90s" or "10m"'
    )


def _count_gpus(gpu: str | Sequence[str] | None) -> int:
    first = gpu if isinstance(gpu, str) or gpu is None else next(iter(gpu), None)
    if not first:
        return 0
    count = first.rpartition(":")[2]
    return int(count) if ":" in first and count.isdigit() else 1
