"""Adds to a file's tree what `service.engine` needs: `run`, and the port, probe and models of the
service, as far as the file does not have them.
"""

from collections.abc import Mapping

from cavvy.spec.engines import ENGINES, list_own_flags, write_command
from cavvy.spec.problems import ProblemNotes, SourceMark, listed, nearest, shown
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode


def expand_engine(root: MapNode, notes: ProblemNotes) -> MapNode:
    """The tree with the engine's keys. Mistakes are added to `notes`."""
    service = root.get("service")
    if not isinstance(service, MapNode) or service.get("engine") is None:
        return root
    name, model = _text(service, "engine"), _text(service, "model")
    mark = service.mark
    engine = ENGINES.get(name)
    if engine is None:
        close = nearest(name, ENGINES)
        hint = f"did you mean `{close}`?" if close else "write `run` for another program"
        notes.add(
            mark, f"{shown(name)} is not an engine", expected=listed(ENGINES), suggestion=hint
        )
        return root
    if not model:
        notes.add(mark, f"the engine {name} has no model", suggestion="add `model: NAME_OR_PATH`")
    if root.get("run") is not None:
        message = "`run` has no meaning with `service.engine`, which writes the command"
        notes.add(mark, message, suggestion="delete one of them")
    options = _read_options(service, notes)
    for own in sorted(list_own_flags(engine) & options.keys()):
        notes.add(mark, f"the option {own} is written by Cavvy", suggestion="delete it")
    names = _list_models(service) or (model,)
    needs = root.get("resources")
    gpus = isinstance(needs, MapNode) and needs.get("gpu") is not None
    run = write_command(engine, model, names, options, gpus)
    more: dict[str, Node] = {
        "port": _scalar(mark, engine.port),
        "probe": _scalar(mark, engine.probe),
    }
    if engine.chats:
        more["models"] = _scalar(mark, model)
    whole = (
        *service.entries,
        *((_scalar(mark, key), each) for key, each in more.items() if service.get(key) is None),
    )
    service = MapNode(mark=mark, entries=whole)
    entries = [(key, service if key.text == "service" else each) for key, each in root.entries]
    if root.get("run") is None:
        entries.append((_scalar(mark, "run"), _scalar(mark, run)))
    return MapNode(mark=root.mark, entries=tuple(entries))


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


def _scalar(mark: SourceMark, value: str | int) -> ScalarNode:
    return ScalarNode(mark=mark, text=str(value), value=value)
