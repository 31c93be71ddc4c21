"""Suggests a built-in model for a name that none has, such as llama-8b for llama-7b."""

import re
from collections.abc import Mapping
from difflib import SequenceMatcher, get_close_matches
from math import inf, log

# The size in a name, such as 7b in llama-7b, 0.5B in Qwen2.5-0.5B, or 110m in bert-110m.
_SIZE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)([mb])(?![a-z])")
_UNITS = {"m": 1e6, "b": 1e9}
_FAR = log(4)  # models that differ by more are not alike
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def suggest_model(name: str, parameters: Mapping[str, int]) -> str | None:
    """Return the built-in model that is nearest to `name`, or None if none is similar. `parameters`
    contains the number of parameters of each built-in model.

    If the name states a size, that of the same family counts, and else that of any model. Other
    numbers, such as in resnet56, are compared within the family, and other names by spelling.
    """
    asked = name.lower().rpartition("/")[2]
    plain = {_plain(each): each for each in parameters}
    if same := plain.get(_plain(asked)):
        return same
    kin = list_kin(asked, parameters)
    if (wanted := read_size(asked)) is not None:
        near = min(kin or parameters, key=lambda each: _ratio(wanted, parameters[each]))
        if _FAR < _ratio(wanted, parameters[near]) < inf:  # a family without a model of such a size
            near = min(parameters, key=lambda each: _ratio(wanted, parameters[each]))
        return near
    numbers = {each: float(found[-1]) for each in kin if (found := _NUMBER.findall(each))}
    if numbers and (written := _NUMBER.findall(asked)):
        number = float(written[-1])
        return min(
            numbers,
            key=lambda each: (
                _ratio(number, numbers[each]),
                -SequenceMatcher(None, asked, each).ratio(),
            ),
        )
    return next(iter(get_close_matches(asked, parameters, n=1)), None)


def read_size(name: str) -> float | None:
    """Return the number of parameters that a name states, such as 7e9 for llama-7b, or None."""
    stated = _SIZE.search(name.lower().rpartition("/")[2])
    return float(stated[1]) * _UNITS[stated[2]] if stated else None


def list_kin(name: str, parameters: Mapping[str, int]) -> list[str]:
    """Return the built-in models of the family of `name`, the smallest first."""
    words = set(re.findall(r"[a-z]+", name.lower().rpartition("/")[2]))
    kin = [each for each in parameters if _family(each) in words]
    return sorted(kin, key=lambda each: parameters[each])


def say_suggestion(name: str, parameters: Mapping[str, int]) -> str:
    """Return a hint with the nearest built-in model and the sizes of its family. If none is
    similar, the hint lists all models, or is "" if the name is that of a file.
    """
    close = suggest_model(name, parameters)
    if close is None:
        if re.search(r"[/\\]|\.[a-z]\w*$", name, re.IGNORECASE):
            return ""
        every = sorted(parameters, key=lambda each: parameters[each])
        sizes = [f"{each} ({say_size(parameters[each])})" for each in every]
        return (
            f"to name a model, state its size, such as `--model {name}-7b`, and the nearest one "
            f"is suggested. Built in, with their parameters: {', '.join(sizes)}"
        )
    sizes = [
        f"{each} ({say_size(parameters[each])} parameters)" for each in list_kin(close, parameters)
    ]
    return f"did you mean `--model {close}`? Built in: {', '.join(sizes)}"


def say_size(parameters: int) -> str:
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M"


def _family(name: str) -> str:
    return re.split(r"[^a-z]", name, maxsplit=1)[0]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def _ratio(one: float, other: float) -> float:
    """Return how many times one number is the other, as a logarithm."""
    return abs(log(one / other)) if one and other else 0.0 if one == other else inf
