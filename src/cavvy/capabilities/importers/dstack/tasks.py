"""Translates dstack's configurations into tasks. Keys that a task cannot represent are noted or
refused.
"""

import posixpath
import re
import shlex
from datetime import timedelta

from cavvy.capabilities.importers.common_fields import (
    move_to_secret,
    read_commit,
    read_name,
    read_tags,
    tell_value,
)
from cavvy.capabilities.importers.dstack import TABLES
from cavvy.capabilities.importers.dstack.resources import read_resources
from cavvy.capabilities.importers.dstack.rules import is_set, split_pair
from cavvy.capabilities.importers.dstack.scalars import read_duration
from cavvy.capabilities.importers.dstack.serving import read_replicas, read_service
from cavvy.capabilities.importers.readers import (
    as_text,
    child,
    entries,
    flag_at,
    int_at,
    items,
    text_at,
)
from cavvy.capabilities.importers.translation_header import (
    HOLD_COMMANDS,
    WAITS,
    enter_folder,
    run_commands,
    use_python,
    write_secrets,
)
from cavvy.domain.services import ReplicaRole, RouterApi
from cavvy.domain.tasks import (
    JobLimits,
    JobSchedule,
    ReplicaGroup,
    ResourceSpec,
    RetryPolicy,
    TaskSpec,
    Volume,
    VolumeKind,
    Workdir,
)
from cavvy.spec.engine_section import OWN_COMMAND
from cavvy.spec.fields.kinds import WrongValue
from cavvy.spec.fields.places import check_path, read_place
from cavvy.spec.fields.service import object_to_groups
from cavvy.spec.kept_keys import TranslationNotes, mark_of
from cavvy.spec.problems import ProblemNotes, SourceMark, listed, nearest, shown
from cavvy.spec.translation import WAIT, Translation
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode, to_value

KIND = "dstack"
TYPES = ("task", "service", "dev-environment", "fleet", "volume", "gateway", "preset")
_VOLUME_BACKENDS = ("aws", "gcp", "runpod", "kubernetes", "daytona", "lium")
_WHY_NOT = {
    "fleet": "`cavvy pool apply FILE` makes a pool of this fleet, in which `cavvy run --pool NAME` "
    "runs jobs; without a pool, Cavvy finds nodes for each job and releases them afterwards",
    "volume": "nothing to create: write `volumes` into the file of the job; the first job creates "
    "a volume that has a `size`, and a volume that exists is found by its name",
    "gateway": "nothing to create: the server has one gateway for all services, which `cavvy "
    "serve FILE` starts; its domain and certificates are settings (docs/guides/serve.md)",
    "preset": "Cavvy cannot search for the best settings of a model's service yet; `cavvy "
    "estimate` compares accelerators",
}
_LATER = {
    "groups": "nodes of several kinds in one job are not supported yet",
    "user": "the user inside the container cannot be chosen yet",
    "dstack": "there is no dstack server that Cavvy could connect to",
    "backend_options": "Cavvy has no equivalent of these options",
}
_NOTED = {
    "ports": "ports are not forwarded automatically; `cavvy forward NAME PORT` forwards one",
    "nvcc": "the node or the image must provide nvcc",
    "ide": "`cavvy dev FILE --ide vscode` opens the editor; `cavvy ssh NAME` connects to the job",
    "version": "Cavvy uses the version of the editor that you have installed",
    "home_dir": "dstack no longer reads this key",
    "setup": "dstack no longer uses this key",
    "single_branch": "Cavvy submits a copy of the working folder, and clones no repository",
    "fleets": "the job may run on every configured provider; `--pool NAME` runs it in the pool "
    "that `cavvy pool apply` has made of a fleet's file",
    "idle_duration": "`--machine NAME --keep TIME` keeps the nodes after the job has ended",
}
_ORDER = (
    "the commands of node 0 run through `$CAVVY_MPI`, which connects the nodes; every node needs "
    "python3"
)
# As in dstack, `retry.duration` limits the wait for a node after each failure, not the restarts.
_FIRST_DELAY = timedelta(seconds=15)
_AGAIN = (
    "the job is restarted after each error, as in dstack; the delay grows from 15 s to an hour. "
    "`max_duration` or `--budget` ends the job"
)
_LOGIN = "DSTACK_REGISTRY_LOGIN"
_NO_ARGUMENTS = (
    "${{ run.args }} is replaced with nothing, as in dstack without arguments; write the arguments "
    "into the command"
)
# dstack's expressions in commands, and its escape of `$` (utils/interpolator.py)
_EXPRESSION = re.compile(r"\$\$|\$\{\{\s*(run\.args)\s*\}\}|\$\{\{.*?(?:\}\}|\Z)", re.DOTALL)
_JOB_CONTROL = re.compile(r"(?:^|[;&|])[ \t]*[fb]g\b", re.MULTILINE)
# dstack's shell is interactive, so `fg` waits for a program in the background
_INTERACTIVE = '[ -n "${BASH_VERSION:-}" ] && set -m || fg() { wait $!; }\n'
_MODE = re.compile(r"--disaggregation-mode[ =]+(prefill|decode)\b")
_BOOTSTRAP = re.compile(r"--disaggregation-bootstrap-port[ =]+([0-9]{1,5})\b")
_BOOTSTRAP_PORT = 8998  # SGLang's default
_DEFAULT_GRACE_S = 300
_MOST_GRACE_S = 3600


def translate(root: Node, notes: ProblemNotes) -> Translation:
    """Translate a configuration. All mistakes are added to `notes`; if there are any, the result
    must not be used.
    """
    kind = text_at(root, "type") or ""
    if kind == "volume":
        backend, name = child(root, "backend"), text_at(root, "backend") or ""
        if name in _VOLUME_BACKENDS:
            TABLES[f"volume_{name}"].check(root, "", notes)
        else:
            message = "`backend` is missing, or names a backend that does not support volumes"
            notes.add((backend or root).mark, message, expected=listed(_VOLUME_BACKENDS))
    elif kind in TYPES:
        TABLES[kind].check(root, "", notes)
    else:
        close = nearest(kind, TYPES)
        hint = f"did you mean `{close}`?" if close else ""
        notes.add(
            mark_of(root, "type"),
            f"dstack has no configuration type {shown(kind)}",
            expected=listed(TYPES),
            suggestion=hint,
        )
    if len(notes):
        return Translation(kind=KIND, what=kind)
    kept_keys = TranslationNotes()
    if kind in _WHY_NOT:
        kept_keys.refuse_at(root, "type", _explain_hosts(root) or _WHY_NOT[kind])
    if kind not in ("task", "service", "dev-environment"):
        return Translation(kind=KIND, what=kind, kept=kept_keys.list_kept())
    task = _translate_run(root, kept_keys)
    return Translation(
        kind=KIND,
        what=kind,
        tasks=(task,),
        kept=kept_keys.list_kept(),
        before=write_secrets(kept_keys.list_placed())
        + _read_before(root)
        + (HOLD_COMMANDS if _follows(root) else ""),
        after=_read_after(root),
        local=kept_keys.list_local(),
    )


def _explain_hosts(root: Node) -> str:
    """Return the setting that has the same meaning as a fleet of SSH hosts, or "" for other
    files.
    """
    config = child(root, "ssh_config")
    logins = []
    for each in items(child(config, "hosts")):
        name = as_text(each) if isinstance(each, ScalarNode) else text_at(each, "hostname") or ""
        user = text_at(each, "user") or text_at(config, "user")
        logins.append(f"{user}@{name}" if user and "@" not in name else name)
    if not logins:
        return ""
    hosts = ", ".join(logins)
    return (
        f'nothing to create: SSH hosts are a setting; write `hosts = "{hosts}"` under '
        "`[providers.ssh]` into Cavvy's settings (docs/guides/ssh-hosts.md), and run `cavvy check "
        "ssh`"
    )


def _translate_run(root: Node, kept_keys: TranslationNotes) -> TaskSpec:
    serves = text_at(root, "type") == "service"
    keys = (
        key
        for key, _ in entries(root)
        if (key.text in _NOTED or is_set(root, key.text)) and not (serves and key.text == "groups")
    )
    kept_keys.keep_listed(keys, _LATER, _NOTED)
    groups = _read_groups(root, kept_keys) if serves else ()
    _keep_order(root, kept_keys)
    workdir = _read_workdir(root, kept_keys)
    login = _read_login(root, kept_keys)
    env, secrets = _read_env(child(root, "env"), kept_keys)
    files = _read_files(root, workdir, kept_keys)
    placed = (*secrets, *kept_keys.list_placed().values())
    return TaskSpec(
        name=read_name(root, kept_keys) or "",
        run=_read_run(root, kept_keys),
        session=text_at(root, "type") == "dev-environment",
        tags=read_tags(root, "tags"),
        priority=int_at(root, "priority") or 0,
        resources=read_resources(root, kept_keys),
        nodes=int_at(root, "nodes") or 1,
        image=text_at(root, "image"),
        image_login=login,
        workdir=workdir,
        env=env,
        secrets=tuple(dict.fromkeys(placed)),
        volumes=(*_read_volumes(root, kept_keys), *files),
        limits=_read_limits(root, kept_keys),
        schedule=_read_schedule(root, kept_keys),
        retry=_read_retry(root, kept_keys),
        grace=_read_grace(root, kept_keys),
        service=read_service(root, kept_keys, groups) if serves else None,
        replica_groups=groups,
    )


# Groups of replicas


def _read_groups(root: Node, kept_keys: TranslationNotes) -> tuple[ReplicaGroup, ...]:
    """Return the groups of replicas, which `replicas` or `groups` lists."""
    key = "groups" if child(root, "groups") is not None else "replicas"
    node = child(root, key)
    if not isinstance(node, ListNode):
        return ()
    found = [
        _read_group(root, each, f"{key}.", number, kept_keys)
        for number, each in enumerate(node.items)
        if isinstance(each, MapNode)
    ]
    if (router := child(root, "router")) is not None:
        found.append(_make_router(router, text_at(root, "image")))
    for problem, _ in object_to_groups(found):
        kept_keys.refuse_at(root, key, problem)
    return tuple(found)


def _read_group(
    root: Node, group: MapNode, under: str, number: int, kept_keys: TranslationNotes
) -> ReplicaGroup:
    kept_keys.keep_listed((key for key, _ in group.entries), _LATER, _NOTED, under)
    own = {key.text for key, _ in group.entries}
    above = tuple(pair for pair in entries(root) if pair[0].text not in own | {"replicas"})
    whole = MapNode(mark=group.mark, entries=(*above, *group.entries))
    router = text_at(child(group, "router"), "type")
    run = _read_run(whole, kept_keys)
    name = text_at(group, "name") or str(number)
    mode = _MODE.search(run)
    role = ReplicaRole.WORKER
    if router is not None:
        role = ReplicaRole.ROUTER
    elif mode is not None:
        role = ReplicaRole(mode[1])
    elif name in tuple(ReplicaRole):
        role = ReplicaRole(name)
    python, bootstrap = text_at(group, "python"), _BOOTSTRAP.search(run)
    first = use_python("3.10" if python == "3.1" else python) if python else ""
    fixed = int(bootstrap[1]) if bootstrap else _BOOTSTRAP_PORT
    return ReplicaGroup(
        name=name,
        role=role,
        replicas=read_replicas(group, kept_keys),
        router=RouterApi.NONE if router == "dynamo" else RouterApi.SGLANG,
        run=first + run,
        resources=read_resources(whole, kept_keys),
        image=text_at(group, "image"),
        bootstrap_port=fixed if role is ReplicaRole.PREFILL else None,
    )


def _make_router(node: Node, image: str | None) -> ReplicaGroup:
    """Return the router that older versions of dstack run in the gateway."""
    parts = " --pd-disaggregation" if text_at(node, "pd_disaggregation") == "True" else ""
    policy = text_at(node, "policy")
    parts += f" --policy {shlex.quote(policy)}" if policy else ""
    return ReplicaGroup(
        name="router",
        role=ReplicaRole.ROUTER,
        run=f'exec python3 -m sglang_router.launch_router --host 0.0.0.0 --port "$PORT"{parts}',
        setup=None if image else "python3 -m pip install -q sglang-router",
        resources=ResourceSpec(cpus_min=2, memory_min_mib=4096),
    )


# Commands of a task


def _read_run(root: Node, kept_keys: TranslationNotes) -> str:
    commands = _fill_in_commands(root, kept_keys)
    entrypoint = text_at(root, "entrypoint")
    shell = text_at(root, "shell")
    if shell not in (None, "sh", "bash", "/bin/sh", "/bin/bash"):
        kept_keys.refuse_at(
            root,
            "shell",
            "commands run in bash, or in sh if bash is missing",
        )
    if entrypoint is not None:
        try:
            return shlex.join([*shlex.split(entrypoint), *commands])
        except ValueError:
            kept_keys.refuse_at(root, "entrypoint", "the quotes in the command do not match")
            return ""
    if text_at(root, "type") == "dev-environment":
        kept_keys.note_at(root, "type", WAITS)
        init = [
            as_text(each) for each in items(child(root, "init")) if isinstance(each, ScalarNode)
        ]
        return "\n".join([*init, WAIT])
    if not any(command.strip() for command in commands):
        # Without an image, dstack's rules require commands, except in groups.
        return f"exec {OWN_COMMAND}" if child(root, "image") is not None else ""
    return join_commands(commands)


def _fill_in_commands(root: Node, kept_keys: TranslationNotes) -> list[str]:
    """Return the commands as dstack sends them to a node: without command-line arguments, which
    Cavvy does not have, and with `$$` as an escaped `$`. An expression that only dstack could
    evaluate is refused.
    """
    found: list[str] = []
    for each in items(child(root, "commands")):
        if not isinstance(each, ScalarNode):
            continue
        for match in _EXPRESSION.finditer(as_text(each)):
            if match[1]:
                kept_keys.note(each.mark, "commands", _NO_ARGUMENTS)
            elif match[0] != "$$":
                reason = f"{match[0]} cannot be evaluated; use an environment variable"
                kept_keys.refuse(each.mark, "commands", reason)
        found.append(_EXPRESSION.sub(_fill_in, as_text(each)))
    return found


def _fill_in(match: re.Match[str]) -> str:
    return "$" if match[0] == "$$" else "" if match[1] else match[0]


def join_commands(commands: list[str]) -> str:
    """Join commands into one script. Each command runs only if the previous command succeeded."""
    found = []
    for command in commands:
        text = command.strip()
        if "\n" in text:
            text = "{\n" + text + "\n}"
        elif text.endswith("&"):
            text = "{ " + text + " }"
        found.append(text)
    return " &&\n".join(found)


def _read_before(root: Node) -> str:
    """Return commands that run before the author's commands. The returned commands set the
    variables whose values are secrets, change the current folder, and activate the requested Python
    version.
    """
    folder = text_at(root, "working_dir") or _repo_path(root) or _find_inner_folder(root)
    python = text_at(root, "python")
    pairs = ((name, _read_secret(value)) for name, value, _ in _list_variables(child(root, "env")))
    lines = "".join(
        f'export {name}="${secret}"\n' for name, secret in pairs if secret not in (None, name)
    )
    if folder and folder not in (".", "./"):
        lines += enter_folder(folder) + 'DSTACK_WORKING_DIR="$PWD"\n'
    if any(
        _JOB_CONTROL.search(as_text(each))
        for each in items(child(root, "commands"))
        if isinstance(each, ScalarNode)
    ):
        lines += _INTERACTIVE
    return lines + (use_python("3.10" if python == "3.1" else python) if python else "")


# Environment variables and secrets


def _read_env(
    node: Node | None, kept_keys: TranslationNotes
) -> tuple[dict[str, str], tuple[str, ...]]:
    env: dict[str, str] = {}
    secrets: dict[str, None] = {}
    for name, value, mark in _list_variables(node):
        secret = name if value is None else _read_secret(value)
        if secret is not None:
            kept_keys.note(mark, f"env.{name}", tell_value(secret, is_variable=value is None))
            secrets[secret] = None
            continue
        assert value is not None  # A variable without a value becomes a secret.
        if "${{" in value:
            reason = (
                f"{value.strip()} cannot be inserted; `secrets` in a Cavvy file become variables "
                "with the secrets' names"
            )
            kept_keys.refuse(mark, f"env.{name}", reason)
        env[name] = value
    return env, tuple(secrets)


def _read_secret(value: str | None) -> str | None:
    """Return the name of the secret if a variable's value consists of a single secret; otherwise
    None.
    """
    match = re.fullmatch(r"\s*\$\{\{\s*secrets\.([A-Za-z_]\w*)\s*\}\}\s*", value or "", re.ASCII)
    return match[1] if match else None


def _list_variables(node: Node | None) -> list[tuple[str, str | None, SourceMark]]:
    found: list[tuple[str, str | None, SourceMark]] = []
    for each in items(node):
        name, equals, value = (
            as_text(each).partition("=") if isinstance(each, ScalarNode) else ("", "", "")
        )
        found.append((name, value if equals else None, each.mark))
    for key, each in node.entries if isinstance(node, MapNode) else ():
        found.append((key.text, as_text(each) if isinstance(each, ScalarNode) else None, key.mark))
    return found


# Files and volumes


def _read_files(
    root: Node, workdir: Workdir | None, kept_keys: TranslationNotes
) -> tuple[Volume, ...]:
    """Return volumes that mount local files and folders at their paths on the node."""
    found: list[Volume] = []
    if path := _repo_path(root):
        found.append(Volume(kind=VolumeKind.FOLDER, source=".", path=path.rstrip("/")))
    for each in items(child(root, "files")):
        source, path = _read_file(each)
        path = _place(root, path)
        try:
            end = read_place(path.strip())
            if move_to_secret(source, end, "files", each.mark, kept_keys):
                continue
            if workdir is not None and workdir.path is None:
                raise WrongValue(
                    "the file cannot be added to a git repository; clone the repository in "
                    "`commands`, and delete `repos`"
                )
            shown = kept_keys.submit_local(source, workdir, end)
            found += [shown] if shown else []
        except WrongValue as error:
            kept_keys.refuse(each.mark, "files", f"{source} cannot be placed at {path}: {error}")
    return tuple(found)


def _read_file(node: Node) -> tuple[str, str]:
    """Return the local path of an entry of `files`, and its path on the node."""
    if isinstance(node, ScalarNode):
        source, *rest = split_pair(as_text(node))
        return source, rest[0] if rest else source
    return text_at(node, "local_path") or "", text_at(node, "path") or ""


def _find_inner_folder(root: Node) -> str:
    """Return the folder inside the working folder in which the commands start, or "" for the
    working folder itself. dstack puts a file `../a.txt` beside the working folder, but a job can
    have files only inside of it. Therefore, if there is no repository, the commands start deeper.
    """
    if text_at(root, "working_dir") is not None or items(child(root, "repos")):
        return ""
    paths = (posixpath.normpath(_read_file(each)[1]) for each in items(child(root, "files")))
    depth = max((path.split("/").count("..") for path in paths), default=0)
    return "/".join(["work"] * depth)


def _read_login(root: Node, kept_keys: TranslationNotes) -> str | None:
    """Return the name of the secret with the login for the image registry, or None if no login is
    needed.
    """
    if child(root, "registry_auth") is None:
        return None
    reason = f"set the login with `cavvy secret set {_LOGIN}`, in the form USER:PASSWORD"
    kept_keys.note_at(root, "registry_auth", reason)
    return _LOGIN


def _read_volumes(root: Node, kept_keys: TranslationNotes) -> tuple[Volume, ...]:
    found: list[Volume] = []
    for each in items(child(root, "volumes")):
        if isinstance(each, ScalarNode):
            source, _, path = as_text(each).partition(":")
        else:
            source, path = (
                text_at(each, "name") or text_at(each, "instance_path") or "",
                text_at(each, "path") or "",
            )
        kind = VolumeKind.HOST if source.startswith("/") else VolumeKind.NAMED
        if flag_at(each, "optional"):
            kept_keys.note(
                each.mark,
                "volumes",
                "the volume is optional and is not attached, because the nodes may not have this "
                "volume",
            )
            continue
        try:
            if not source or "${{" in source:
                raise WrongValue(
                    f"all nodes must use the same volume name, not {source or 'a list'}"
                )
            found.append(Volume(kind=kind, source=source, path=check_path(path)))
        except WrongValue as error:
            kept_keys.refuse(each.mark, "volumes", f"the volume cannot be attached: {error}")
    return tuple(found)


def _repo_path(root: Node) -> str:
    """Return the path on the node at which a configuration expects its repository, or "" if this is
    the working folder of the job.
    """
    repo = next(iter(items(child(root, "repos"))), None)
    if repo is None:
        return ""
    if isinstance(repo, ScalarNode):
        path = "".join(split_pair(as_text(repo))[1:])
    else:
        path = text_at(repo, "path") or ""
    placed = _place(root, path or ".")
    return placed if placed.startswith(("/", "~/")) else ""


def _place(root: Node, path: str) -> str:
    """Return the path of a repository or file on the node. As in dstack, relative paths start at
    the configuration's `working_dir`.
    """
    inner = _find_inner_folder(root)
    folder = text_at(root, "working_dir") or inner
    is_whole = path.startswith(("/", "~")) or not (inner or folder.startswith(("/", "~/")))
    return path if is_whole else posixpath.normpath(posixpath.join(folder, path))


def _read_workdir(root: Node, kept_keys: TranslationNotes) -> Workdir | None:
    repos = items(child(root, "repos"))
    if not repos:
        return None
    repo, mark = repos[0], repos[0].mark
    if isinstance(repo, ScalarNode):
        source, *rest = split_pair(as_text(repo))
        url = "://" in source or "@" in source.partition("/")[0]
        path, commit, branch = (rest[0] if rest else "."), None, None
    else:
        url = child(repo, "url") is not None
        source = text_at(repo, "url") or text_at(repo, "local_path") or "."
        path, commit = text_at(repo, "path") or ".", text_at(repo, "hash")
        branch = text_at(repo, "branch")
    if path.rstrip("/") not in (".", "") and not _repo_path(root):
        kept_keys.refuse(
            mark, "repos", f"the repository is the working folder, which cannot be placed at {path}"
        )
    if not url:
        return Workdir(path=source)
    return read_commit(source, commit or branch, "repos", mark, "write `hash`", kept_keys)


# Limits, schedule and retries


def _keep_order(root: Node, kept_keys: TranslationNotes) -> None:
    if text_at(root, "creation_policy") == "reuse":
        reason = "Cavvy finds a node for each job"
        kept_keys.refuse_at(root, "creation_policy", reason)
    for key in ("startup_order", "stop_criteria"):
        if child(root, key) is not None and _follows(root):
            kept_keys.note_at(root, key, _ORDER)


def _follows(root: Node) -> bool:
    """Return whether the nodes are connected to the master (rank 0): the master starts last, or the
    job ends with the master. If `startup_order` is `master-first`, nothing has to wait, because the
    nodes start at the same time.
    """
    order, end = text_at(root, "startup_order"), text_at(root, "stop_criteria")
    several = (int_at(root, "nodes") or 1) > 1
    return several and (order == "workers-first" or end == "master-done")


def _read_after(root: Node) -> str:
    """Return the commands that run the author's commands if the nodes are connected to the
    master.
    """
    if not _follows(root):
        return ""
    return run_commands(ends_with_master=text_at(root, "stop_criteria") == "master-done")


def _read_length(root: Node, key: str) -> timedelta | None:
    node = child(root, key)
    if not isinstance(node, ScalarNode) or isinstance(node.value, bool) or node.value == "off":
        return None
    seconds = read_duration(node)
    return timedelta(seconds=seconds) if seconds else None


def _read_limits(root: Node, kept_keys: TranslationNotes) -> JobLimits:
    """Return the limits of the job. To detect an idle job, dstack checks the use of each GPU and
    whether users are logged in. To detect an idle job, Cavvy checks the mean use of a node's GPUs,
    or the job's output and CPU use.
    """
    policy, duration = child(root, "utilization_policy"), _read_length(root, "max_duration")
    window, least = child(policy, "time_window"), child(policy, "min_gpu_utilization")
    if isinstance(window, ScalarNode) and isinstance(least, ScalarNode):
        idle = timedelta(seconds=read_duration(window) or 0) or None
        reason = "the job is stopped if the mean use of a node's GPUs stays below the limit"
        kept_keys.note_at(root, "utilization_policy", reason)
        percent = min(float(least.text), 99.0)
        return JobLimits(
            duration=duration, idle=idle if percent else None, idle_gpu_percent=percent
        )
    return JobLimits(duration=duration, idle=_read_idle(root, kept_keys))


def _read_idle(root: Node, kept_keys: TranslationNotes) -> timedelta | None:
    """Return the time for which the job may be idle."""
    idle = _read_length(root, "inactivity_duration")
    if idle is not None:
        reason = (
            "the job is stopped after this time without output or CPU use, even if a user is "
            "logged in"
        )
        kept_keys.note_at(root, "inactivity_duration", reason)
    return idle


def _read_schedule(root: Node, kept_keys: TranslationNotes) -> JobSchedule | None:
    """Return the schedule of the job, in UTC."""
    cron = child(child(root, "schedule"), "cron")
    lines = [as_text(each) for each in (*items(cron), cron) if isinstance(each, ScalarNode)]
    if len(lines) > 1:
        kept_keys.refuse_at(
            root,
            "schedule",
            "a job can have only one cron line; write a separate file for each line",
        )
    return JobSchedule(cron=lines[0]) if lines else None


def _read_grace(root: Node, kept_keys: TranslationNotes) -> timedelta:
    node, mark = child(root, "stop_duration"), mark_of(root, "stop_duration")
    length = _read_length(root, "stop_duration")
    if node is not None and to_value(node) in (False, "off"):
        length = timedelta(seconds=_MOST_GRACE_S + 1)
    if length is None:
        return timedelta(seconds=_DEFAULT_GRACE_S)
    if length > timedelta(seconds=_MOST_GRACE_S):
        kept_keys.note(
            mark, "stop_duration", "the time between SIGTERM and SIGKILL is at most an hour"
        )
    return min(length, timedelta(seconds=_MOST_GRACE_S))


def _read_retry(root: Node, kept_keys: TranslationNotes) -> RetryPolicy:
    node = child(root, "retry")
    never = RetryPolicy(preemption=0, node=0, exit=0)
    if node is None or (isinstance(node, ScalarNode) and not _is_true(node)):
        return never
    events = [each.text for each in items(child(node, "on_events")) if isinstance(each, ScalarNode)]
    events = events or ["no-capacity", "interruption", "error"]
    fails = "error" in events
    if fails and text_at(root, "type") != "service":
        kept_keys.note_at(root, "retry", _AGAIN)
    if child(node, "duration") is not None:
        kept_keys.note_at(
            node,
            "retry.duration",
            "a job waits for capacity as long as its limits allow",
        )
    again = None if "interruption" in events else 0
    return RetryPolicy(
        preemption=again,
        node=again,
        exit=None if fails else 0,
        delay=_FIRST_DELAY if fails else timedelta(0),
    )


def _is_true(node: ScalarNode) -> bool:
    return node.value in (True, 1) or str(node.value).lower() in (
        "true",
        "t",
        "yes",
        "y",
        "on",
        "1",
    )
