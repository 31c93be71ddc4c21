"""A name that no built-in model has leads to the nearest one, by size and family."""

import re

import pytest

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


def test_the_stated_length_is_that_of_the_traced_kernels() -> None:
    """The attention of a language model has as many queries as the stated sequence has tokens."""
    for data in profiles._zoo():
        if stated := re.search(r"sequence of ([\d,]+) tokens", data["sample"]):
            queries = {each["size"][1] for each in data["ops"] if each["kind"] == "attention"}
            assert queries == {int(stated[1].replace(",", ""))}, data["name"]
        else:
            assert data["sample"] == "image of 224 x 224 pixels"
