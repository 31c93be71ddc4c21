"""A name that no built-in model has leads to the nearest one, by size and family."""

import json
import re

import pytest
from click.testing import CliRunner

from cavvy.cli.main import cli
from cavvy.cli.task import profiles
from cavvy.cli.task.model_names import suggest_model

SIZES = {str(each["name"]): int(each["parameters"]) for each in profiles._zoo()}


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("llama-7b", "llama-8b"),
        ("meta-llama/Llama-2-13b-hf", "llama-8b"),
        ("llama-405B", "llama-70b"),
        ("Llama-3.1-8B-Instruct", "llama-8b"),
        ("7b", "llama-8b"),
        ("mistral-7b", "llama-8b"),
        ("gpt2-1.5b", "gpt2-xl"),
        ("bert-340m", "bert-large"),
        ("resnet56", "resnet50"),
        ("resnet-101", "resnet101"),
        ("vit_b_32", "vit_b_16"),
        ("gpt3", "gpt2"),
        ("efficientnet", "efficientnet_b0"),
        ("llama-0b", "llama-1b"),
        ("9" * 400 + "b", "resnet18"),  # infinite: all are equally far
        ("zzz", None),
        ("gpt-oss-20b", "llama-8b"),
        ("", None),
    ],
)
def test_the_nearest_model_is_found_by_its_size_in_its_family(
    name: str, nearest: str | None
) -> None:
    assert suggest_model(name, SIZES) == nearest


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


def test_the_stated_length_is_that_of_the_traced_kernels() -> None:
    """The attention of a language model has as many queries as the stated sequence has tokens."""
    for data in profiles._zoo():
        if stated := re.search(r"sequence of ([\d,]+) tokens", data["sample"]):
            queries = {each["size"][1] for each in data["ops"] if each["kind"] == "attention"}
            assert queries == {int(stated[1].replace(",", ""))}, data["name"]
        else:
            assert data["sample"] == "image of 224 x 224 pixels"


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
