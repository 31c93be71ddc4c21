"""The groups in which the help of commands for task files shows their options."""

from collections.abc import Callable, Iterable
from typing import Any

import click

_REST = "Options"
# Each group's options, in the order in which the help shows them.
_GROUPS = {
    "The machine": (
        *("--gpu", "--spot", "--provider", "--region", "--max-price", "--nodes", "--image"),
        *("--machine", "--pool", "--keep"),
    ),
    "The work": (
        *("--param", "--env", "--env-file", "--secret", "--workdir", "--name", "--project"),
        *("--as", "--budget", "--deadline"),
    ),
    "Many jobs": ("--array", "--sweep", "--parallel", "--trials", "--after", "--group"),
    "The session": (
        *("--ide", "--idle-gpu", "--home", "--sync", "--no-open", "--no-devcontainer"),
    ),
    "The list of offers": (*("--by", "--limit", "--ready", "--all-locations", "--output-size"),),
}
_PLACES = {
    flag: (group, place)
    for group, (_, flags) in enumerate(_GROUPS.items())
    for place, flag in enumerate(flags)
}


_OWN = "cavvy_group"  # the attribute of options that `add_group` has added


def add_group(
    title: str, options: Iterable[Callable[[Any], Any]]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds options, which the help shows as a group of their own."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed([*options]):
            command = option(command)
            setattr(command.__click_params__[-1], _OWN, title)  # type: ignore[attr-defined]
        return command

    return decorate


class GroupedCommand(click.Command):
    """A command whose help shows its options in groups. What belongs to the command itself stands
    last, under "Options"."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found: dict[int, list[tuple[int, tuple[str, str]]]] = {}
        params = self.get_params(ctx)
        own = dict.fromkeys(getattr(param, _OWN) for param in params if hasattr(param, _OWN))
        titles = [*_GROUPS, *own, _REST]
        for number, param in enumerate(params):
            record = param.get_help_record(ctx)
            if record is None or not isinstance(param, click.Option):
                continue
            known = [_PLACES[flag] for flag in param.opts if flag in _PLACES]
            rest = (titles.index(getattr(param, _OWN, _REST)), number)
            group, place = known[0] if known else rest
            found.setdefault(group, []).append((place, record))
        widest = max((len(record[0]) for rows in found.values() for _, record in rows), default=0)
        for group, rows in sorted(found.items()):
            with formatter.section(titles[group]):
                # all groups have the same columns
                records = [(name.ljust(min(widest, 30)), text) for _, (name, text) in sorted(rows)]
                formatter.write_dl(records)
