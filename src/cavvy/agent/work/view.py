"""What the work sees of the machine: a folder is hidden from it and, if the machine separates
projects, also all other processes and the folders in which processes meet.
"""

from __future__ import annotations

from . import hide, separate

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ..config import AgentConfig


class WorkView:
    """The view of one rank. `folder` is hidden, except the folders in `shown`. If `separated`, see
    `separate`; `devices` are files that are then covered.
    """

    def __init__(
        self, folder: str, shown: list[str], *, separated: bool = False, devices: list[str]
    ) -> None:
        self._folder, self._shown = folder, shown
        self._separated, self._devices = separated, devices

    def take(self) -> None:
        """Limit this process to the view. It must have one thread. Raises OSError."""
        if self._separated:
            separate.separate(self._folder, self._shown, self._devices)
        else:
            hide.hide(self._folder, self._shown)

    def join(self, find: Callable[[], int]) -> None:
        """Limit this process to the view that the process which `find` returns has taken. Raises
        OSError.
        """
        if not self._separated:
            hide.enter(self._folder, find)
            return
        separate.enter(hide.wait_until_hidden(self._folder, find))


def make_view(config: AgentConfig) -> WorkView | None:
    """The view of a rank's programs; None if they see everything."""
    if not config.covers:
        return None
    devices = separate.list_other_gpus(config.devices) if config.separates else []
    return WorkView(config.hides, config.shown, separated=config.separates, devices=devices)
