"""Writes a shell script that calls a service through the service's own command-line tool."""

from collections.abc import Sequence
from typing import Any

from cavvy.domain.tasks import TaskSpec
from cavvy.providers.batch.export import here_document
from cavvy.providers.formats.notes import write_comments
from cavvy.providers.formats.yaml_text import dump_yaml


def write_script(
    name: str, task: TaskSpec, notes: Sequence[str], calls: Sequence[tuple[str, Any]]
) -> str:
    """Return a script with comments at the top, and one command for each request. The command reads
    its request as YAML from standard input.
    """
    lines = ["#!/bin/bash", *write_comments(name, task, notes), "set -euo pipefail"]
    lines += [f"{command} {here_document(dump_yaml(request))}" for command, request in calls]
    return "\n".join(lines) + "\n"
