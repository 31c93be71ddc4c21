"""The help begins with what a first user needs, and shows options in groups."""

import re
from itertools import chain

import click
import pytest
from click.testing import CliRunner

from cavvy.cli.main import COMMANDS, FIRST, MERGED, cli
from cavvy.cli.task.option_groups import GroupedCommand


def read_help(*words: str) -> str:
    told = CliRunner().invoke(cli, [*words, "--help"], env={"COLUMNS": "100"}, prog_name="cavvy")
    assert told.exit_code == 0
    return told.output


def test_the_help_shows_ten_commands_and_names_the_others_once() -> None:
    text = read_help()
    assert len(text.splitlines()) <= 50
    assert len(FIRST) <= 10
    first, more = text.split("\nFirst:\n")[1].split("\nMore:\n")
    assert re.findall(r"^  ([a-z]+)", first, re.MULTILINE) == [*FIRST]
    words = re.findall(r"(?<=[ ,])([a-z]+)(?=,|\n)", more)
    assert sorted({*words} & {*COMMANDS}) == sorted({*COMMANDS} - {*FIRST, *MERGED})


def test_every_command_is_listed_with_what_it_does() -> None:
    told = CliRunner().invoke(cli, ["--commands"], env={"COLUMNS": "100"})
    listed = " ".join(told.output.split())
    assert told.exit_code == 0
    rows = {name: f"{name} {' '.join(text.split())}" in listed for name, text in COMMANDS.items()}
    assert {name for name, shown in rows.items() if not shown} == {*MERGED}


def test_a_former_word_is_answered_as_before_and_at_its_new_place() -> None:
    with click.Context(cli) as context:
        for former, words in MERGED.items():
            group, _, name = words.partition(" ")
            command = found = cli.get_command(context, group)
            if name:
                assert isinstance(command, click.Group)
                found = command.get_command(context, name)
                assert found is cli.get_command(context, former)
                assert name in command.list_commands(context)
            assert found is not None
            assert cli.get_command(context, former) is not None
            assert "Usage: cavvy" in read_help(former)
            assert f"Usage: cavvy {words} " in read_help(*words.split())


@pytest.mark.parametrize(
    "name", [name for name in ("run", "plan", "dev", "serve", "batch") if name in COMMANDS]
)
def test_the_options_of_tasks_are_in_groups(name: str) -> None:
    with click.Context(cli) as context:
        command = cli.get_command(context, name)
    assert isinstance(command, GroupedCommand)
    text = read_help(name)
    groups = re.split(r"\n\n(?=[A-Z][\w ]+:\n)", text)
    shown = [re.findall(r"^  (?:-\w, )?(--[\w-]+)", group, re.MULTILINE) for group in groups[1:]]
    options = [
        each for each in command.params if isinstance(each, click.Option) and not each.hidden
    ]
    names = [next(flag for flag in each.opts if flag.startswith("--")) for each in options]
    assert sorted(chain(*shown)) == sorted([*names, "--help"])
    assert len(shown) >= 3
    assert len(shown[-1]) <= 6  # what no group has
    assert "[TASK.YAML|-]  " not in text
