"""Versions of the agents' protocol: which ones the control plane serves, and what it never gives to
older agents. Pure.

`docs/concepts/agent-protocol.md` has the rule and the table of versions.
"""

from cavvy.domain.messages import Assignment

PROTOCOL = (
    3  # the control plane's own; the agent's is in `agent/config.py`, and a test compares them
)
# versions on either side that are served: servers are upgraded, and put back, under running jobs
APART = 2
OLDEST = max(1, PROTOCOL - APART)
NEWEST = PROTOCOL + APART
HANDED_OVER = 2  # since when agents know checkpoints that are handed over
EQUIPPED = 3  # since when they know far data, volumes, builds, logins, checks, and users' hands


def is_served(version: int) -> bool:
    """Whether agents of this version are served."""
    return OLDEST <= version <= NEWEST


def list_unknown(version: int, work: Assignment) -> list[str]:
    """What of the work an agent of this version does not know, and would do the work without."""
    checkpoint = work.checkpoint
    far = [
        *(str(item["source"]) for item in work.inputs),
        *(str(item["target"]) for item in work.outputs),
    ]
    needs = (
        (
            HANDED_OVER,
            "checkpoints that are handed over",
            checkpoint is not None and checkpoint.sync,
        ),
        (EQUIPPED, "inputs or outputs at a URL", any("://" in place for place in far)),
        (EQUIPPED, "inputs as streams", any(item.get("mode") == "stream" for item in work.inputs)),
        (
            EQUIPPED,
            "outputs that are sent while the work runs",
            any("every_s" in item for item in work.outputs),
        ),
        (EQUIPPED, "volumes", bool(work.volumes)),
        (EQUIPPED, "an image that is built", work.build is not None),
        (EQUIPPED, "an image's login", work.image_login is not None),
        (EQUIPPED, "a check of the node", work.check is not None),
    )
    return [what for since, what, needed in needs if needed and version < since]
