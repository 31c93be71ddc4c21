"""The settings that apply to every pod. No I/O."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from cavvy.domain.tasks import Objection, Scalar, TaskSpec
from cavvy.domain.values import Struct
from cavvy.providers.base import Refused

_TOLERATION = re.compile(r"([^=:]+)(?:=([^:]*))?(?::(NoSchedule|NoExecute|PreferNoSchedule))?")


class Toleration(Struct, frozen=True, kw_only=True):
    """A tolerated taint. An empty `effect` matches every effect; a `value` of None matches every
    value.
    """

    key: str
    value: str | None = None
    effect: str = ""

    def bears(self, taint: Mapping[str, Any]) -> bool:
        if taint.get("key") != self.key or self.effect not in ("", taint.get("effect")):
            return False
        return self.value is None or (taint.get("value") or "") == self.value

    @property
    def object(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "key": self.key,
            "operator": "Exists" if self.value is None else "Equal",
        }
        if self.value is not None:
            found["value"] = self.value
        return {**found, "effect": self.effect} if self.effect else found


class PodOptions(Struct, frozen=True, kw_only=True):
    """The provider's settings that affect pods."""

    image: str
    queue: str
    wait: bool
    priority_class: str
    service_account: str
    pull_secrets: tuple[str, ...]
    runtime_class: str
    scheduler: str
    selector: Mapping[str, str]
    tolerations: tuple[Toleration, ...]
    lost_after_s: int
    pools: str
    pod: Mapping[str, Any]  # fields of every pod
    topology: Mapping[str, str]  # labels of nodes, by their names in tasks

    @property
    def waits(self) -> bool:
        """Whether pods may be created before capacity is available for them."""
        return self.wait or bool(self.queue)


def object_to_tunnel(task: TaskSpec, pod: object) -> Objection | None:
    """Return why the task's pods cannot encrypt the traffic between them, or None if encryption may
    be possible. `pod` contains the fields that the task or the settings merge into the pods. If
    `pod` contains fields, the result is None, because the fields may add the required capability
    NET_ADMIN.
    """
    if not task.encrypt or task.nodes == 1 or pod:
        return None
    reason = (
        "pods have no permission to create a WireGuard interface; add the capability NET_ADMIN "
        "with the option or the setting `pod`"
    )
    return Objection("encrypt", reason)


def read_options(settings: Mapping[str, Scalar]) -> PodOptions:
    """Parse the provider's settings. Raises Refused."""

    def text(name: str) -> str:
        return str(settings.get(name, "")).strip()

    return PodOptions(
        image=text("image") or "python:3.12",
        queue=text("queue"),
        wait=bool(settings.get("wait", False)),
        priority_class=text("priority_class"),
        service_account=text("service_account"),
        pull_secrets=tuple(text("pull_secrets").replace(",", " ").split()),
        runtime_class=text("runtime_class"),
        scheduler=text("scheduler"),
        selector=_pairs("node_selector", text("node_selector")),
        tolerations=tuple(
            _toleration(word) for word in text("tolerations").replace(",", " ").split()
        ),
        lost_after_s=int(settings.get("lost_after_s", 60)),
        pools=text("pools"),
        pod=_read_fields(text("pod")),
        topology=_pairs("topology", text("topology")),
    )


def _read_fields(text: str) -> Mapping[str, Any]:
    """Parse pod fields. If the text has no colon, it is the path of a file with the fields."""
    what = "[providers.kubernetes] pod:"
    try:
        found = yaml.safe_load(
            text if ":" in text or not text else Path(text).expanduser().read_text("utf-8")
        )
    except (OSError, yaml.YAMLError) as error:
        raise Refused(f"{what} {error}") from error
    if not isinstance(found or {}, dict):
        raise Refused(f"{what} expected fields such as {{spec: {{hostIPC: true}}}}")
    return found or {}


def _pairs(setting: str, text: str) -> Mapping[str, str]:
    """Parse a setting such as `pool=gpu zone=a`. Raises Refused."""
    words = text.replace(",", " ").split()
    form = "label=value" if setting == "node_selector" else "name=label"
    for word in words:
        if "=" not in word:
            raise Refused(
                f"[providers.kubernetes] {setting}: {word!r} does not have the form {form}"
            )
    return dict(word.partition("=")[::2] for word in words)


def _toleration(word: str) -> Toleration:
    found = _TOLERATION.fullmatch(word)
    if found is None:
        raise Refused(
            f"[providers.kubernetes] tolerations: {word!r} does not have the form key, key:effect "
            "or key=value:effect"
        )
    return Toleration(key=found[1], value=found[2], effect=found[3] or "")
