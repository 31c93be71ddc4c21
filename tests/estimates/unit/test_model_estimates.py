"""Estimates of built-in models: their names, what they state, and how many accelerators fit."""

import json

import pytest
from click.testing import CliRunner
from tests.cli.unit.test_model_names import SIZES
from tests.planner.unit.test_model_needs import make_task

from cavvy.cli.main import cli
from cavvy.cli.task.model_needs import find_need
from cavvy.cli.view import layout


@pytest.mark.parametrize("words", [["llama-7b"], ["--model", "llama-7b"]])
def test_an_unknown_size_names_the_nearest_and_all_sizes(words: list[str]) -> None:
    found = CliRunner().invoke(cli, ["estimate", *words])
    assert found.exit_code
    said = f"{found.output} {found.exception} {getattr(found.exception, 'hint', '')}"
    assert "did you mean `--model llama-8b`?" in said
    for name in ("llama-1b", "llama-3b", "llama-70b"):
        assert name in said


def test_a_missing_script_stays_a_missing_script() -> None:
    found = CliRunner().invoke(cli, ["estimate", "llama-7b.py"])
    assert "does not exist" in f"{found.output} {found.exception}"


def test_an_estimate_of_a_model_says_what_a_sample_is() -> None:
    words = ["estimate", "--model", "llama-8b", "--gpu", "H100"]
    table = CliRunner().invoke(cli, words).output
    assert "batch 2 x sequence of 2,048 tokens" in table
    data = json.loads(CliRunner().invoke(cli, [*words, "-o", "json"]).stdout)
    assert data["sample"] == "sequence of 2,048 tokens"


@pytest.mark.parametrize("name", ["phi", "deepseek"])
def test_a_name_without_a_size_lists_all_sizes(name: str) -> None:
    found = CliRunner().invoke(cli, ["estimate", name])
    hint = getattr(found.exception, "hint", "") or found.output
    assert f"--model {name}-7b" in hint
    assert "llama-70b (70.6 B)" in hint


def test_the_list_of_models_has_their_sizes() -> None:
    found = CliRunner().invoke(cli, ["estimate", "--model", "list", "-o", "json"])
    assert {each["model"]: each["parameters"] for each in json.loads(found.stdout)} == SIZES
    assert "8.0 B" in CliRunner().invoke(cli, ["estimate", "--model", "list"]).stdout


@pytest.mark.parametrize(
    ("batch", "said"), [("1", "all with enough memory."), ("999", "3 do not have enough memory.")]
)
def test_the_line_below_the_table_says_how_many_fit(batch: str, said: str) -> None:
    words = ["estimate", "--model", "gpt2-xl", "--gpu", "H100", "--batch", batch]
    assert said in CliRunner().invoke(cli, words).output


def test_the_command_that_makes_sure_gives_the_same_memory() -> None:
    need = find_need(make_task("x --model llama-8b"), 8)
    words = ["estimate", "--model", "llama-8b", "--gpu", "A100:8", "--fsdp"]
    table = CliRunner().invoke(cli, words).stdout
    assert need is not None
    row = next(line for line in table.splitlines() if line.startswith("A100"))
    assert f" {need.sharded / 1024:.1f} " in row


@pytest.mark.parametrize("word", ["inf", "nan"])
def test_a_number_of_samples_is_a_number(word: str) -> None:
    found = CliRunner().invoke(cli, ["estimate", "--model", "gpt2", "--samples", word])
    assert found.exit_code == 2
    said = f"{found.output} {found.exception}"
    assert f"--samples: expected a number, not '{word}'" in said


def test_what_stands_below_the_table_is_wrapped_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layout, "terminal_width", lambda out: 60)
    words = ["estimate", "--model", "llama-8b", "--gpu", "H100:8", "--fsdp"]
    told = CliRunner().invoke(cli, words).stderr.splitlines()
    assert len(told) > 3
    assert max(map(len, told)) <= 60
