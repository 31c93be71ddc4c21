"""The field `topology`: which nodes of a task are close to each other."""

from cavvy.domain.tasks import LABEL_PATTERN, TopologyNeed
from cavvy.spec.fields.kinds import SectionReader, matching, section, text_kind, whole

_LABEL = text_kind(
    "a label of nodes such as rack",
    matching(
        LABEL_PATTERN,
        "cannot be a label",
        expected="letters, digits and . _ / -, at most 253",
    ),
)


def _build(table: SectionReader) -> TopologyNeed | None:
    need = table.make(TopologyNeed)
    if need is None:
        return None
    if {key.text for key, _ in table.node.entries} <= {"slice"}:
        hint = "write, for example, `same: rack`"
        table.wrong("slice", "`topology` names no label", suggestion=hint)
    if need.same is not None and need.same == need.prefer:
        table.wrong("prefer", f"`same` already requires one {need.same}", suggestion="delete it")
    return need


def object_to_topology(need: TopologyNeed | None, nodes: int) -> str:
    """Return why a task with this number of nodes cannot have the topology, or ""."""
    if need is None:
        return ""
    if nodes == 1:
        return "`topology` has no meaning for a task of one node"
    if need.slice is not None and nodes % need.slice:
        sizes = [size for size in range(2, nodes + 1) if nodes % size == 0]
        close = sorted(sizes, key=lambda size: abs(size - (need.slice or 0)))[:2]
        return (
            f"{nodes:,} nodes cannot be divided into slices of {need.slice:,}; sizes that divide "
            f"{nodes:,} are, for example, {' and '.join(f'{each:,}' for each in sorted(close))}"
        )
    return ""


TOPOLOGY_HINT = "change `nodes`, or `topology`"

TOPOLOGY = section("topology", _build, same=_LABEL, prefer=_LABEL, slice=whole(1, 10_000))
