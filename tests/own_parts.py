"""What the tests of a capability tell the tests of the core, so that these need not name it."""

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest

from cavvy.frame.discover import find_capabilities, list_file_tools

# a test with a file of another tool, which some capability must read
reads_other_tools = pytest.mark.skipif(
    not list_file_tools(), reason="no capability reads files of other tools"
)


def read_own(name: str) -> Iterator[ModuleType]:
    """Yield the module `name` in the tests of each installed capability that has one."""
    for capability in find_capabilities().capabilities:
        module = f"tests.{capability.name}.{name}"
        if find_spec(f"tests.{capability.name}") and find_spec(module):
            yield import_module(module)
