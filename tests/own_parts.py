"""What the tests of a capability tell the tests of the core, so that these need not name it."""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from cavvy.frame.discover import find_capabilities


def read_own(name: str) -> Iterator[ModuleType]:
    """Yield the module `name` in the tests of each installed capability that has one."""
    for capability in find_capabilities().capabilities:
        module = f"tests.{capability.name}.{name}"
        if find_spec(f"tests.{capability.name}") and find_spec(module):
            yield import_module(module)
