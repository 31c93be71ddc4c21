"""Chooses the cache of the work's project on a machine that runs the work of several projects one
after another, so that no work uses what the work of another project prepared or changed.

If namespaces hide Cavvy's folder from work, each project has its own cache, which the work of other
projects cannot see. Otherwise, the control plane gives the cache a new random name whenever another
project gets the machine, and the agent removes the caches of earlier projects before the work
starts.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

from ..disk import open_private
from .hide import ALONE, find_ability
from .trees import remove_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..config import AgentConfig


def open_cache(config: AgentConfig) -> int | None:
    """Test whether Cavvy's folder can be hidden from the work, unless the configuration says so,
    and set `config.cache` to the cache of the work's project. Return an open file that marks the
    cache as used until the file is closed, or None if no agent could remove the cache because
    another project got the machine. Raises OSError.
    """
    if config.covers is None:
        ability = find_ability(config.hides, config.home) if config.hides else ""
        config.covers, config.alone = bool(ability), ability == ALONE
    if not config.own_cache:
        return None
    seen = bool(config.fresh_cache) and not config.covers
    name = config.fresh_cache if seen else config.own_cache
    config.cache = os.path.join(config.caches, name)
    os.makedirs(config.cache, mode=0o700, exist_ok=True)
    if not config.fresh_cache:
        return None  # file systems of clusters may offer no locks
    lock = open_private(config.cache + "/used")
    fcntl.flock(lock, fcntl.LOCK_SH)
    if seen:
        _remove_others(config.caches, name)
    return lock


def _remove_others(caches: str, name: str) -> None:
    """Remove the caches of earlier projects on this machine, except caches that an agent uses. The
    names of a machine's caches have the same first part."""
    place = name.partition("-")[0] + "-"
    for each in os.listdir(caches):
        path = os.path.join(caches, each)
        if each == name or not each.startswith(place):
            continue
        with suppress(OSError):  # earlier work could make a cache that cannot be removed
            if os.path.islink(path) or not _is_used(path):
                remove_tree(path)


def _is_used(cache: str) -> bool:
    try:
        lock = open_private(cache + "/used")
    except OSError:
        return False  # earlier work has replaced the file
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
