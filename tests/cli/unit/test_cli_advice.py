"""What a word that is no command of the product leads to."""

import re

import pytest
from click.testing import CliRunner, Result

from cavvy.cli.main import COMMANDS, ENDING, MERGED, cli


def run(word: str) -> Result:
    return CliRunner().invoke(cli, [word])


@pytest.mark.parametrize("word", ["rum", "stp", "dwn", "rmm", "g", "unserv", "donw", "stpo", "rem"])
def test_a_misspelled_word_leads_to_no_ending_command_first(word: str) -> None:
    told = run(word).stderr
    named = re.findall(r"`cavvy ([^`]+)`", told)
    assert named
    ending = {MERGED.get(name, name): set[str]() for name in ENDING}
    for name in ENDING:
        ending[MERGED.get(name, name)].add(COMMANDS[name].rstrip("."))
    assert named[0] not in ending
    for words in named:
        texts = ending.get(words, {""})
        assert any(each in " ".join(told.split()) for each in texts)


@pytest.mark.parametrize(
    ("word", "command"),
    [
        ("rum", "run"),
        ("sbatch", "run"),
        ("srun", "run"),
        ("qsub", "run"),
        ("kubectl", "run"),
        ("squeue", "ps"),
        ("scancel", "stop"),
        ("sinfo", "nodes"),
    ],
)
def test_words_of_other_tools_lead_to_the_command(word: str, command: str) -> None:
    assert re.findall(r"`cavvy (\w+)", run(word).stderr)[0] == command


@pytest.mark.parametrize(("word", "now"), [("budgt", "cost budget"), ("dwn", "nodes down")])
def test_a_misspelled_former_word_leads_to_the_one_of_now(word: str, now: str) -> None:
    assert f"`cavvy {now}`" in run(word).stderr
