"""Translates SkyPilot's task files, pipelines and job groups into tasks. Keys that a task cannot
represent are noted or refused.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import timedelta

from cavvy.capabilities.importers.common_fields import (
    is_variable_name,
    read_commit,
    read_name,
    tell_value,
)
from cavvy.capabilities.importers.readers import as_text, child, entries, int_at, items, text_at
from cavvy.capabilities.importers.shapes import is_null
from cavvy.capabilities.importers.skypilot.config import keep_config, read_options
from cavvy.capabilities.importers.skypilot.mounts import read_mounts
from cavvy.capabilities.importers.skypilot.needs import unalias
from cavvy.capabilities.importers.skypilot.resources import add_options, list_clouds, read_request
from cavvy.capabilities.importers.skypilot.rules import (
    GROUP_HEADER,
    LOGIN_VARIABLES,
    SERIAL_HEADER,
    TASK,
    VOLUME,
    is_safe_name,
)
from cavvy.capabilities.importers.skypilot.serving import read_service
from cavvy.capabilities.importers.translation_header import WAITS, write_secrets
from cavvy.domain.targets import is_web_address
from cavvy.domain.tasks import JobGroup, TaskSpec, WebhookTarget, Workdir
from cavvy.domain.values import Struct, replace
from cavvy.spec.fields.after import LONGEST_LINGER
from cavvy.spec.kept_keys import TranslationNotes, mark_of
from cavvy.spec.problems import ProblemNotes, SourceMark, slug
from cavvy.spec.translation import WAIT, Translation
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode, to_value

KIND = "SkyPilot"
_LATER = {
    "file_mounts_mapping": "the key only concerns SkyPilot itself",
}
_ADDRESS = re.compile(r"https?://[^\s'\"`|;&<>(){}\\]+")
_NOTED = {
    "pool": "`cavvy run` does what `sky launch` does: it ignores the number of workers and starts "
    "one worker; `cavvy pool apply` creates the pool",
    "inputs": "SkyPilot uses this key only to estimate the price of traffic",
    "outputs": "SkyPilot uses this key only to estimate the price of traffic",
    "api_server_access": "there is no SkyPilot server that Cavvy could connect to",
    "_metadata": "the key only concerns SkyPilot itself",
}


_MOST_DIGITS, _SHOWN = 12, 20  # digits of a delay, and characters of it that a message shows
_LONGEST_S = LONGEST_LINGER.total_seconds()
_OF_NETWORKS = ("placement", "inter_connection")
_UNITS = {
    "s": 1,
    "m": 60,
    "h": 3600,
    "d": 86_400,
    "w": 604_800,
}
_LOGIN = "SKYPILOT_DOCKER_LOGIN"
# the parts of the login that SkyPilot requires beside the password, and that are not confidential
_PUBLIC = tuple(name for name in LOGIN_VARIABLES if not name.endswith("PASSWORD"))
_FILLED = ("file_mounts", "service", "volumes", "workdir")
_VARIABLE = re.compile(r"\$\{?\b([a-zA-Z_][a-zA-Z0-9_]*)\b\}?")


class _ImageLogin(Struct, frozen=True, kw_only=True):
    """A container image, and the name of the secret with the login for its registry."""

    image: str | None
    secret: str | None = None


def translate(documents: Sequence[Node], notes: ProblemNotes) -> Translation:
    """Translate the documents of one file. All mistakes are added to `notes`; if there are any, the
    result must not be used.
    """
    tables = [_unalias(each, notes) for each in documents if not is_null(each)]
    if not tables:
        notes.add(
            SourceMark(line=1, column=1),
            "the file describes no task",
            expected="`run`, `setup` or `resources`",
        )
    if len(tables) == 1 and is_volume(tables[0]):
        return _translate_volume(tables[0], notes)
    header = tables[0] if len(tables) > 1 and is_header(tables[0]) else None
    bodies = [_fill_in(each) for each in (tables if header is None else tables[1:])]
    parallel = header is not None and text_at(header, "execution") == "parallel"
    _check_documents(header, bodies, parallel, notes)
    if len(notes):
        return Translation(kind=KIND, what="task")
    kept_keys = TranslationNotes()
    tasks = tuple(
        _translate_task(each, header, number, kept_keys) for number, each in enumerate(bodies)
    )
    if parallel and header is not None and len(tasks) > 1:
        tasks = _join(tasks, header, bodies)
    what = _what(bodies[0])
    if len(tasks) > 1:
        what = "job group" if parallel else "pipeline"
    return Translation(
        kind=KIND,
        what=what,
        tasks=tasks,
        kept=kept_keys.list_kept(),
        before=write_secrets(kept_keys.list_placed()),
        local=kept_keys.list_local(),
    )


def _join(tasks: Sequence[TaskSpec], header: Node, bodies: Sequence[Node]) -> tuple[TaskSpec, ...]:
    """Return the tasks of a job group as a group. Tasks that are not primary are its helpers."""
    name = slug(text_at(header, "name") or "") or "group"
    if any(task.name == name for task in tasks):
        name = f"{name[:57]}-group"
    primary = [
        each.text for each in items(child(header, "primary_tasks")) if isinstance(each, ScalarNode)
    ]
    joined = []
    for task, body in zip(tasks, bodies, strict=True):
        helper = bool(primary) and text_at(body, "name") not in primary
        linger = _read_delay(header, text_at(body, "name") or "") if helper else timedelta(0)
        group = JobGroup(name=name, helper=helper, linger=linger)
        joined.append(replace(task, group=group))
    return tuple(joined)


def _read_delay(header: Node, name: str) -> timedelta:
    """Return how long a task of a job group continues after the primary tasks."""
    delay = child(header, "termination_delay")
    own = delay if isinstance(delay, ScalarNode) else child(delay, name) or child(delay, "default")
    return timedelta(seconds=_read_seconds(own) if isinstance(own, ScalarNode) else 0)


def _read_seconds(node: ScalarNode) -> int:
    """Return the seconds of a delay such as 30s, or very many if it has too many digits."""
    text = str(node.value)  # a number may be written as 0x1F
    number, unit = (text[:-1], text[-1].lower()) if text[-1].isalpha() else (text, "s")
    return int(number.lstrip("0")[:_MOST_DIGITS] or 0) * _UNITS[unit]


def _check_documents(
    header: Node | None, bodies: Sequence[Node], parallel: bool, notes: ProblemNotes
) -> None:
    if header is not None:
        (GROUP_HEADER if parallel else SERIAL_HEADER).check(header, "", notes)
    for body in bodies:
        TASK.check(body, "", notes)
    if parallel and header is not None and not len(notes):
        _check_group(header, bodies, notes)


def is_volume(node: Node) -> bool:
    """Return whether a document describes a SkyPilot volume."""
    return (text_at(node, "type") or "") in ("k8s-pvc", "k8s-hostpath", "runpod-network-volume")


def _what(table: Node) -> str:
    return next((name for name in ("service", "pool") if child(table, name) is not None), "task")


def _unalias(node: Node, notes: ProblemNotes) -> Node:
    needs = child(node, "resources")
    if not isinstance(node, MapNode) or not isinstance(needs, MapNode):
        return node
    known = unalias(needs, notes)
    return MapNode(
        mark=node.mark,
        entries=tuple(
            (key, known if key.text == "resources" else value) for key, value in node.entries
        ),
    )


def _fill_in(node: Node) -> Node:
    """Replace the document's own variables with their values. SkyPilot also replaces variables
    before it checks the file.
    """
    if not isinstance(node, MapNode):
        return node
    known = {
        key.text: str(to_value(value))
        for name in ("envs", "secrets")
        for key, value in entries(child(node, name))
        if isinstance(value, ScalarNode) and not is_null(value)
    }
    return MapNode(
        mark=node.mark,
        entries=tuple(
            (key, _fill(value, known) if key.text in _FILLED else value)
            for key, value in node.entries
        ),
    )


def _fill(node: Node, known: Mapping[str, str]) -> Node:
    match node:
        case MapNode():
            filled = tuple(
                (_fill_text(key, known), _fill(value, known)) for key, value in node.entries
            )
            return MapNode(mark=node.mark, entries=filled)
        case ListNode():
            return ListNode(mark=node.mark, items=tuple(_fill(each, known) for each in node.items))
        case ScalarNode():
            return _fill_text(node, known)


def _fill_text(node: ScalarNode, known: Mapping[str, str]) -> ScalarNode:
    if not isinstance(node.value, str) or "$" not in node.value:
        return node
    text = _VARIABLE.sub(lambda match: known.get(match[1], match[0]), node.value)
    return replace(node, text=text, value=text)


def _translate_volume(table: Node, notes: ProblemNotes) -> Translation:
    VOLUME.check(table, "", notes)
    kept_keys = TranslationNotes()
    kept_keys.refuse_at(table, "type", "volumes are not created yet")
    return Translation(kind=KIND, what="volume", kept=kept_keys.list_kept())


def is_header(node: Node) -> bool:
    """Return whether a document is the first of a pipeline or job group, without a task."""
    keys = {key.text for key, _ in node.entries} if isinstance(node, MapNode) else set()
    return keys in ({"name"}, {"name", "execution"}) or text_at(node, "execution") == "parallel"


def _check_group(header: Node, bodies: Sequence[Node], notes: ProblemNotes) -> None:
    known: set[str] = set()
    for body in bodies:
        name = text_at(body, "name")
        if name is None:
            notes.add(
                body.mark, "each job in a job group needs a name", suggestion="write `name: …`"
            )
        elif name in known or not is_safe_name(name):
            problem = (
                "is used twice"
                if name in known
                else "has characters other than letters, digits, - and _"
            )
            notes.add(mark_of(body, "name"), f"the job's name {name!r} {problem}")
        known.add(name or "")
    delay = child(header, "termination_delay")
    helped = bool(items(child(header, "primary_tasks")))  # by all other tasks
    for node in (delay, *(value for _, value in entries(delay))) if helped else ():
        if isinstance(node, ScalarNode) and _read_seconds(node) > _LONGEST_S:
            message = f"`termination_delay`: {node.text[:_SHOWN]} is too long"
            notes.add(node.mark, message, expected="at most 24h")
    named = [each for each in items(child(header, "primary_tasks")) if isinstance(each, ScalarNode)]
    named += [key for key, _ in entries(delay) if key.text != "default"]
    for each in named:
        if each.text not in known:
            notes.add(
                each.mark,
                f"this group has no job called {each.text!r}",
                expected=", ".join(sorted(known)),
            )


def _translate_task(
    table: Node, header: Node | None, number: int, kept_keys: TranslationNotes
) -> TaskSpec:
    _keep_keys(table, header, kept_keys)
    request = read_request(child(table, "resources"), kept_keys)
    env, secrets, login = _read_environment(table, request.image, kept_keys)
    clouds = list_clouds(request.resources)
    config = child(table, "config")
    keep_config(config, clouds, request.image is not None, kept_keys)
    workdir = _read_workdir(table, kept_keys)
    mounts = read_mounts(table, workdir, clouds, kept_keys)
    run = _read_run(table, kept_keys)
    _note_conda(table, request.image, kept_keys)
    return TaskSpec(
        name=_name(table, header, number, kept_keys),
        run=run,
        session=run is WAIT,
        setup=text_at(table, "setup"),
        tags=request.tags,
        priority=request.priority,
        resources=add_options(request.resources, read_options(config)),
        nodes=int_at(table, "num_nodes") or 1,
        image=login.image,
        image_login=login.secret,
        workdir=workdir,
        env=env,
        secrets=tuple(dict.fromkeys((*secrets, *mounts.secrets))),
        inputs=mounts.inputs,
        outputs=mounts.outputs,
        volumes=mounts.volumes,
        retry=request.retry,
        webhooks=_read_callback(table, kept_keys),
        service=read_service(table, kept_keys),
    )


def _read_run(table: Node, kept_keys: TranslationNotes) -> str:
    run = text_at(table, "run") or ""
    if run.strip():
        return run
    kept_keys.note_at(table, "run", f"the file has nothing to run: {WAITS}")
    return WAIT


def _read_callback(table: Node, kept_keys: TranslationNotes) -> tuple[WebhookTarget, ...]:
    """Return the web address that a callback posts to. Other commands, which SkyPilot's controller
    would run at each change of state, are noted.
    """
    command = text_at(table, "event_callback") or ""
    found = dict.fromkeys(_ADDRESS.findall(command))
    url = next(iter(found), "")
    if (
        re.search(r"\bcurl\b", command)
        and len(found) == 1
        and "$" not in url
        and is_web_address(url)
    ):
        kept_keys.note_at(
            table,
            "event_callback",
            f"becomes `webhooks`: the server posts JSON to {url} when the job ends or fails; for "
            "each change of state, or for messages of Slack or Teams, see `cavvy notify add`",
        )
        return (WebhookTarget(url=url),)
    if command.strip():
        kept_keys.note_at(
            table,
            "event_callback",
            "the command is not run, since the server runs no commands of users; `cavvy notify "
            "add` sends changes of state to Slack, Teams, mail, PagerDuty or a webhook",
        )
    return ()


def _note_conda(table: Node, image: str | None, kept_keys: TranslationNotes) -> None:
    for key in ("setup", "run"):
        if image is None and re.search(r"\bconda\b", text_at(table, key) or ""):
            kept_keys.note_at(table, key, "conda works only if it is installed on the node")
            break


def _keep_keys(table: Node, header: Node | None, kept_keys: TranslationNotes) -> None:
    """Note or refuse the keys that have no equivalent in a task."""
    kept_keys.keep_listed((key for key, _ in entries(table)), _LATER, _NOTED)
    for key, _ in entries(header):
        if key.text in _OF_NETWORKS:
            kept_keys.note(key.mark, key.text, "the jobs run where their own resources say")


def _name(table: Node, header: Node | None, number: int, kept_keys: TranslationNotes) -> str:
    name, group = read_name(table, kept_keys), text_at(header, "name")
    if name is None:
        return slug(f"{group}-{number}") if group else ""
    return name


def _read_environment(
    table: Node, image: str | None, kept_keys: TranslationNotes
) -> tuple[dict[str, str], tuple[str, ...], _ImageLogin]:
    """Return the variables, the secrets, and the image with its login. Variables that contain the
    login are not passed to the work.
    """
    env, secrets = _read_variables(table, kept_keys)
    login = _read_login(table, image, kept_keys)
    if login.secret:
        env = {name: value for name, value in env.items() if name not in LOGIN_VARIABLES}
        secrets = tuple(name for name in secrets if name not in LOGIN_VARIABLES)
    return env, secrets, login


def _read_variables(
    table: Node, kept_keys: TranslationNotes
) -> tuple[dict[str, str], tuple[str, ...]]:
    env: dict[str, str] = {}
    secrets: list[str] = []
    envs = child(table, "envs")
    # This includes null values.
    for key, value in envs.entries if isinstance(envs, MapNode) else ():
        if is_null(value):
            _want_secret(key.text, f"envs.{key.text}", key.mark, secrets, kept_keys)
        else:
            env[key.text] = str(to_value(value))
            _note_placeholder(key, env[key.text], kept_keys)
    env = _read_secrets(child(table, "secrets"), secrets, kept_keys) | env
    for each in items(child(table, "managed_secrets")):
        for name, mark, options in _managed(each):
            _want_secret(_secret_name(name), "managed_secrets", mark, secrets, kept_keys)
            if path := text_at(options, "mount_path"):
                kept_keys.place_secret(_secret_name(name), path)
    left = {name: value for name, value in env.items() if name not in secrets}
    return left, tuple(dict.fromkeys(secrets))


def _note_placeholder(key: ScalarNode, value: str, kept_keys: TranslationNotes) -> None:
    if re.fullmatch(r"\$(\w+|\{\w+(:-.*)?\})", value):
        reason = (
            f"the value is the text {value}, as in SkyPilot; to set another value, use --env "
            f"{key.text}=VALUE"
        )
        kept_keys.note(key.mark, f"envs.{key.text}", reason)


def _read_secrets(
    node: Node | None, secrets: list[str], kept_keys: TranslationNotes
) -> dict[str, str]:
    """Add the names of the secrets to `secrets`. Returns the secrets that the file sets to an empty
    value: as in SkyPilot, these are empty variables.
    """
    empty: dict[str, str] = {}
    # This includes null values.
    for key, value in node.entries if isinstance(node, MapNode) else ():
        name, where = _secret_name(key.text), f"secrets.{key.text}"
        if is_null(value) or to_value(value) != "":
            _want_secret(name, where, key.mark, secrets, kept_keys)
        elif _is_variable(name, where, key.mark, kept_keys):
            reason = f"the value is empty, as in SkyPilot; --secret {name} passes a stored secret"
            kept_keys.note(key.mark, where, reason)
            empty[name] = ""
        if not is_null(value) and to_value(value) != "" and name not in _PUBLIC:
            reason = (
                "a secret's value in a file would be stored unencrypted; `cavvy secret set "
                f"{name}` encrypts it"
            )
            kept_keys.refuse(key.mark, where, reason)
    for each in items(node):
        if isinstance(each, ScalarNode):
            _want_secret(_secret_name(as_text(each)), "secrets", each.mark, secrets, kept_keys)
    return empty


def _read_login(table: Node, image: str | None, kept_keys: TranslationNotes) -> _ImageLogin:
    """Return the image with the address of its registry, and the login for the registry. As in
    SkyPilot, three variables contain the login.
    """
    section = next(
        (name for name in ("envs", "secrets") if LOGIN_VARIABLES[0] in _names(table, name)), None
    )
    if image is None or section is None:
        return _ImageLogin(image=image)
    server = text_at(child(table, section), "SKYPILOT_DOCKER_SERVER")
    if not server and not re.match(r"[^/]*[.:][^/]*/", image):
        reason = f"the registry of {image} is unknown; write its address into `image_id`"
        kept_keys.refuse_at(table, section, reason)
    elif server and not image.startswith(f"{server}/"):
        image = f"{server}/{image}"
    for name in LOGIN_VARIABLES:
        kept_keys.forget(f"{section}.{name}")
    reason = (
        f"set the login for the registry with `cavvy secret set {_LOGIN}`, in the form "
        "USER:PASSWORD; the SKYPILOT_DOCKER_ variables are not used"
    )
    kept_keys.note_at(table, section, reason)
    return _ImageLogin(image=image, secret=_LOGIN)


def _names(table: Node, section: str) -> list[str]:
    node = child(table, section)
    return [key.text for key, _ in node.entries] if isinstance(node, MapNode) else []


def _managed(node: Node) -> list[tuple[str, SourceMark, Node | None]]:
    if isinstance(node, ScalarNode):
        return [(as_text(node), node.mark, None)]
    return [(key.text, key.mark, value) for key, value in entries(node)]


def _secret_name(text: str) -> str:
    name = text.removeprefix("secrets:")
    for scope in ("personal.", "workspace.", "global."):
        name = name.removeprefix(scope)
    return name


def _want_secret(
    name: str, key: str, mark: SourceMark, secrets: list[str], kept_keys: TranslationNotes
) -> None:
    if _is_variable(name, key, mark, kept_keys):
        kept_keys.note(mark, key, tell_value(name, is_variable=key.startswith("envs.")))
        secrets.append(name)


def _is_variable(name: str, key: str, mark: SourceMark, kept_keys: TranslationNotes) -> bool:
    """Return whether a name is valid for a variable. If the name is invalid, the key is refused."""
    if is_variable_name(name):
        return True
    kept_keys.refuse(mark, key, f"{name!r} is not a valid variable name")
    return False


def _read_workdir(table: Node, kept_keys: TranslationNotes) -> Workdir | None:
    node, mark = child(table, "workdir"), mark_of(table, "workdir")
    if node is None:
        return None
    url = text_at(node, "url") or ""
    if url:
        ref = text_at(node, "ref")
        return read_commit(url, ref, "workdir", mark, "write the commit as `ref`", kept_keys)
    return Workdir(path=as_text(node) if isinstance(node, ScalarNode) else ".")
