"""Turns a task into a script that runs without Cavvy. The exports for Slurm, PBS and Kubernetes
share this code.
"""

import re
import shlex
from collections.abc import Sequence

from cavvy.domain.tasks import NotifyTarget, TaskSpec
from cavvy.domain.values import replace

MASTER_PORT = 29500  # the default port of torchrun
# The first command of the shell that runs the work, for text in double quotes. SIGTERM reaches the
# shell and its current command. Without a trap, the shell would end at once, and the job with it,
# while the command still writes its checkpoint. With one, a signal ends `wait` itself, with a code
# of its own: bash says which command it was, and waits again.
STAY = (
    "trap 'CAVVY_CODE=\\$?; case \\${BASH_COMMAND-} in wait|wait\\ *) "
    'eval \\"\\$BASH_COMMAND\\"; CAVVY_CODE=\\$?;; esac; exit \\$CAVVY_CODE\' TERM'
)


def list_notes(task: TaskSpec, secrets_file: str = "") -> Sequence[str]:
    """Return notes about what the user must do before and after the script runs. `secrets_file` is
    the file with the secrets if the batch system does not pass the user's environment on.
    """
    how = (
        f"Write a line `export {{name}}=...` to the file {secrets_file} in the folder from which "
        "you submit, readable only by you"
        if secrets_file
        else "Set {name} in your environment before you submit"
    )
    notes = [
        f"{how.format(name=name)}; this script does not contain its value." for name in task.secrets
    ]
    if task.image is not None:
        notes.append(
            f"The task names the image {task.image}; run the work in it with your cluster's tools."
        )
    if task.image_build is not None:
        notes.append(
            f"Build the image from {task.image_build.path}/{task.image_build.dockerfile}, and run "
            "the work in it."
        )
    if task.workdir is not None and task.workdir.git is not None:
        notes.append(
            f"Submit this script from a clone of {task.workdir.git} at "
            f"{task.workdir.commit or 'its newest commit'}."
        )
    elif task.workdir is not None and task.workdir.path is not None:
        notes.append(
            f"Submit this script from the folder {task.workdir.path}, which must be accessible "
            "from all nodes."
        )
    notes += [f"Copy {each.source} to {each.target} before the job starts." for each in task.inputs]
    notes += [
        f"Copy {each.source} to {each.target} when the job has ended." for each in task.outputs
    ]
    notes += [
        f"Make sure that all nodes have {each.source} at {each.path}." for each in task.volumes
    ]
    if task.checkpoint is not None:
        notes.append(
            f"Checkpoints stay in {task.checkpoint.path}; the work is not restarted after a "
            "failure."
        )
    if task.service is not None:
        notes.append(
            "The script runs one replica of the service, which only programs on its node can reach."
        )
    return [*notes, *list_general_notes(task)]


def take_first_choice(task: TaskSpec) -> TaskSpec:
    """Return the task with the first of the alternatives in `resources.any_of`. A job that is
    written without an offer can request only one of them.
    """
    return replace(task, resources=task.resources.choices[0])


def list_general_notes(task: TaskSpec) -> list[str]:
    """Return notes about parts of the task that only Cavvy applies."""
    need, limits = task.resources, task.limits
    notes = []
    if need.any_of:
        notes.append(
            f"resources.any_of: this requests one of the task's {len(need.any_of)} alternatives."
        )
    if need.instance is not None:
        notes.append(
            f"resources.instance: this requests no {need.instance}; add its accelerators, CPUs "
            "and memory."
        )
    only_cavvy = {
        "limits.deadline": limits.deadline or limits.deadline_after,
        "limits.budget": limits.budget,
        "limits.idle": limits.idle,
        "schedule": task.schedule or task.window,
        "notify": task.notify is not NotifyTarget.HANDLERS,
        "webhooks": task.webhooks,
    }
    if absent := [key for key, value in only_cavvy.items() if value]:
        notes.append(f"Only Cavvy applies {', '.join(absent)}.")
    used = {*re.findall(r"\bCAVVY_[A-Z0-9_]+", f"{task.setup}\n{task.run}")}
    if unset := sorted(used - {*list_variables(task, 1), "CAVVY_HOSTS"}):
        notes.append(f"The commands use {', '.join(unset)}, which only Cavvy sets.")
    return notes


def make_header(
    provider: str,
    directive: str,
    options: Sequence[str],
    task: TaskSpec,
    notes: Sequence[str],
) -> Sequence[str]:
    """Return the first lines of a script: the job's options, the script's origin, and notes for the
    user.
    """
    return [
        "#!/bin/bash",
        *(f"{directive} {option}" for option in options),
        f"# Made by `cavvy export {provider} TASK.YAML` from the task {task.name}.",
        *(f"# {' '.join(note.split())}" for note in notes),
    ]


def list_exports(task: TaskSpec, nodes: int) -> Sequence[str]:
    """Return the variables from `list_variables`, as `export` lines, without MASTER_PORT."""
    return [
        f"export {name}={shlex.quote(value)}"
        for name, value in list_variables(task, nodes).items()
        if name != "MASTER_PORT"
    ]


def list_port_lines(job: str) -> Sequence[str]:
    """Return shell lines that set MASTER_PORT on the first node. Jobs can share a node, so the port
    depends on `job`, shell text for a number that differs between jobs. Each job has ten ports
    below the range from which the kernel takes ports for outgoing connections (from 32768).
    """
    return [
        f"MASTER_PORT=$((10000 + ({job}) * 10 % 20000))",
        'while (: <> "/dev/tcp/127.0.0.1/$MASTER_PORT") 2>/dev/null; do',
        "    MASTER_PORT=$((MASTER_PORT + 10)) # the port is in use",
        "done",
    ]


def list_secret_lines(task: TaskSpec, where: str) -> Sequence[str]:
    """Return shell lines that end the job if a secret has no value."""
    return [f': "${{{name}:?is a secret of the task; set it in {where}}}"' for name in task.secrets]


def list_variables(task: TaskSpec, nodes: int) -> dict[str, str]:
    """Return the variables that Cavvy sets on every node, except the variables for the rank and the
    addresses.
    """
    variables = dict(task.env)
    for name, value in task.params.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        variables["CAVVY_PARAM_" + re.sub(r"\W", "_", name).upper()] = text
    variables |= {"MASTER_PORT": str(MASTER_PORT), "NNODES": str(nodes)}
    if task.service is not None:
        variables |= {"PORT": str(task.service.port), "SERVE_HOST": "127.0.0.1"}
    if task.checkpoint is not None:
        variables["CAVVY_CHECKPOINT_DIR"] = task.checkpoint.path
    return variables


def make_work(task: TaskSpec) -> str:
    """Return the task's `setup`, then its `run`, as one shell program."""
    parts = ["set -e", task.setup.rstrip("\n"), "set +e"] if task.setup else []
    return "\n".join([*parts, task.run.rstrip("\n")]) + "\n"


def here_document(text: str) -> str:
    """Return a quoted shell here-document with the text, so that the shell does not expand the
    text. The end marker of the here-document is a word that does not occur in the text.
    """
    word = "CAVVY_WORK"
    while word in text:
        word += "_"
    return f"<<'{word}'\n{text}{word}"
