"""Records which images this machine pulled with the login of a task, and which images each project
has brought here. If the machine separates projects, a task gets an image of the first kind only if
the registry permits the task's own login. On a host where each project has its own cache, the work
of another project may have replaced an image that the task's project has not brought.

The record of an image is an empty file for its name and one for its ID, because engines also find
an image by its ID. The record of the name is written before the pull, so an image is never present
without a record.
"""

from __future__ import annotations

import hashlib
import os

from ..config import AgentConfig
from ..disk import open_private, read_text, write_whole


def record(config: AgentConfig, *names: str) -> None:
    """Record that an image with these names was pulled with a login. Raises OSError."""
    os.makedirs(_folder(config), mode=0o700, exist_ok=True)
    for name in names:
        os.close(open_private(_path(config, name)))


def forget(config: AgentConfig, *names: str) -> None:
    """Delete the records of an image that was pulled without the login of a task."""
    for name in names:
        if os.path.exists(_path(config, name)):
            os.unlink(_path(config, name))


def must_ask(config: AgentConfig, *names: str) -> bool:
    """Return whether the registry must permit the task to use the image with these names, although
    the machine has the image. Without names, return whether this applies to any image.
    """
    paths = [_path(config, name) for name in names] or [_folder(config)]
    return config.separates and any(map(os.path.exists, paths))


def is_own(config: AgentConfig, image: str, found: str) -> bool:
    """Return whether the work of this project has brought the image with the ID `found`, or all
    work shares images."""
    return not config.own_cache or read_text(_own(config, image)) == found


def note_own(config: AgentConfig, image: str, found: str) -> None:
    """Record that this project has brought the image with the ID `found`. Raises OSError."""
    if config.own_cache:
        os.makedirs(config.cache + "/images", mode=0o700, exist_ok=True)
        write_whole(_own(config, image), found)


def _own(config: AgentConfig, image: str) -> str:
    return f"{config.cache}/images/{hashlib.sha256(image.encode()).hexdigest()[:32]}"


def _folder(config: AgentConfig) -> str:
    return config.caches + "/private_images"  # all projects share the engine's images


def _path(config: AgentConfig, name: str) -> str:
    return f"{_folder(config)}/{hashlib.sha256(name.encode()).hexdigest()[:32]}"
