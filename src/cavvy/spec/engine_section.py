"""Adds keys that a file does not state to its tree: those that `service.engine` needs (`run`, and
the port, probe and models of the service), and the image's own command.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

from cavvy.domain.units import read_number
from cavvy.domain.values import replace
from cavvy.spec.adapters import (
    LORA_OPTIONS,
    LoraAdapter,
    read_adapter,
    set_environment,
    write_lora_options,
)
from cavvy.spec.engines import (
    ENGINES,
    OPTIMISATION,
    Engine,
    count_at_once,
    list_own_files,
    list_own_flags,
    write_command,
)
from cavvy.spec.fields.edge_step import RUN
from cavvy.spec.fields.kinds import advise_point
from cavvy.spec.model_files import MODEL_FOLDER
from cavvy.spec.problems import ProblemNotes, SourceMark, listed, nearest, shown
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode

_REPOSITORY = re.compile(r"([^/@]+/([^/@]+))(?:@[^/]+)?(/.*)?")  # of the Hugging Face Hub
_OWN_PROGRAMS = ("router", "prefill", "decode")  # roles whose command differs from the engine's
# An image's entry point with its arguments, and the entry point alone; they are filled in later.
OWN_COMMAND, OWN_ENTRYPOINT = "${{ image.command }}", "${{ image.entrypoint }}"


def expand_engine(root: MapNode, notes: ProblemNotes) -> MapNode:
    """Return the tree with the engine's keys. Mistakes are added to `notes`."""
    service = root.get("service")
    if not isinstance(service, MapNode) or service.get("engine") is None:
        return root
    engine = _find_engine(_text(service, "engine"), service.mark, notes)
    if engine is None:
        return root
    source, optimisation = _read_model(service, engine, notes)
    model, name, url = _place_model(source)
    options = _read_options(service, notes)
    own = list_own_flags(engine)
    adapters = _read_adapters(service)
    if adapters:
        own |= frozenset(LORA_OPTIONS[_text(service, "engine")].own)
    events = _wants_events(service)
    own |= {"kv-events-config"} if events else set()
    _check(root, service, own & options.keys(), notes)
    options = {**optimisation, **options}
    if adapters:
        options = _add_adapters(service, adapters, options, notes)
    needs = root.get("resources")
    gpus = isinstance(needs, MapNode) and needs.get("gpu") is not None
    names = _list_models(service) or (name,)

    def write(gpus: bool) -> str:
        run = write_command(engine, model, names, options, gpus, events)
        return set_environment(_text(service, "engine"), run) if adapters else run

    run = write(gpus)
    copied = ((url, model), *((each.url, each.path) for each in adapters))
    root = add_transfers(root, "inputs", [pair for pair in copied if pair[0]])
    more: dict[str, str | int] = {"port": engine.port, "probe": engine.probe}
    if engine.chats:
        more |= {"models": name, "concurrency": count_at_once(engine, options)}
    full = complete(_add_roles(service, engine, write, gpus, notes), more)
    entries = tuple((key, full if key.text == "service" else each) for key, each in root.entries)
    return complete(replace(root, entries=entries), {"run": run})


def add_own_command(root: MapNode) -> MapNode:
    """Return the tree with the image's own command as `run`, if it names an image and no `run`."""
    image = root.get("image")
    has_image = isinstance(image, MapNode) or bool(isinstance(image, ScalarNode) and image.text)
    if has_image:
        return complete(root, {"run": OWN_COMMAND})
    return _add_group_command(root)


def _add_group_command(root: MapNode) -> MapNode:
    """Return the tree with a `run`, if it has none and each group of its service has one."""
    service = root.get("service")
    groups = service.get("groups") if isinstance(service, MapNode) else None
    runs = [
        each.get("run") if isinstance(each, MapNode) else None
        for _, each in (groups.entries if isinstance(groups, MapNode) else ())
    ]
    texts = [each.text for each in runs if isinstance(each, ScalarNode)]
    return complete(root, {"run": texts[0]}) if texts and len(texts) == len(runs) else root


def find_engine_files(documents: Sequence[Node]) -> Mapping[str, Path]:
    """Return the files of Cavvy that the file's engine needs, by their paths in the working
    folder."""
    for root in documents:
        service = root.get("service") if isinstance(root, MapNode) else None
        if isinstance(service, MapNode):
            engine = ENGINES.get(_text(service, "engine"))
            return {} if engine is None else list_own_files(engine)
    return {}


def _add_roles(
    service: MapNode,
    engine: Engine,
    write: Callable[[bool], str],
    gpus: bool,
    notes: ProblemNotes,
) -> MapNode:
    """Return the service with a command for each group that has none and needs another one than the
    engine's: because of its role, or because only the group has GPUs."""
    groups = service.get("groups")
    if not isinstance(groups, MapNode):
        return service
    tables = [(name, each) for name, each in groups.entries if isinstance(each, MapNode)]
    roles = {_text(each, "role") or name.text for name, each in tables}
    parts = " --pd-disaggregation" if roles & {"prefill", "decode"} else ""
    found: list[tuple[ScalarNode, Node]] = []
    for name, group in groups.entries:
        if isinstance(group, MapNode) and group.get("run") is None:
            role = _text(group, "role") or name.text
            needs = group.get("resources")
            own = isinstance(needs, MapNode) and needs.get("gpu") is not None
            flags = engine.roles.get(role)
            if flags is None and role in _OWN_PROGRAMS:
                message = f"Cavvy does not know the command of the engine for the role {role}"
                hint = "write `run` into the group; `engine: sglang` needs none"
                notes.add(name.mark, message, suggestion=hint)
            elif role == "router":
                group = complete(group, {"run": f"exec {flags}{parts}"})
            else:
                run = write(gpus or own)
                group = complete(group, {"run": f"{run} {flags}" if flags else run})
        found.append((name, group))
    entries = tuple(
        (key, replace(groups, entries=tuple(found)) if key.text == "groups" else each)
        for key, each in service.entries
    )
    return replace(service, entries=entries)


def _find_engine(name: str, mark: SourceMark, notes: ProblemNotes) -> Engine | None:
    engine = ENGINES.get(name)
    if engine is None:
        close = nearest(name, ENGINES)
        hint = f"did you mean `{close}`?" if close else "write `run` to start another program"
        notes.add(
            mark, f"{shown(name)} is not an engine", expected=listed(ENGINES), suggestion=hint
        )
    return engine


def _check(root: MapNode, service: MapNode, own: AbstractSet[str], notes: ProblemNotes) -> None:
    mark = service.mark
    node = service.get("model")
    if not (_text(service, "model") or (isinstance(node, MapNode) and _text(node, "source"))):
        notes.add(mark, "the engine has no model", suggestion="add `model: NAME_OR_PATH`")
    if root.get("run") is not None:
        message = (
            "`run` cannot be used with `service.engine`, because Cavvy writes the engine's command"
        )
        notes.add(mark, message, suggestion="delete one of them")
    for name in sorted(own):
        notes.add(
            mark,
            f"Cavvy itself sets the option {name} of the engine, so a task must not set it",
            suggestion="delete it",
        )


def _read_model(
    service: MapNode, engine: Engine, notes: ProblemNotes
) -> tuple[str, Mapping[str, str]]:
    """Return the source of the model, and the options that optimise it."""
    node = service.get("model")
    if not isinstance(node, MapNode):
        return _text(service, "model"), {}
    found = {name: _text(node, name) for name in OPTIMISATION if node.get(name) is not None}
    wanted = found.get("optimise", "")
    if found and wanted not in engine.optimises:
        known = listed(engine.optimises) if engine.optimises else "no optimisation for this engine"
        notes.add(node.mark, f"the engine has no optimisation {shown(wanted)}", expected=known)
    if share := found.get("agree", ""):
        found["agree"] = str(_read_share(share, node.mark, notes))
    return _text(node, "source"), found


def _wants_events(service: MapNode) -> bool:
    routing = service.get("routing")
    value = routing.get("events") if isinstance(routing, MapNode) else None
    return isinstance(value, ScalarNode) and value.value is True


def _read_adapters(service: MapNode) -> tuple[LoraAdapter, ...]:
    """Return the adapters whose sources are right; `fields/service.py` reports the others."""
    node, engine = service.get("adapters"), _text(service, "engine")
    found = []
    for key, value in node.entries if isinstance(node, MapNode) else ():
        with suppress(ValueError):
            if engine in LORA_OPTIONS and isinstance(value, ScalarNode):
                found.append(read_adapter(key.text, value.text, engine))
    return tuple(found)


def _add_adapters(
    service: MapNode,
    adapters: Sequence[LoraAdapter],
    options: Mapping[str, str],
    notes: ProblemNotes,
) -> Mapping[str, str]:
    try:
        return write_lora_options(_text(service, "engine"), adapters, options)
    except ValueError as error:
        notes.add(service.mark, str(error), suggestion="write a number such as 8")
        return options


def _place_model(source: str) -> tuple[str, str, str]:
    """Return the path that the engine gets, the name of the model, and the URL from which the model
    is copied to the path, or "" if the engine finds the model itself.
    """
    scheme, _, place = source.partition("://")
    if scheme not in ("hf", "s3", "gs", "az"):
        is_path = source.startswith(("./", "../", "/", "~"))
        last = source.rstrip("/").rpartition("/")[2] if is_path else source
        return source, source if last in ("", ".", "..", "~") else last, ""
    found = _REPOSITORY.fullmatch(place) if scheme == "hf" else None
    if found is not None:
        file = (found[3] or "/").rpartition("/")[2]
        url = source if file or found[3] else f"{source}/"
        return f"{MODEL_FOLDER}/{file or found[2]}", found[1], url
    last = place.rstrip("/").rpartition("/")[2]
    return f"{MODEL_FOLDER}/{last}", last, source


def add_transfers(
    root: MapNode, key: str, copied: Sequence[tuple[str, str]], region: str = ""
) -> MapNode:
    """Return the tree with an entry of `inputs` or `outputs` for each pair of a source and a
    target. `region` is that of their buckets, or ""."""
    node, mark = root.get(key), root.mark
    more = tuple(
        complete(
            MapNode(mark=mark, entries=()),
            {"source": source, "target": target, **({"region": region} if region else {})},
        )
        for source, target in copied
    )
    if not more or not (node is None or isinstance(node, ListNode)):
        return root
    items = ListNode(mark=mark, items=(*(() if node is None else node.items), *more))
    entries = tuple(each for each in root.entries if each[0].text != key)
    return replace(root, entries=(*entries, (make_scalar(mark, key), items)))


def _read_share(text: str, mark: SourceMark, notes: ProblemNotes) -> float:
    try:
        share = read_number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1
    if not 0 < share <= 1:
        notes.add(
            mark,
            f"agree: {shown(text)} is not a share",
            suggestion=advise_point(text) or "write 99% or 0.99",
        )
    return share


def add_edge_run(root: MapNode) -> MapNode:
    """Return the tree with a `run`, if the server does the work of the task."""
    alone = root.get("edge") is not None and root.get("run") is None
    return complete(root, {"run": RUN}) if alone else root


def complete(table: MapNode, more: Mapping[str, str | int]) -> MapNode:
    """Return the table, extended by the keys of `more` that the table lacks."""
    added = (
        (make_scalar(table.mark, key), make_scalar(table.mark, value))
        for key, value in more.items()
        if table.get(key) is None
    )
    return replace(table, entries=(*table.entries, *added))


def _read_options(service: MapNode, notes: ProblemNotes) -> Mapping[str, str]:
    node = service.get("options")
    found: dict[str, str] = {}
    for key, value in node.entries if isinstance(node, MapNode) else ():
        if not isinstance(value, ScalarNode):
            notes.add(value.mark, f"the option {key.text} is not a single value")
            continue
        switch = isinstance(value.value, bool)
        found[key.text.removeprefix("--")] = str(value.value).lower() if switch else value.text
    return found


def _list_models(service: MapNode) -> tuple[str, ...]:
    node = service.get("models")
    each = node.items if isinstance(node, ListNode) else (node,)
    return tuple(item.text for item in each if isinstance(item, ScalarNode))


def _text(table: MapNode, key: str) -> str:
    node = table.get(key)
    return node.text if isinstance(node, ScalarNode) else ""


def make_scalar(mark: SourceMark, value: str | int) -> ScalarNode:
    return ScalarNode(mark=mark, text=str(value), value=value)
