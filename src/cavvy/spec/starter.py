"""The commented starter file that `cavvy init` writes."""

import json

from cavvy.domain.tasks import SpotPolicy
from cavvy.domain.values import Struct
from cavvy.spec.fields.params import escape


class StarterAnswers(Struct, frozen=True, kw_only=True):
    """The user's answers to the questions of `cavvy init`, as typed. An empty string means no
    answer.
    """

    name: str = "hello"
    run: str = "echo hello from $(hostname)"
    gpu: str = ""
    spot: SpotPolicy = SpotPolicy.NEVER
    checkpoint: str = ""
    budget: str = ""


def make_starter(answers: StarterAnswers) -> str:
    """Build a task file from the user's answers. Common keys without an answer are included as
    comments.
    """
    run = escape(answers.run.strip())
    return f"""\
# A task for Cavvy: what to run, and what it needs.
#   cavvy validate FILE   check it        cavvy plan FILE   compare the costs of all offers
#   cavvy run FILE        run it          every key: docs/reference/task-file.md
name: {answers.name}

# Parameters: override them with --param NAME=VALUE, use them as ${{{{ params.NAME }}}} or
# $CAVVY_PARAM_NAME.
# params:
#   lr: 0.1

# What each node must have. A key that is left out sets no limit.
resources:
{_line("gpu", answers.gpu, "H100:8", "NAME:COUNT, NAME:MEMORY, or a list of alternatives")}
  # cpu: 8+
  # memory: 64GB
  spot: {answers.spot}  # never, auto (whichever costs less in total) or only

# nodes: 2  # run on two nodes at once; NODE_RANK and MASTER_ADDR are set for torchrun

# The folder where the task runs, frozen on submission without the files that .gitignore and
# .cavvyignore list.
workdir: .

# Commands that run before `run`. A finished setup is reused until its commands or the files in
# `uses` change.
# setup: {{run: pip install -r requirements.txt, uses: [requirements.txt]}}

run: |
{_block(run)}

# A folder within the working folder that outlives a node: write checkpoints to it, and resume from
# it at the start.
{_checkpoint(answers.checkpoint)}

# How long the work takes on these GPUs; `cavvy plan` scales the time to other GPUs and shows the
# cost.
# work: {{duration: 10h, measured_on: A100:8}}

limits:
{_line("budget", answers.budget, "25", "US dollars; the job is stopped before it costs more")}
  # duration: 6h

# env: {{EPOCHS: 10}}
# secrets: [HF_TOKEN]  # first run: cavvy secret set HF_TOKEN
"""


def _line(key: str, value: str, example: str, comment: str) -> str:
    if value:
        return f"  {key}: {_quoted(value)}  # {comment}"
    return f"  # {key}: {example}  # {comment}"


def _checkpoint(path: str) -> str:
    return (
        f"checkpoint: {{path: {_quoted(path)}, every: 10m}}"
        if path
        else "# checkpoint: {path: checkpoints, every: 10m}"
    )


def _block(text: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in text.splitlines())


def _quoted(text: str) -> str:
    """Write a text as a YAML scalar on one line, quoted only if necessary."""
    plain = (
        text.replace(":", "")
        .replace(".", "")
        .replace("-", "")
        .replace("_", "")
        .replace("/", "")
        .isalnum()
    )
    return (
        text
        if plain and ": " not in text and not text.endswith(":")
        else json.dumps(text, ensure_ascii=False)
    )
