"""Lets `torchrun.py` start the ranks of the launchers of PyTorch, such as torchrun.

The agent copies this file as `sitecustomize.py` to a folder of its own, which it puts first in the
`PYTHONPATH` of work that asks for it (`environment.py`). So each Python of the work runs the file
when it starts, whichever environment it belongs to. The file then takes its folder out of the way,
runs the `sitecustomize` that Python would have run without it, and waits for the import of the
module through which all launchers of PyTorch start ranks. It must be valid in every Python 3.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

API = "torch.distributed.launcher.api"
LAUNCHER = "cavvy_torchrun"


class ApiFinder:
    """Finds the module as Python does, and changes it when it has been imported."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        if name != API:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: "Any") -> None:
            execute(module)
            self._load().replace_launch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign] # of this module alone
        return spec

    def _load(self) -> "Any":
        import importlib.util

        path = os.path.join(self._folder, LAUNCHER + ".py")
        spec = importlib.util.spec_from_file_location(LAUNCHER, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[LAUNCHER] = module
        spec.loader.exec_module(module)
        return module


def hand_on(folder: str) -> None:
    """Run the `sitecustomize` that Python would have run without this folder."""
    sys.path[:] = [each for each in sys.path if each != folder]
    own = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except ImportError:
        if own is None or getattr(sys.exc_info()[1], "name", None) not in (None, "sitecustomize"):
            raise
    if own is not None:
        sys.modules.setdefault("sitecustomize", own)


def start() -> None:
    """Do what this file is for."""
    folder = os.path.dirname(os.path.abspath(__file__))
    env = os.environ
    # a rank that starts others has no part in this
    if env.get("CAVVY_REJOINS") == "1" and "LOCAL_RANK" not in env and sys.version_info >= (3, 9):
        sys.meta_path.insert(0, ApiFinder(folder))
    hand_on(folder)


if __name__ == "sitecustomize":
    start()
