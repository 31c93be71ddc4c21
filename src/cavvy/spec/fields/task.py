"""The task file: its top-level keys, and the domain's Task made of them."""

import re
from datetime import datetime, timedelta

from cavvy.domain.tasks import Limits, Task
from cavvy.domain.units import format_duration
from cavvy.spec.fields.checkpoints import CHECKPOINT
from cavvy.spec.fields.hints import TOP_HINTS
from cavvy.spec.fields.image import IMAGE
from cavvy.spec.fields.kinds import (
    FieldSpec,
    ListKind,
    MapKind,
    SectionReader,
    SectionSpec,
    WrongValue,
    matching,
    named_texts,
    text_kind,
    whole,
)
from cavvy.spec.fields.limits import LIMITS, RETRY
from cavvy.spec.fields.params import PARAMS
from cavvy.spec.fields.resources import RESOURCES
from cavvy.spec.fields.setup import SETUP
from cavvy.spec.fields.times import SCHEDULE, length_kind
from cavvy.spec.fields.transfers import INPUTS, OUTPUTS
from cavvy.spec.fields.volumes import VOLUMES, check_volumes
from cavvy.spec.fields.windows import WINDOW
from cavvy.spec.fields.work import WEBHOOKS, WORK
from cavvy.spec.fields.workdir import WORKDIR
from cavvy.spec.problems import shown, slug

_SLUG = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_slug(text: str) -> str:
    """`text`, where it can be a name. Raises WrongValue."""
    if _SLUG.fullmatch(text):
        return text
    close = slug(text)
    reason = "is longer than 63 characters" if len(text) > 63 else "cannot be a name"
    raise WrongValue(f"{shown(text)} {reason}", suggestion=f"write {close}" if close else "")


def check_variable(name: str) -> str:
    """`name`, where a shell can have such a variable and it is not ours. Raises WrongValue."""
    if not _VARIABLE.fullmatch(name):
        close = re.sub(r"[^A-Za-z0-9_]", "_", name)
        close = f"_{close}" if close[:1].isdigit() else close
        usable = _VARIABLE.fullmatch(close) and close.strip("_")
        raise WrongValue(
            f"{shown(name)} cannot be an environment variable",
            expected="letters, digits and _, not beginning with a digit",
            suggestion=f"write {close}" if usable else "",
        )
    if name.upper().startswith("CAVVY_"):
        raise WrongValue(f"{name} is for Cavvy to set", suggestion="choose a name without CAVVY_")
    return name


def _check_tag_value(text: str) -> str:
    if len(text) > 200:
        raise WrongValue("a tag's value has more than 200 characters")
    return text


def _build(table: SectionReader) -> Task | None:
    env = table.get("env", {})
    for name in table.get("secrets", ()):
        if name in env:
            table.wrong(
                "secrets",
                f"{name} is in `env` and in `secrets`",
                suggestion="delete it from one of them",
            )
    limits: Limits = table.get("limits", Limits())
    _check_uses(table)
    _check_start(table, limits.deadline)
    _check_keep(table, limits)
    _, build, _ = table.get("image", (None, None, None))
    if build is not None and not table.has("workdir"):
        table.wrong(
            "image",
            "the image is built from the working folder, and there is none",
            suggestion="add `workdir: .`",
        )
    check_volumes(table)
    return table.make(Task, name="")


def _check_keep(table: SectionReader, limits: Limits) -> None:
    if not table.get("keep"):
        return
    if table.has("volumes"):
        hint = "delete `keep`, or bring the data as `inputs`"
        table.wrong("keep", "nodes with `volumes` are given back at once", suggestion=hint)
    if limits.duration is not None:
        message = "with `limits.duration`, a place may give the nodes for no longer than that"
        table.wrong("keep", message, suggestion="delete `keep` or `limits.duration`")


def _check_uses(table: SectionReader) -> None:
    """Note where `uses` would mean nothing."""
    _, uses = table.get("setup", (None, None))
    if uses and not table.has("workdir"):
        hint = "add `workdir: .`, or delete `uses`"
        table.wrong("setup", "`setup.uses` names files, and there is no `workdir`", suggestion=hint)
    if uses is not None and table.has("image"):
        table.wrong(
            "setup",
            "`setup.uses` is not honoured with an `image`: in a container, every attempt sets up "
            "anew",
            suggestion="delete `uses`, or build an image that has what the setup makes",
        )


def _check_start(table: SectionReader, deadline: datetime | None) -> None:
    schedule, now = table.get("schedule"), table.notes.now
    start: datetime | None = schedule.at if schedule else None
    if start is not None and now is not None and start <= now:
        message = f"the start was {format_duration(now - start)} ago"
        hint = "leave `schedule` out to start as soon as there is a place"
        table.wrong("schedule", message, suggestion=hint)
    if start is not None and deadline is not None and deadline <= start:
        message = "the start is not before the deadline"
        table.wrong("schedule", message, suggestion="move one of them")


_NAME = text_kind("a name of a-z, 0-9 and -", check_slug, numbers=True)
TASK = SectionSpec(
    "",
    "One task: what to run and what it needs.",
    (
        FieldSpec(
            "name",
            _NAME,
            "What the job is called. A name that is taken gets -2, -3 and so on.",
            "train-resnet",
            "the file's name",
        ),
        FieldSpec(
            "project",
            _NAME,
            "The project that the job belongs to and that pays for it.",
            "vision",
            "default",
        ),
        FieldSpec(
            "tags",
            MapKind(
                "tag names, each with a text",
                matching(
                    r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?",
                    "cannot be a tag's name",
                    expected="letters, digits and . _ / -, at most 63",
                ),
                text_kind("a text", _check_tag_value, numbers=True),
            ),
            "Names and texts of your own, shown with the job and its cost, and put on nodes where "
            "a place has labels.",
            "{team: vision}",
        ),
        FieldSpec("priority", whole(-100, 100), "Jobs of higher priority start first.", "10", "0"),
        FieldSpec(
            "params",
            PARAMS,
            "Parameters, each a default alone or a table. `--param NAME=VALUE` overrides one; any "
            "value of the file may say `${{ params.NAME }}`, and programs find it as "
            "CAVVY_PARAM_NAME.",
            "{lr: 0.1, optimizer: {default: adam, choices: [adam, sgd]}}",
            to=(),
        ),
        FieldSpec("resources", RESOURCES, RESOURCES.help, "{gpu: H100:8, spot: auto}", "any node"),
        FieldSpec(
            "nodes",
            whole(1, 10_000),
            "How many identical nodes work together. Each finds its rank in torchrun's variables "
            "(NODE_RANK, MASTER_ADDR, …).",
            "2",
            "1",
        ),
        FieldSpec(
            "image",
            IMAGE,
            "The container image that `setup` and `run` run in: its name, or a table. Refused "
            "where a provider has no container engine.",
            "{build: .}",
            "none: the node as it is",
            to=("image", "image_build", "image_login"),
        ),
        FieldSpec(
            "workdir",
            WORKDIR,
            "The working folder: a folder of this machine, relative to the task file and frozen "
            "when the job is submitted, or a git repository at a commit. What `.gitignore` and "
            "`.cavvyignore` name is left out.",
            ".",
            "an empty folder",
        ),
        FieldSpec(
            "setup",
            SETUP,
            "What each node runs before, in the same folder: commands, or a table with the files "
            "that they use. Without an image, it has a virtual environment of its own, which the "
            "task sees. A finished setup of the same text and files is reused.",
            "{run: pip install -r requirements.txt, uses: [requirements.txt]}",
            to=("setup", "setup_uses"),
        ),
        FieldSpec(
            "run",
            text_kind("shell commands"),
            "What each node runs, by `bash` (or `sh` where there is none), in the working folder.",
            "python train.py --lr ${{ params.lr }}",
            required=True,
        ),
        FieldSpec(
            "env",
            named_texts(
                "variable names, each with a text",
                check_variable,
                {"pattern": f"^{_VARIABLE.pattern}$"},
                missing="the variable has no value",
                hint="write '' for an empty one, or list its name under `secrets`",
            ),
            "Environment variables of `setup` and `run`. They are kept and shown as they are: "
            "passwords go to `secrets`.",
            "{EPOCHS: 10}",
        ),
        FieldSpec(
            "secrets",
            ListKind(text_kind("a secret's name such as HF_TOKEN", check_variable), single=True),
            "Names of secrets, set before with `cavvy secret set NAME`; each becomes an "
            "environment variable.",
            "[HF_TOKEN]",
        ),
        FieldSpec(
            "inputs",
            INPUTS,
            "What to copy to each node before the work: from paths of the node, S3, GCS, Azure "
            "Blob, SFTP or the web.",
            "[{source: s3://bucket/images/, target: data/images}]",
        ),
        FieldSpec(
            "outputs",
            OUTPUTS,
            "What to copy back after the work has ended with exit code 0: to paths of the node, "
            "S3, GCS, Azure Blob or SFTP.",
            "[{source: results, target: s3://bucket/results/}]",
        ),
        FieldSpec(
            "volumes",
            VOLUMES,
            "What each node has at hand beside its own disk: the provider's volumes by name, "
            "folders of the node, NFS. One is SOURCE:PATH, with :ro at the end to read only, or a "
            "table.",
            "[imagenet:/data, /scratch:/scratch, nas:/export/home:home:ro]",
        ),
        FieldSpec(
            "checkpoint",
            CHECKPOINT,
            "A folder within the working folder that outlives an attempt: the next one finds in it "
            "what the last one wrote. A path, or a table.",
            "{path: checkpoints, every: 10m}",
        ),
        FieldSpec("limits", LIMITS, LIMITS.help, "{duration: 6h, budget: 25}"),
        FieldSpec("retry", RETRY, RETRY.help, "{exit: 2, delay: 30s}"),
        FieldSpec(
            "schedule",
            SCHEDULE,
            "When to start: a time with its zone, a cron line (a run begins each time it comes), "
            "or a table.",
            "2030-05-31T18:00Z",
            "as soon as there is a place",
        ),
        FieldSpec(
            "window",
            WINDOW,
            "When a job may start, and within it, when it is cheapest: `off-peak` is 22:00-06:00 "
            "and all of Saturday and Sunday, times are in UTC where no zone is named.",
            "off-peak Europe/Berlin",
            "at any time",
        ),
        FieldSpec("work", WORK, WORK.help, "{samples: 5e6, rates: {H100: 5200}}"),
        FieldSpec(
            "webhooks",
            WEBHOOKS,
            "Web addresses to tell when the job has finished, has failed or has run into its "
            "budget.",
            "[https://example.org/hook]",
        ),
        FieldSpec(
            "grace",
            length_kind(timedelta(0), timedelta(hours=1)),
            "How long a program may take between SIGTERM and SIGKILL.",
            "60s",
            "10s",
        ),
        FieldSpec(
            "keep",
            length_kind(timedelta(0), timedelta(hours=24)),
            "How long the nodes are held after the work has ended by itself, for the next job of "
            "the same project that fits them. They are paid for that long; `cavvy stop` and "
            "`cavvy down` give them back at once. Hosts that jobs share are free at once instead, "
            "and nodes with `volumes` or `limits.duration` are not held.",
            "10m",
            "not at all",
        ),
    ),
    _build,
    TOP_HINTS,
)
