"""Writes the comments at the top of an exported request, which are steps for the user and parts of
the task that the request does not contain. Also writes YAML that has readable multi-line strings,
and that parsers of YAML 1.1 and YAML 1.2 read identically.
"""

from collections.abc import Collection, Sequence
from typing import Any

import yaml

from cavvy.domain.tasks import SpotPolicy, TaskSpec, Transfer
from cavvy.providers.batch.export import here_document
from cavvy.spec.tree import read_scalar

# YAML 1.1 has these as booleans (yaml.org/type/bool.html); PyYAML neither reads nor quotes them so.
_SHORT_BOOLEANS = frozenset("yYnN")


class LiteralDumper(yaml.SafeDumper):
    """Writes multi-line strings in YAML's literal style. Quotes strings that a parser of YAML 1.1
    or 1.2 would read as a number or a boolean.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True  # write a shared value in full each time, as people would

    def represent_str(self, data: str) -> yaml.ScalarNode:
        if "\x85" in data:
            style: str | None = '"'  # U+0085 ends a line in YAML: only an escape keeps it
        elif "\n" in data:
            style = "|"
        else:
            style = "'" if data in _SHORT_BOOLEANS or read_scalar(data) != data else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


LiteralDumper.add_representer(str, LiteralDumper.represent_str)


def dump_yaml(value: Any) -> str:
    """Return the value as one YAML document. Keys keep their order, and long lines are not
    folded."""
    text: str = yaml.dump(
        value, Dumper=LiteralDumper, sort_keys=False, width=100_000, allow_unicode=True
    )
    return text


_UNCHECKED = "the service does not stop the job at this limit"


def list_notes(task: TaskSpec, covered: Collection[str]) -> list[str]:
    """Return notes about the task keys that are missing from the request. Each note says why a key
    is missing, or what the user must do instead. `covered` are the keys that the request contains.
    """
    need, volumes = task.resources, ", ".join(each.path for each in task.volumes)
    rows: Sequence[tuple[str, object, str]] = (
        ("image", task.image is None, _explain_image(task)),
        (
            "image.login",
            task.image_login,
            "the service needs its own permission to pull from the registry",
        ),
        ("secrets", task.secrets, _explain_secrets(task)),
        ("workdir", task.workdir, "copy the working folder into the image"),
        ("volumes", task.volumes, f"the container does not mount {volumes}"),
        ("inputs", task.inputs, f"the container must copy {_list_copies(task.inputs)}"),
        ("outputs", task.outputs, f"the container must copy {_list_copies(task.outputs)}"),
        (
            "checkpoint",
            task.checkpoint,
            "the folder is deleted with the container; store checkpoints outside the container",
        ),
        (
            "resources.spot",
            need.spot is not SpotPolicy.NEVER,
            "the service chooses where the job runs",
        ),
        ("resources.network", need.network, "select the network in the service's configuration"),
        ("resources.max_price", need.max_rate, "the request has no maximum price"),
        *((f"limits.{name}", value, _UNCHECKED) for name, value in _list_limits(task).items()),
        ("retry", True, "the service does not restart the job after its program has failed"),
        ("schedule", task.schedule or task.window, "the job starts when you submit it"),
        ("webhooks", task.webhooks, "the service sends no webhook when the job ends"),
    )
    return [f"{key}: {note}" for key, value, note in rows if value and key not in covered]


def _explain_image(task: TaskSpec) -> str:
    build = task.image_build
    if build is None:
        return "the task names no image; replace IMAGE with the image to run"
    return f"build {build.path}/{build.dockerfile}, push the image, and replace IMAGE with its name"


def _explain_secrets(task: TaskSpec) -> str:
    return f"this file contains no values; pass {', '.join(task.secrets)} to the container"


def _list_copies(transfers: Sequence[Transfer]) -> str:
    return ", ".join(f"{each.source} to {each.target}" for each in transfers)


def _list_limits(task: TaskSpec) -> dict[str, object]:
    limits = task.limits
    return {
        "duration": limits.duration,
        "deadline": limits.deadline or limits.deadline_after,
        "budget": limits.budget,
        "idle": limits.idle,
    }


def write_comments(name: str, task: TaskSpec, notes: Collection[str]) -> list[str]:
    """Return the comments at the top of a YAML file or a shell script."""
    return [
        f"# Made by `cavvy export {name} TASK.YAML` from the task {task.name}.",
        *(f"# {each}" for note in notes for each in [" ".join(note.split())]),
    ]


def write_script(
    name: str, task: TaskSpec, notes: Sequence[str], calls: Sequence[tuple[str, Any]]
) -> str:
    """Return a script with comments at the top, and one command for each request. The command reads
    its request as YAML from standard input.
    """
    lines = ["#!/bin/bash", *write_comments(name, task, notes), "set -euo pipefail"]
    lines += [f"{command} {here_document(dump_yaml(request))}" for command, request in calls]
    return "\n".join(lines) + "\n"
