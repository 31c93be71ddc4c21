"""The groups in which the help of commands for task files shows their options."""

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
    "A service on recorded requests": (
        *("--load", "--service-time", "--prompt-ms", "--answer-ms", "--running-ms"),
        *("--cold-start", "--spot-capacity", "--managed-price", "--serverless-price", "--plot"),
    ),
}
_PLACES = {
    flag: (group, place)
    for group, (_, flags) in enumerate(_GROUPS.items())
    for place, flag in enumerate(flags)
}


class GroupedCommand(click.Command):
    """A command whose help shows its options in groups. What belongs to the command itself stands
    last, under "Options"."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found: dict[int, list[tuple[int, tuple[str, str]]]] = {}
        for number, param in enumerate(self.get_params(ctx)):
            record = param.get_help_record(ctx)
            if record is None or not isinstance(param, click.Option):
                continue
            known = [_PLACES[flag] for flag in param.opts if flag in _PLACES]
            group, place = known[0] if known else (len(_GROUPS), number)
            found.setdefault(group, []).append((place, record))
        titles = [*_GROUPS, _REST]
        widest = max((len(record[0]) for rows in found.values() for _, record in rows), default=0)
        for group, rows in sorted(found.items()):
            with formatter.section(titles[group]):
                # all groups have the same columns
                records = [(name.ljust(min(widest, 30)), text) for _, (name, text) in sorted(rows)]
                formatter.write_dl(records)
