"""Finds the folder with the results of a setup, for the agent and the agent's child programs. The
module `prepare` describes the contents of a setup's folder.
"""

from __future__ import annotations

import hashlib
import json
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..config import AgentConfig
    from ..documents import WorkConfig


def find_setup(config: AgentConfig, work: WorkConfig) -> str:
    """Return the folder that contains the work's setup. The folder's name contains the host's name:
    several hosts can share the cache, but each of them needs its own run of the setup, because a
    setup can install files outside the folder.
    """
    folder = work.workdir.snapshot if work.workdir else work.git.commit if work.git else None
    key = work.setup_key or hashlib.sha256(json.dumps([work.setup, folder]).encode()).hexdigest()
    name = f"{key}@{os.uname().nodename}"
    return os.path.join(
        config.cache, "setups", "".join(c if c.isalnum() or c in "-_.@" else "_" for c in name)
    )
