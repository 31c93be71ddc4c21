"""What a device takes from its server."""

import json

import pytest

from cavvy.edge.bundle import make_script
from cavvy.edge.device import read_wanted


def test_the_wanted_models_are_read() -> None:
    told = {"name": "m", "number": 2, "mib_per_s": 1, "window": [22, 6], "later": "ignored"}
    [wanted] = read_wanted(json.dumps({"models": [told]}).encode())
    assert wanted == {
        "name": "m",
        "number": 2,
        "rollout": 0,
        "collect_below": None,
        "mib_per_s": 1.0,
        "window": [22, 6],
        "wait": False,
        "site_window": [],
    }


@pytest.mark.parametrize(
    "model",
    [
        {"name": "../../home/me", "number": 1},
        {"name": "/etc", "number": 1},
        {"name": "", "number": 1},
        {"name": 1, "number": 1},
        {"name": "m"},
        {"name": "m", "number": [1]},
        {"name": "m", "number": 1e999},
        {"name": "m", "number": 1, "window": 3},
        {"name": "m", "number": 1, "collect_below": "x"},
        "m",
        None,
    ],
)
def test_no_answer_of_the_server_ends_the_program(model: object) -> None:
    for answer in ({"models": [model]}, {}, [], None):
        with pytest.raises(ValueError):
            read_wanted(json.dumps(answer).encode())


def test_the_token_is_not_among_the_arguments_of_the_program() -> None:
    lines = make_script("https://h", ("p", "k"), "0" * 64).splitlines()
    [started] = [line for line in lines if line.startswith("exec") and "https://h" in line]
    assert "$1" not in started  # any user of the device can list arguments
