"""Words for what a gang lacks that was requested and does not work yet."""

from collections.abc import Sequence

from cavvy.control.decide.attempt_snapshot import AttemptSnapshot
from cavvy.domain.gangs import GangSeen
from cavvy.domain.jobs import Node

_LONGEST = 400  # characters; some APIs return pages of text


def name_silent(nodes: Sequence[Node]) -> str:
    """Return the ranks whose agents have never contacted the server, such as "rank 0, 3", or "" if
    all agents have.
    """
    silent = ", ".join(str(node.rank) for node in nodes if not node.claim)
    return f"rank {silent}" if silent else ""


def add_cause(text: str, cause: str) -> str:
    """Return the text with its cause, if the cause is known."""
    return f"{text}: {cause}" if cause else text


def find_cause(view: AttemptSnapshot) -> str:
    """Return what the provider last said about a gang that does not start: the gang's own reason
    or, if the provider did not answer, the error. Return "" if the provider gave no reason.
    """
    return view.seen.reason if isinstance(view.seen, GangSeen) else view.trouble


def say_ended(nodes: Sequence[Node]) -> str:
    """Return what happened to the work of a gang that the provider reports as ended."""
    silent = name_silent(nodes)
    if silent:
        return f"the gang ended before the agent of {silent} contacted the server"
    return "the gang ended before its work was complete"


def say_lost(node: Node) -> str:
    """Return what happened to a node that the provider reports as ended while its gang goes on."""
    early = "" if node.claim else " before its agent contacted the server"
    return f"the node of rank {node.rank} was lost{early}"


def shorten(text: str) -> str:
    """Return an error as one line of limited length."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"
