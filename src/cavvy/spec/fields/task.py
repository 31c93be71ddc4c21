"""The task file: its top-level keys, and the domain's Task made of them."""

import re
from datetime import datetime, timedelta
from enum import StrEnum

from cavvy.domain.tasks import Limits, Resources, Retry, Task, Transfer, Workdir
from cavvy.domain.units import format_duration
from cavvy.spec.fields.hints import TOP_HINTS
from cavvy.spec.fields.image import IMAGE_KIND, check_image
from cavvy.spec.fields.kinds import (
    EitherKind,
    FieldSpec,
    ListKind,
    MapKind,
    ScalarKind,
    SectionReader,
    SectionSpec,
    WrongValue,
    choice,
    read_text,
    text_kind,
    whole,
)
from cavvy.spec.fields.limits import CHECKPOINT, LIMITS, RETRY, inner_path
from cavvy.spec.fields.params import PARAMS
from cavvy.spec.fields.resources import RESOURCES
from cavvy.spec.fields.setup import SETUP_KIND, SetupField
from cavvy.spec.fields.times import SCHEDULE, length_kind
from cavvy.spec.fields.urls import read_source, read_target
from cavvy.spec.fields.volumes import VOLUMES, check_path, check_volumes
from cavvy.spec.fields.windows import WINDOW
from cavvy.spec.fields.work import WEBHOOKS, WORK
from cavvy.spec.problems import shown, slug
from cavvy.spec.support import NOT_YET
from cavvy.spec.tree import ScalarNode

_SLUG = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TEXT_OR_NUMBER = {"type": ["string", "number"]}


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


def _check_key(name: str) -> None:
    check_variable(name)


def _read_env(node: ScalarNode) -> str:
    if node.value is None and node.plain:
        hint = "write '' for an empty one, or list its name under `secrets`"
        raise WrongValue("the variable has no value", suggestion=hint)
    return read_text(node)


def _check_tag(name: str) -> None:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?", name):
        raise WrongValue(
            f"{shown(name)} cannot be a tag's name",
            expected="letters, digits and . _ / -, at most 63",
        )


def _check_tag_value(text: str) -> str:
    if len(text) > 200:
        raise WrongValue("a tag's value has more than 200 characters")
    return text


# workdir

_GIT_URL = re.compile(r"(?:https?|ssh|git|file)://\S+|[A-Za-z0-9._-]+@[A-Za-z0-9.-]+:\S+")
_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}")
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


def _check_git(text: str) -> str:
    url = text.strip()
    if not _GIT_URL.fullmatch(url) or url.startswith("-"):
        raise WrongValue(
            f"{shown(text)} is no git URL", suggestion="for a folder write `workdir: FOLDER`"
        )
    if re.match(r"[a-z]+://[^/@]*:[^/@]+@", url):
        raise WrongValue(
            "the URL has a password in it",
            suggestion="use a credential helper or SSH; task files are kept",
        )
    return url


def _check_commit(text: str) -> str:
    if not _COMMIT.fullmatch(text.lower()):
        raise WrongValue(
            f"{shown(text)} is no commit",
            suggestion="a branch or tag moves; `git ls-remote URL NAME` shows its commit",
        )
    return text.lower()


def _read_workdir(node: ScalarNode) -> Workdir:
    text = read_text(node).strip()
    if not text:
        raise WrongValue("the text is empty", suggestion="write `.` for the folder of this file")
    if not (_GIT_URL.fullmatch(text) or text.endswith(".git")):
        if text.startswith("~"):
            raise WrongValue(
                f"{shown(text)}: ~ is the shell's",
                suggestion="write the path in full, or relative to this file",
            )
        return Workdir(path=text)
    url, at, point = text.rpartition("@")
    # git@host:path has an @ of its own; what follows the last one of a URL is the commit only
    # without a slash or colon.
    if not at or "/" in point or ":" in point or not _GIT_URL.fullmatch(url):
        url, point = text, ""
    url = _check_git(url)
    if not point:
        raise WrongValue(
            "the git URL names no commit",
            suggestion=f"write {url}@COMMIT; `git ls-remote {url}` shows them",
        )
    if _COMMIT.fullmatch(point.lower()):
        return Workdir(git=url, commit=point.lower())
    hint = f"`git ls-remote {url} {point}` shows its commit" if _REF.fullmatch(point) else ""
    raise WrongValue(
        f"{shown(point)} is not honoured yet: {NOT_YET['workdir.ref']}", suggestion=hint
    )


GIT = FieldSpec(
    name="git",
    kind=text_kind("a git URL", _check_git),
    help="The repository.",
    example="git: https://example.org/team/model.git",
    required=True,
)
COMMIT = FieldSpec(
    name="commit",
    kind=text_kind("a commit's hash", _check_commit, numbers=True),
    help="The commit.",
    example="commit: 1f2e3d4c5b6a",
)
REF = FieldSpec(
    name="ref",
    kind=text_kind("a branch or tag", numbers=True),
    help="A branch or tag.",
    example="ref: v1.2",
    refused=NOT_YET["workdir.ref"],
)


def _build_workdir(table: SectionReader) -> Workdir:
    git, commit = table.get(GIT), table.get(COMMIT)
    if not table.has(COMMIT) and not table.has(REF):
        hint = f"`git ls-remote {git}` shows them" if git else ""
        table.notes.add(
            table.node.mark, "the git URL names no commit", expected="`commit`", suggestion=hint
        )
    return Workdir(git=git, commit=commit)


WORKDIR_TABLE = SectionSpec(
    path="workdir",
    help="A git repository at a commit.",
    fields=(GIT, COMMIT, REF),
    build=_build_workdir,
    hints={
        "url": "write `git`",
        "branch": "write `commit`",
        "tag": "write `commit`",
        "hash": "write `commit`",
        "path": "write `workdir: FOLDER`",
    },
)
_WORKDIR_TEXT = ScalarKind(
    words="a folder, or a git URL with @COMMIT", parse=_read_workdir, schema={"type": "string"}
)

# inputs and outputs


_HERE = text_kind(
    "a full path such as /data/images, or a URL such as s3://bucket/images/", read_source
)
_AWAY = text_kind(
    "a full path such as /data/results, or a URL such as s3://bucket/results/", read_target
)
_THERE = text_kind("a path within the working folder such as data/images", inner_path)
_SEEN = text_kind("a path within the working folder such as data/images, or a full one", check_path)


class InputMode(StrEnum):
    """How an input comes."""

    COPY = "copy"
    STREAM = "stream"


MODE = FieldSpec(
    name="mode",
    kind=choice(
        InputMode, {"mount": InputMode.COPY, "download": InputMode.COPY, "pipe": InputMode.STREAM}
    ),
    help="`copy`: before the work starts. `stream`: the target is a pipe, which the work reads "
    "once while the data "
    "comes; a folder's files come one after another, by name.",
    example="mode: stream",
    default="copy",
)


OFTEN = FieldSpec(
    name="every",
    kind=length_kind(timedelta(seconds=1)),
    help="Of a URL: send what has changed also while the work runs, every so often, and at its end "
    "however that "
    "comes: a failure, a stop, a preemption. Nothing is deleted there.",
    example="every: 1m",
)


def _transfers(
    path: str, help: str, *fields: FieldSpec[str] | FieldSpec[InputMode] | FieldSpec[timedelta]
) -> SectionSpec[Transfer | None]:
    source, target = fields[:2]

    def build(table: SectionReader) -> Transfer | None:
        start, end = table.get(source), table.get(target)
        if not isinstance(start, str) or not isinstance(end, str):
            return None
        stream = MODE in fields and table.get(MODE) is InputMode.STREAM
        every = table.get(OFTEN) if OFTEN in fields else None
        if stream and "://" not in start:
            table.wrong(MODE, "only what comes from a URL is streamed", suggestion="delete `mode`")
        if every is not None and "://" not in end:
            table.wrong(
                OFTEN,
                "only what goes to a URL is sent while the work runs",
                suggestion="delete `every`",
            )
        return Transfer(source=start, target=end, stream=stream, every=every)

    hints = {
        "from": "write `source`",
        "src": "write `source`",
        "to": "write `target`",
        "dst": "write `target`",
    }
    hints |= {
        "path": "write `source` and `target`",
        "url": "write `source`",
        "mount": "write `target`",
    }
    return SectionSpec(path=path, help=help, fields=fields, build=build, hints=hints)


INPUT = _transfers(
    "inputs",
    "One thing to copy to each node before the work starts. Of a URL, what ends with / or is no "
    "object itself is a "
    "folder. Credentials stay at the control plane; see the guide on data.",
    FieldSpec(
        name="source",
        kind=_HERE,
        help="What to copy.",
        example="source: s3://bucket/images/",
        required=True,
    ),
    FieldSpec(
        name="target",
        kind=_SEEN,
        help="Where the work sees it.",
        example="target: data/images",
        required=True,
    ),
    MODE,
)
OUTPUT = _transfers(
    "outputs",
    "One thing to copy back after the work has ended. To a URL that ends with /, a file goes under "
    "its own name.",
    FieldSpec(
        name="source", kind=_THERE, help="What to copy.", example="source: results", required=True
    ),
    FieldSpec(
        name="target",
        kind=_AWAY,
        help="Where to.",
        example="target: s3://bucket/results/",
        required=True,
    ),
    OFTEN,
)

# The whole file.

NAME = FieldSpec(
    name="name",
    kind=text_kind("a name of a-z, 0-9 and -", check_slug, numbers=True),
    help="What the job is called. A name that is taken gets -2, -3 and so on.",
    example="name: train-resnet",
    default="the file's name",
)
PROJECT = FieldSpec(
    name="project",
    kind=text_kind("a name of a-z, 0-9 and -", check_slug, numbers=True),
    help="The project that the job belongs to and that pays for it.",
    example="project: vision",
    default="default",
)
RUN = FieldSpec(
    name="run",
    kind=text_kind("shell commands"),
    help="What each node runs, by `bash` (or `sh` where there is none), in the working folder.",
    example="run: python train.py --lr ${{ params.lr }}",
    required=True,
)
SETUP = FieldSpec(
    name="setup",
    kind=SETUP_KIND,
    help="What each node runs before, in the same folder: commands, or a table with the files that "
    "they use. Without an image, it has a virtual environment of its own, which the task sees. A "
    "finished setup of the same text and files is reused.",
    example="setup: {run: pip install -r requirements.txt, uses: [requirements.txt]}",
)
TAGS = FieldSpec(
    name="tags",
    kind=MapKind(
        check_key=_check_tag,
        value=text_kind("a text", _check_tag_value, numbers=True),
        words="tag names, each with a text",
        key_schema={"type": "string"},
    ),
    help="Names and texts of your own, shown with the job and its cost, and put on nodes where a "
    "place has labels.",
    example="tags: {team: vision}",
)
PRIORITY = FieldSpec(
    name="priority",
    kind=whole(-100, 100),
    help="Jobs of higher priority start first.",
    example="priority: 10",
    default="0",
)
PARAMS_FIELD = FieldSpec(
    name="params",
    kind=PARAMS,
    help="Parameters, each a default alone or a table. `--param NAME=VALUE` overrides one; any "
    "value of the file may "
    "say `${{ params.NAME }}`, and programs find it as CAVVY_PARAM_NAME.",
    example="params: {lr: 0.1, optimizer: {default: adam, choices: [adam, sgd]}}",
)
RESOURCES_FIELD = FieldSpec(
    name="resources",
    kind=RESOURCES,
    help=RESOURCES.help,
    example="resources: {gpu: H100:8, spot: auto}",
    default="any node",
)
NODES = FieldSpec(
    name="nodes",
    kind=whole(1, 10_000),
    help="How many identical nodes work together. Each finds its rank in torchrun's variables "
    "(NODE_RANK, MASTER_ADDR, …).",
    example="nodes: 2",
    default="1",
)
IMAGE = FieldSpec(
    name="image",
    kind=IMAGE_KIND,
    help="The container image that `setup` and `run` run in: its name, or a table. Refused where a "
    "provider has no "
    "container engine.",
    example="image: {build: .}",
    default="none: the node as it is",
)
WORKDIR = FieldSpec(
    name="workdir",
    kind=EitherKind(kinds=(_WORKDIR_TEXT, WORKDIR_TABLE)),
    help="The working folder: a folder of this machine, relative to the task file and frozen when "
    "the job is "
    "submitted, or a git repository at a commit. What `.gitignore` and `.cavvyignore` name is left "
    "out.",
    example="workdir: .",
    default="an empty folder",
)
ENV = FieldSpec(
    name="env",
    kind=MapKind(
        check_key=_check_key,
        value=ScalarKind(
            words="a text", parse=_read_env, schema={"type": ["string", "number", "boolean"]}
        ),
        words="variable names, each with a text",
        key_schema={"pattern": f"^{_VARIABLE.pattern}$"},
    ),
    help="Environment variables of `setup` and `run`. They are kept and shown as they are: "
    "passwords go to `secrets`.",
    example="env: {EPOCHS: 10}",
)
SECRETS = FieldSpec(
    name="secrets",
    kind=ListKind(item=text_kind("a secret's name such as HF_TOKEN", check_variable), single=True),
    help="Names of secrets, set before with `cavvy secret set NAME`; each becomes an environment "
    "variable.",
    example="secrets: [HF_TOKEN]",
)
INPUTS = FieldSpec(
    name="inputs",
    kind=ListKind(item=INPUT),
    help="What to copy to each node before the work: from paths of the node, S3, GCS, Azure Blob, "
    "SFTP or the web.",
    example="inputs: [{source: s3://bucket/images/, target: data/images}]",
)
OUTPUTS = FieldSpec(
    name="outputs",
    kind=ListKind(item=OUTPUT),
    help="What to copy back after the work has ended with exit code 0: to paths of the node, S3, "
    "GCS, Azure Blob or "
    "SFTP.",
    example="outputs: [{source: results, target: s3://bucket/results/}]",
)
VOLUMES_FIELD = FieldSpec(
    name="volumes",
    kind=VOLUMES,
    help="What each node has at hand beside its own disk: the provider's volumes by name, folders "
    "of the node, NFS. "
    "One is SOURCE:PATH, with :ro at the end to read only, or a table.",
    example="volumes: [imagenet:/data, /scratch:/scratch, nas:/export/home:home:ro]",
)
CHECKPOINT_FIELD = FieldSpec(
    name="checkpoint",
    kind=CHECKPOINT,
    help="A folder within the working folder that outlives an attempt: the next one finds in it "
    "what the "
    "last one wrote. "
    "A path, or a table.",
    example="checkpoint: {path: checkpoints, every: 10m}",
)
LIMITS_FIELD = FieldSpec(
    name="limits", kind=LIMITS, help=LIMITS.help, example="limits: {duration: 6h, budget: 25}"
)
RETRY_FIELD = FieldSpec(
    name="retry", kind=RETRY, help=RETRY.help, example="retry: {exit: 2, delay: 30s}"
)
SCHEDULE_FIELD = FieldSpec(
    name="schedule",
    kind=SCHEDULE,
    help="When to start: a time with its zone, a cron line (a run begins each time it comes), or a "
    "table.",
    example="schedule: 2030-05-31T18:00Z",
    default="as soon as there is a place",
)
WINDOW_FIELD = FieldSpec(
    name="window",
    kind=WINDOW,
    help="When a job may start, and within it, when it is cheapest: `off-peak` is 22:00-06:00 and "
    "all of Saturday and "
    "Sunday, times are in UTC where no zone is named.",
    example="window: off-peak Europe/Berlin",
    default="at any time",
)
WORK_FIELD = FieldSpec(
    name="work", kind=WORK, help=WORK.help, example="work: {samples: 5e6, rates: {H100: 5200}}"
)
WEBHOOKS_FIELD = FieldSpec(
    name="webhooks",
    kind=WEBHOOKS,
    help="Web addresses to tell when the job has finished, has failed or has run into its budget.",
    example="webhooks: [https://example.org/hook]",
)
GRACE = FieldSpec(
    name="grace",
    kind=length_kind(timedelta(0), timedelta(hours=1)),
    help="How long a program may take between SIGTERM and SIGKILL.",
    example="grace: 60s",
    default="10s",
)

KEEP = FieldSpec(
    name="keep",
    kind=length_kind(timedelta(0), timedelta(hours=24)),
    help="How long the nodes are held after the work has ended by itself, for the next job of the "
    "same project that "
    "fits them. They are paid for that long; `cavvy stop` and `cavvy down` give them back at once. "
    "Hosts that jobs "
    "share are free at once instead, and nodes with `volumes` or `limits.duration` are not held.",
    example="keep: 10m",
    default="not at all",
)


def _build(table: SectionReader) -> Task:
    secrets, env = table.get(SECRETS, ()), table.get(ENV, {})
    for name in (*_both(secrets, env),):
        table.wrong(
            SECRETS, f"{name} is in `env` and in `secrets`", suggestion="delete it from one of them"
        )
    limits, schedule = table.get(LIMITS_FIELD, Limits()), table.get(SCHEDULE_FIELD)
    setup = table.get(SETUP)
    if setup is not None and setup.uses is not None:
        _check_uses(table, setup)
    if schedule is not None and schedule.at is not None:
        _check_start(table, schedule.at, limits.deadline)
    return Task(
        name=table.get(NAME, ""),
        project=table.get(PROJECT, "default"),
        run=table.get(RUN, ""),
        setup=setup.run if setup else None,
        setup_uses=setup.uses if setup else None,
        tags=table.get(TAGS, {}),
        priority=table.get(PRIORITY, 0),
        resources=table.get(RESOURCES_FIELD, Resources()),
        nodes=table.get(NODES, 1),
        **check_image(table, IMAGE, WORKDIR),
        workdir=table.get(WORKDIR),
        env=env,
        secrets=secrets,
        inputs=tuple(each for each in table.get(INPUTS, ()) if each),
        outputs=tuple(each for each in table.get(OUTPUTS, ()) if each),
        volumes=check_volumes(table, VOLUMES_FIELD),
        checkpoint=table.get(CHECKPOINT_FIELD),
        limits=limits,
        retry=table.get(RETRY_FIELD, Retry()),
        schedule=schedule,
        window=table.get(WINDOW_FIELD),
        work=table.get(WORK_FIELD),
        webhooks=tuple(each for each in table.get(WEBHOOKS_FIELD, ()) if each),
        grace=table.get(GRACE, timedelta(seconds=10)),
        keep=_check_keep(table, limits),
    )


def _check_keep(table: SectionReader, limits: Limits) -> timedelta:
    keep = table.get(KEEP, timedelta(0))
    if keep and table.has(VOLUMES_FIELD):
        hint = "delete `keep`, or bring the data as `inputs`"
        table.wrong(KEEP, "nodes with `volumes` are given back at once", suggestion=hint)
    if keep and limits.duration is not None:
        message = "with `limits.duration`, a place may give the nodes for no longer than that"
        table.wrong(KEEP, message, suggestion="delete `keep` or `limits.duration`")
    return keep


def _check_uses(table: SectionReader, setup: SetupField) -> None:
    """Raise nothing; note where `uses` would mean nothing."""
    if setup.uses and not table.has(WORKDIR):
        hint = "add `workdir: .`, or delete `uses`"
        table.wrong(SETUP, "`setup.uses` names files, and there is no `workdir`", suggestion=hint)
    if table.has(IMAGE):
        message = (
            "`setup.uses` is not honoured with an `image`: in a container, every attempt "
            "sets up anew"
        )
        table.wrong(
            SETUP,
            message,
            suggestion="delete `uses`, or build an image that has what the setup makes",
        )


def _check_start(table: SectionReader, start: datetime, deadline: datetime | None) -> None:
    now = table.notes.now
    if now is not None and start <= now:
        hint = "leave `schedule` out to start as soon as there is a place"
        table.wrong(
            SCHEDULE_FIELD, f"the start was {format_duration(now - start)} ago", suggestion=hint
        )
    if deadline is not None and deadline <= start:
        table.wrong(
            SCHEDULE_FIELD, "the start is not before the deadline", suggestion="move one of them"
        )


def _both(secrets: tuple[str, ...], env: dict[str, str]) -> list[str]:
    return [name for name in secrets if name in env]


TASK = SectionSpec(
    path="",
    help="One task: what to run and what it needs.",
    fields=(
        NAME,
        PROJECT,
        TAGS,
        PRIORITY,
        PARAMS_FIELD,
        RESOURCES_FIELD,
        NODES,
        IMAGE,
        WORKDIR,
        SETUP,
        RUN,
        ENV,
        SECRETS,
        INPUTS,
        OUTPUTS,
        VOLUMES_FIELD,
        CHECKPOINT_FIELD,
        LIMITS_FIELD,
        RETRY_FIELD,
        SCHEDULE_FIELD,
        WINDOW_FIELD,
        WORK_FIELD,
        WEBHOOKS_FIELD,
        GRACE,
        KEEP,
    ),
    build=_build,
    hints=TOP_HINTS,
)
