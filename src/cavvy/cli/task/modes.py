"""Other ways to run a command of the core on a task, which capabilities contribute. Each has
options of its own; one of them chooses it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cavvy.cli.task.option_groups import add_group
from cavvy.domain.tasks import TaskSpec
from cavvy.frame.discover import load_all


class CommandMode(NamedTuple):
    """Another way to run a command of the core on a task."""

    option: str  # the option that chooses it, such as "--load"
    title: str  # of its options in the help
    text: str  # what it does: a sentence for the help of the command
    options: Sequence[Callable[[Any], Any]]  # decorators that add its options, and `option` first
    run: Callable[[TaskSpec, Mapping[str, Any], str], None]  # with their values and the format


def add_modes(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options of a command's modes, and what they do to its help.
    The function gets their values by their names.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        modes = _list_modes(name)
        command.__doc__ = " ".join(
            [(command.__doc__ or "").rstrip(), *(each.text for each in modes)]
        )
        for mode in reversed(modes):
            command = add_group(mode.title, mode.options)(command)
        return command

    return decorate


def find_mode(name: str, values: Mapping[str, Any]) -> CommandMode | None:
    """Return the mode that these values of options choose."""
    chosen = (mode for mode in _list_modes(name) if values[_parameter(mode.option)] is not None)
    return next(chosen, None)


def _parameter(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _list_modes(name: str) -> Sequence[CommandMode]:
    found = load_all(lambda each: [mode.place for mode in each.modes if mode.command == name])
    return [mode for _, mode in found]
