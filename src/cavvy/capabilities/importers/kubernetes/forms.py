"""Checks the forms of values in an object of Kubernetes, each at its own line: whole numbers,
quantities, lists, and words of which Kubernetes knows only a few.

Only keys that the readers read are checked; `kubectl apply --dry-run=server` knows all.
"""

import re
from collections.abc import Callable, Sequence

from cavvy.capabilities.importers.kubernetes.objects import (
    JOB_KINDS,
    SERVICE_KINDS,
    list_objects,
)
from cavvy.capabilities.importers.readers import child, entries, items, text_at
from cavvy.spec.problems import ProblemNotes, listed, shown
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_COUNTS = _words(
    "backoffLimit completions parallelism activeDeadlineSeconds ttlSecondsAfterFinished replicas "
    "terminationGracePeriodSeconds minReplicas maxReplicas slotsPerWorker"
)
_POSITIVE = _words("size containerPort")
_LISTS = _words(
    "containers initContainers volumes volumeMounts env envFrom command args ports "
    "workerGroupSpecs replicatedJobs"
)
_WORDS = {
    "concurrencyPolicy": ("Allow", "Forbid", "Replace"),
    "completionMode": ("NonIndexed", "Indexed"),
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
}
# how the `apiVersion` of a kind begins
_GROUPS = {
    **dict.fromkeys(("Job", "CronJob"), ("batch/v",)),
    **dict.fromkeys(("Deployment", "StatefulSet"), ("apps/v", "extensions/v")),
    "Pod": ("v1",),
}
_RESTARTS = ("Always", "OnFailure", "Never")
_OF_OPERATORS = (*_RESTARTS, "ExitCode")  # Kubeflow's, beside the template of its pods
_OF_JOBS = ("OnFailure", "Never")
# tables whose keys are the author's own, or are of another schema
_OWN = _words(
    "annotations labels matchLabels nodeSelector data rayStartParams metadata affinity "
    "tolerations securityContext fsdp_config runtimeRef"
)
_QUANTITY = re.compile(r"[+]?(?:\d+\.?\d*|\.\d+)(?:m|[kMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?")
_DEVICES = re.compile(r"(?:nvidia|amd|intel)\.com/")
_MOST_DEEP = 64


def check_forms(documents: Sequence[Node], notes: ProblemNotes) -> None:
    """Add what is wrong in the objects that describe work to `notes`."""
    for document in documents:
        for each in list_objects(document):
            kind = text_at(each, "kind") or ""
            if kind in (*SERVICE_KINDS, *JOB_KINDS) and isinstance(each, MapNode):
                _check_head(kind, each, notes)
                spec = child(each, "spec")
                if spec is not None and not isinstance(spec, MapNode):
                    notes.add(spec.mark, "`spec` is no table", expected="keys and values")
                _Forms(kind, notes).check(spec, _MOST_DEEP)


def _check_head(kind: str, table: MapNode, notes: ProblemNotes) -> None:
    version = child(table, "apiVersion")
    begins = _GROUPS.get(kind, ("",))
    if isinstance(version, ScalarNode) and not version.text.startswith(begins):
        expected = "v1" if kind == "Pod" else f"{begins[0]}1"
        group = version.text.partition("/")[0]
        if "." in group:  # of an operator, such as batch.volcano.sh
            message = f"Cavvy does not read a {kind} of {shown(group)}, which its operator runs"
            hint = "write a PyTorchJob or a JobSet for pods that work together, or a Cavvy file"
            notes.add(version.mark, message, expected=expected, suggestion=hint)
        else:
            message = f"{shown(version.text)} has no kind {kind}"
            notes.add(version.mark, message, expected=expected)
    name = child(child(table, "metadata"), "name")
    if name is not None and not isinstance(name, ScalarNode):
        notes.add(name.mark, "`name` is no name", expected="one word, such as train")


class _Forms:
    """Checks the tables of one object."""

    def __init__(self, kind: str, notes: ProblemNotes) -> None:
        self._kind, self._notes = kind, notes

    def check(self, node: Node | None, deep: int) -> None:
        if not deep:
            return
        for each in items(node):
            self.check(each, deep - 1)
        is_pod = child(node, "containers") is not None
        for key, value in entries(node):
            if key.text in _OWN:
                continue
            if key.text == "restartPolicy":
                self._check_restart(value, is_pod=is_pod)
            elif key.text in _LISTS:
                self._check_list(key, value)
            elif key.text in _WORDS:
                self._choose(key.text, value, _WORDS[key.text])
            elif key.text in _COUNTS or key.text in _POSITIVE:
                self._check_count(key.text, value, int(key.text in _POSITIVE))
            elif key.text == "resources" and self._is_of_pods(value):
                self._check_resources(value)
                continue
            self.check(value, deep - 1)

    def _check_list(self, key: ScalarNode, value: Node) -> None:
        if not isinstance(value, ListNode):
            example = "[a, b]" if key.text in ("command", "args") else "entries that begin with -"
            self._notes.add(value.mark, f"`{key.text}` is no list", expected=example)

    def _check_count(self, key: str, value: Node, least: int) -> None:
        number = value.value if isinstance(value, ScalarNode) else None
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            said = shown(value.text) if isinstance(value, ScalarNode) else "a list or table"
            expected = f"a whole number of at least {least}"
            self._notes.add(value.mark, f"`{key}`: {said} is no count", expected=expected)

    def _choose(self, key: str, value: Node, known: Sequence[str]) -> None:
        word = value.text if isinstance(value, ScalarNode) else ""
        if word not in known:
            message = f"`{key}` cannot be {shown(word) if word else 'a list or table'} here"
            self._notes.add(value.mark, message, expected=listed(known))

    def _check_restart(self, value: Node, *, is_pod: bool) -> None:
        if not is_pod:  # of a container, or of a role of an operator
            known: Sequence[str] = _OF_OPERATORS
            if self._kind == "LeaderWorkerSet":
                known = ("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "Default", "None")
        elif self._kind in ("Job", "CronJob"):
            known = _OF_JOBS
        else:
            known = _RESTARTS
        self._choose("restartPolicy", value, known)

    @staticmethod
    def _is_of_pods(value: Node) -> bool:
        return isinstance(value, MapNode) and not {key.text for key, _ in value.entries} - {
            "limits",
            "requests",
            "claims",
        }

    def _check_resources(self, value: Node) -> None:
        limits, requests = child(value, "limits"), child(value, "requests")
        for table in (limits, requests):
            for key, amount in entries(table):
                test = _is_whole if "/" in key.text else _QUANTITY.fullmatch
                self._check_amount(key.text, amount, test)
        found = {key.text: text_at(limits, key.text) for key, _ in entries(limits)}
        for key, amount in entries(requests):
            limit = found.get(key.text)
            if "/" in key.text and limit is not None and limit != text_at(requests, key.text):
                message = f"the request of {key.text} differs from its limit, {limit}"
                hint = "Kubernetes gives devices whole: delete the request"
                self._notes.add(amount.mark, message, suggestion=hint)
        devices = [key for key, _ in entries(limits) if _DEVICES.match(key.text)]
        if len({key.text.partition(".")[0] for key in devices}) > 1:
            message = f"one node has no GPUs of {' and '.join(key.text for key in devices)}"
            self._notes.add(devices[1].mark, message, suggestion="keep one of them")

    def _check_amount(self, key: str, value: Node, test: Callable[[str], object]) -> None:
        text = value.text if isinstance(value, ScalarNode) else ""
        if not test(text):
            expected = "a whole number" if "/" in key else "such as 500m, 2, 16Gi or 512Mi"
            said = shown(text) if text else "a list or table"
            self._notes.add(value.mark, f"{key}: {said} is no quantity", expected=expected)


def _is_whole(text: str) -> bool:
    return text.isdecimal()
