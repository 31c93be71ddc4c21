"""Groups of commands, and arguments for names. If a command or a name does not exist, the error
lists the ones that exist.
"""

from collections.abc import Sequence
from typing import Any

import click

from cavvy.cli.view.failure import CommandFailure

SAME = (("list", "ls"), ("rm", "delete", "remove"))
_LISTS = "cavvy.lists"  # in the context: the group was called with `list` to list by itself


class CommandGroup(click.Group):
    """A group of commands. The error for a command that does not exist names the commands of the
    group. A group with a command `list` that needs no argument lists when it is called alone; a
    group that can only be called alone lists with `list`, too, and then takes no command. Words of
    SAME call the same command.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for words in SAME:
            if args and args[0] in words and args[0] not in self.commands:
                called = [word for word in words if word in self.commands]
                if called or (words[0] == "list" and self.invoke_without_command):
                    ctx.meta[_LISTS] = not called
                    args = [*called, *args[1:]]
                    break  # what follows `list` is no command, also not by another word
        own = {option for param in self.get_params(ctx) for option in param.opts}
        if self._lists_alone() and (not args or (args[0][:1] == "-" and args[0] not in own)):
            args = ["list", *args]
        return super().parse_args(ctx, args)

    def _lists_alone(self) -> bool:
        listing = self.commands.get("list")
        return listing is not None and not any(param.required for param in listing.params)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and ctx.meta.get(_LISTS):
            hint = f"the command is `{ctx.command_path} {args[0]}`"
            message = f"`{ctx.command_path} list` takes no argument {args[0]!r}"
            raise CommandFailure(message, hint if args[0] in self.commands else "leave it out", 2)
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            from cavvy.spec.problems import listed

            names = [*self.list_commands(ctx), *["no command"] * self.invoke_without_command]
            message = f"`{ctx.command_path}` has no command {args[0]!r}"
            raise CommandFailure(message, f"expected {listed(names, 'or')}", 2)
        return super().resolve_command(ctx, args)


class NameArgument(click.Argument):
    """An argument for the name of something that exists. `listing` describes the command that lists
    the names, for the error if the argument is missing.
    """

    def __init__(self, param_decls: Sequence[str], *, listing: str, **attributes: Any) -> None:
        super().__init__(param_decls, **attributes)
        self.listing = listing
