"""Detects the tool of a file from its keys.

To save time, only the upper levels of the file are examined: every task file passes through this
check.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from cavvy.capabilities.importers.dialects import Dialect
from cavvy.spec.problems import ProblemNotes, SourceMark
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode, compose_all
from cavvy.task_files.foreign import TaskSource

_NAMED = re.compile(r"(?:.*\.)?(sky|skypilot|dstack)\.ya?ml")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys that only Cavvy's files have.
_OURS = _words(
    "nodes env edge params image limits retry checkpoint tags project work webhooks grace schedule "
    "window priority keep machine session encrypt array sweep parallel after group "
    "notify on_loss topology best stop_early batch search trials"
)
_OUR_NEEDS = _words(
    "gpu accelerator cpu disk spot instance providers regions network max_price check options"
)
# Keys of `service`, which Cavvy's and SkyPilot's files have, that only Cavvy's files have.
_OUR_SERVICE = _words(
    "engine model options port concurrency probe drain timeouts models hosts keys rate "
    "limits slo regions residency budget origins price_header update queue events batch "
    "routing strip_prefix groups fallback adapters edge"
)
# Keys that only SkyPilot's files have.
_SKYPILOT = _words(
    "num_nodes envs file_mounts service pool volume_mounts managed_secrets event_callback config "
    "execution "
    "file_mounts_mapping api_server_access"
)
_SKYPILOT_NEEDS = _words(
    "accelerators gpus infra cloud region zone cpus instance_type use_spot job_recovery "
    "spot_recovery disk_size "
    "disk_tier network_tier local_disk ephemeral_storage max_hourly_cost ports labels "
    "accelerator_args image_id "
    "autostop priority_class volumes priority"
)
_SKYPILOT_VOLUMES = ("k8s-pvc", "k8s-hostpath", "runpod-network-volume")
_OF_ACCELERATE = _words("distributed_type compute_environment num_processes mixed_precision")
_DSTACK = ("task", "service", "dev-environment", "fleet", "volume", "gateway", "preset")
_DSTACK_KEYS = _words(
    "commands python ports backends spot_policy max_duration ide replicas port model ssh_config "
    "nvcc repos files"
)


def find_dialect(documents: Sequence[Node]) -> Dialect:
    """Return the tool for which the documents of a file were written. The default is Cavvy. A file
    with several documents is for SkyPilot, unless each document is an object of Kubernetes.
    """
    if documents and all(map(_is_object, documents)):
        return Dialect.KUBERNETES
    if len(documents) == 1:
        return _find_one(documents[0])
    if any(_find_one(each) is Dialect.DSTACK for each in documents):
        return Dialect.DSTACK  # which says that its files have one document
    several = any(_find_one(each) is Dialect.SKYPILOT for each in documents) or (
        bool(documents) and all(_is_neutral(each) for each in documents)
    )
    return Dialect.SKYPILOT if several else Dialect.CAVVY


def _is_object(node: Node) -> bool:
    keys = {key.text for key, _ in node.entries} if isinstance(node, MapNode) else set[str]()
    return keys >= {"apiVersion", "kind"}


def names_no_tool(documents: Sequence[Node]) -> bool:
    """Return True if the documents contain no key that only one tool uses."""
    return (
        bool(documents)
        and find_dialect(documents) is Dialect.CAVVY
        and all(_is_neutral(each) for each in documents)
    )


def name_reason(documents: Sequence[Node], dialect: Dialect) -> str:
    """Return the key for which a file was taken for a file of SkyPilot or dstack, with its parent
    keys, or "" if it was not one single key.
    """
    if len(documents) != 1 or not isinstance(root := documents[0], MapNode):
        return ""
    if dialect is Dialect.DSTACK:
        return "type"
    if dialect is not Dialect.SKYPILOT:
        return ""
    if named := next((key.text for key, _ in root.entries if key.text in _SKYPILOT), ""):
        return named
    needs = root.get("resources")
    inner = _list_keys(needs) if isinstance(needs, MapNode) else set()
    return next((f"resources.{key}" for key in sorted(inner & _SKYPILOT_NEEDS)), "")


def find_by_path(path: Path) -> Dialect | None:
    """Return the tool that a file's name or folder suggests. For example, the name train.sky.yaml,
    a repository called skypilot, and a folder with a `.skyignore` suggest SkyPilot. Returns None if
    neither the name nor the folder suggests a tool.
    """
    named = _NAMED.fullmatch(path.name.lower())
    if named:
        return Dialect.DSTACK if named[1] == "dstack" else Dialect.SKYPILOT
    for folder in path.resolve().parents:
        if folder.name.lower() == "skypilot" or (folder / ".skyignore").exists():
            return Dialect.SKYPILOT
        if (folder / ".git").exists():
            break
    return None


def _is_neutral(node: Node) -> bool:
    """Return whether a document is a table whose keys are not specific to Cavvy."""
    if not isinstance(node, MapNode):
        return False
    needs = node.get("resources")
    inner = _list_keys(needs) if isinstance(needs, MapNode) else set()
    return not (
        {key.text for key, _ in node.entries} & _OURS
        or inner & _OUR_NEEDS
        or _is_our_service(node.get("service"))
        or _names_pool(node)
    )


def _names_pool(node: MapNode) -> bool:
    """Return whether `pool` is a name, as in Cavvy's files. In SkyPilot's files, it is a table."""
    pool = node.get("pool")
    return isinstance(pool, ScalarNode) and pool.value is not None


def _is_our_service(node: Node | None) -> bool:
    return isinstance(node, MapNode) and bool(_list_keys(node) & _OUR_SERVICE)


def _find_one(node: Node) -> Dialect:
    if not isinstance(node, MapNode):
        return Dialect.CAVVY
    keys = {key.text for key, _ in node.entries}
    kind = node.get("type")
    if isinstance(kind, ScalarNode) and "run" not in keys:
        if kind.text in _SKYPILOT_VOLUMES:
            return Dialect.SKYPILOT
        if kind.text in _DSTACK or keys & _DSTACK_KEYS:
            return Dialect.DSTACK
    needs = node.get("resources")
    inner = _list_keys(needs) if isinstance(needs, MapNode) else set()
    own = keys & _OURS or inner & _OUR_NEEDS or _is_our_service(node.get("service"))
    if own or _names_pool(node):
        return Dialect.CAVVY
    theirs = keys & _SKYPILOT or inner & _SKYPILOT_NEEDS or _has_their_tables(node)
    return Dialect.SKYPILOT if theirs or _mentions(node) else Dialect.CAVVY


def _has_their_tables(node: MapNode) -> bool:
    """Return whether a key that Cavvy and SkyPilot share is written in a form that only SkyPilot
    allows.

    For example, `inputs` is a list for Cavvy and a table for SkyPilot. For Cavvy, `volumes` is a
    list or a single volume with fixed keys; for SkyPilot, it is a table whose keys are paths.
    """
    # SkyPilot's `outputs` is read together with `inputs`: alone, it is a mistake in a Cavvy file
    if any(isinstance(node.get(key), MapNode) for key in ("secrets", "inputs")):
        return True
    secrets, workdir, volumes = node.get("secrets"), node.get("workdir"), node.get("volumes")
    named = secrets.items if isinstance(secrets, ListNode) else ()
    if any(isinstance(each, ScalarNode) and each.text.startswith("secrets:") for each in named):
        return True
    if isinstance(workdir, MapNode) and workdir.get("url") is not None:
        return True  # Cavvy's key for the URL is `git`.
    mounts = volumes.entries if isinstance(volumes, MapNode) else ()
    return any(key.text.startswith(("/", "~")) for key, _ in mounts)


def _list_keys(needs: MapNode) -> set[str]:
    """Return the keys in `resources` and in its alternatives. Task files of both Cavvy and SkyPilot
    have the key `resources`.
    """
    lists = [
        each for each in (needs.get("any_of"), needs.get("ordered")) if isinstance(each, ListNode)
    ]
    tables = [needs, *(item for each in lists for item in each.items if isinstance(item, MapNode))]
    return {key.text for table in tables for key, _ in table.entries}


def _mentions(node: MapNode) -> bool:
    """Return whether the commands of a document use SkyPilot's variables or SkyPilot's working
    folder.
    """
    texts = [
        each.text for each in (node.get("run"), node.get("setup")) if isinstance(each, ScalarNode)
    ]
    return any("$SKYPILOT_" in text.replace("{", "") or "~/sky_workdir" in text for text in texts)


def refuse_devcontainer(source: TaskSource) -> None:
    """Raises SpecError if the file describes a development container, which is no task."""
    if Path(source.notes.file).name in ("devcontainer.json", ".devcontainer.json"):
        notes = source.make_notes()
        message = "the file describes a development container, which has no command to run"
        hint = "`cavvy dev`, in the folder of the project, starts a session by it"
        first = SourceMark(line=1, column=1)
        notes.add(first, message, expected="a task file", suggestion=hint)
        notes.check()


def refuse_compose(source: TaskSource) -> None:
    """Raises SpecError if the text is a file of Docker Compose."""
    if any(isinstance(each, MapNode) and _is_compose(each) for each in source.documents):
        notes = source.make_notes()
        hint = "`cavvy convert FILE` writes it as a Cavvy file, on the machine that has the file"
        message = "the file is for Docker Compose, which is read only with the files beside it"
        first = SourceMark(line=1, column=1)
        notes.add(first, message, expected="a task file", suggestion=hint)
        notes.check()


def refuse_accelerate(source: TaskSource) -> None:
    """Raises SpecError if the text is a file of `accelerate config`, which names no script."""
    for each in source.documents:
        keys = {key.text for key, _ in each.entries} if isinstance(each, MapNode) else set[str]()
        if len(keys & _OF_ACCELERATE) > 1 and not keys & {"run", "services"}:
            notes = source.make_notes()
            message = (
                "the file is of `accelerate config`: it says how to launch a script, not which"
            )
            hint = f"`cavvy run {source.notes.file} -- train.py --lr 0.1`"
            first = SourceMark(line=1, column=1)
            notes.add(first, message, expected="a task file", suggestion=hint)
            notes.check()


def find_batch_system(text: str, dialect: Dialect | None, name: str = "") -> Dialect | None:
    """Return the batch system for which a text is a script: Slurm if it has lines of #SBATCH, or
    else PBS if it has lines of #PBS, or as the ending of the file's name says. Returns None for
    other texts, and if `dialect` names another tool.
    """
    if dialect is not None:
        return dialect if dialect in (Dialect.SLURM, Dialect.PBS) else None
    if is_batch_name(name) and text.startswith("#!"):
        return Dialect.PBS if name.endswith(".pbs") else Dialect.SLURM
    # qsub takes a script without #!, which may begin with a comment or empty lines
    if not text.lstrip().startswith("#"):
        return None
    for word, found in (("SBATCH", Dialect.SLURM), ("PBS", Dialect.PBS)):
        if re.search(rf"^#{word}\s", text, re.MULTILINE) and (word == "PBS" or text[:2] == "#!"):
            return found
    return None


def is_batch_name(name: str) -> bool:
    """Return whether a file's name ends as those of scripts of a batch system do."""
    return name.endswith((".sbatch", ".slurm", ".pbs"))


def is_compose(text: str, dialect: str) -> bool:
    """Return whether a text is a file of Docker Compose, as `dialect` or its keys say."""
    if dialect:
        return dialect == Dialect.COMPOSE.lower()
    if not re.search(r"^services\s*:", text, re.MULTILINE):
        return False
    documents = compose_all(text.removeprefix("\ufeff"), ProblemNotes("", text))
    return any(isinstance(each, MapNode) and _is_compose(each) for each in documents)


def _is_compose(table: MapNode) -> bool:
    return isinstance(table.get("services"), MapNode) and table.get("run") is None
