"""Parameters: types, overrides, substitution."""

import json
from collections.abc import Mapping

import pytest

from cavvy.domain.tasks import Scalar, TaskSpec
from cavvy.spec import SpecError
from cavvy.spec.fields.params import escape
from cavvy.spec.tree import MAX_CHARACTERS
from cavvy.task_files import parse_file, parse_task


def task(params: str, run: str = "run: x", given: Mapping[str, Scalar] = {}) -> TaskSpec:
    return parse_task(f"name: t\nparams: {params}\n{run}\n", params=given)


def problems(params: str, run: str = "run: x", given: Mapping[str, Scalar] = {}) -> str:
    with pytest.raises(SpecError) as caught:
        task(params, run, given)
    return str(caught.value)


def test_a_default_gives_the_type() -> None:
    assert task("{a: 1, b: 0.5, c: x, d: true, e: '1'}").params == {
        "a": 1,
        "b": 0.5,
        "c": "x",
        "d": True,
        "e": "1",
    }


def test_names_may_contain_hyphens() -> None:
    """As hyperparameters of SageMaker often do."""
    made = task("{learning-rate: 0.1}", 'run: "train --lr ${{ params.learning-rate }}"')
    assert (made.params, made.run) == ({"learning-rate": 0.1}, "train --lr 0.1")
    assert task("{learning-rate: 0.1}", given={"learning-rate": "1e-3"}).params == {
        "learning-rate": 0.001
    }


@pytest.mark.parametrize(
    ("declared", "text", "value"),
    [
        ("0.1", "1e-3", 0.001),
        ("0.1", "2", 2.0),
        ("1", "-7", -7),
        ("true", "false", False),
        ("x", "true", "true"),
        ("x", "", ""),
        ("{type: int}", "4", 4),
        ("{type: float, default: 1}", "3", 3.0),
    ],
)
def test_overrides_take_the_declared_type(declared: str, text: str, value: Scalar) -> None:
    got = task(f"{{p: {declared}}}", given={"p": text}).params["p"]
    assert got == value
    assert type(got) is type(value)


def test_overrides_may_be_values_as_an_api_sends_them() -> None:
    assert task("{a: 1, b: false}", given={"a": 2, "b": True}).params == {"a": 2, "b": True}


@pytest.mark.parametrize(
    ("declared", "given", "words"),
    [
        ("{lr: 0.1}", {"lrr": "1"}, "did you mean `--param lr=…`?"),
        ("{lr: 0.1}", {"lr": "fast"}, "--param lr=fast: 'fast' is not a number"),
        ("{n: 1}", {"n": "1.5"}, "`type: float`"),
        ("{b: true}", {"b": "yes"}, "write true"),
        ("{n: {type: int}}", {}, "no default and was not set"),
        ("{n: {default: 5, max: 3}}", {}, "above the maximum, 3"),
        ("{n: {default: 1, min: 3, max: 2}}", {}, "min 3 is above max 2"),
        ("{n: {default: 1, max: 3}}", {"n": "4"}, "above the maximum"),
        ("{o: {default: a, choices: [adam, sgd]}}", {"o": "sdg"}, "did you mean sgd?"),
        ("{n: {type: integer, default: 1}}", {}, "did you mean `int`?"),
        ("{n: {default: 1, minimum: 3}}", {}, "write `min`"),
        ("{-a: 1}", {}, "cannot be a parameter's name"),
        ("{a-b: 1, A_B: 2}", {}, "would both be CAVVY_PARAM_A_B"),
        ("{lr: 1, LR: 2}", {}, "CAVVY_PARAM_LR"),
        ("{s: {default: a, min: 1}}", {}, "cannot have `min` or `max`"),
        ("{a: '${{ params.b }}'}", {}, "cannot refer to others"),
        ("{a: 1.0e999}", {}, "is too large for a number"),
        ("{a: 0.1}", {"a": "1e999"}, "is not a number"),
        ("[lr]", {}, "where a table was expected"),
        ("{}", {"x": "1"}, "to declare it, add `params: {x: …}`"),
        ("{s: a}", {"s": "\0"}, "NUL byte"),
    ],
)
def test_what_does_not_fit_is_explained(declared: str, given: dict[str, str], words: str) -> None:
    assert words in problems(declared, given=given)


def test_values_are_put_into_texts_as_written() -> None:
    run = (
        "run: |\n  a ${{params.lr}} $${{ kept }}\n  b ${{ params.name }}\nenv: {A: '${{ "
        "params.lr }}x'}"
    )
    got = task("{lr: 1e-3, name: a b}", run)
    assert got.run == "a 1e-3 ${{ kept }}\nb a b\n"
    assert got.env == {"A": "1e-3x"}


@pytest.mark.parametrize(
    "text", ["${{", "$${{ x", "${{ params.lr }}", "$$${{ a }} ${{", "}} ${{ ${{ }}", "a $"]
)
def test_what_is_escaped_comes_back(text: str) -> None:
    assert task("{lr: 1}", f"run: {json.dumps(escape(text))}").run == text


def test_a_whole_value_keeps_the_type_of_its_parameter() -> None:
    got = task(
        "{n: 3, gpu: H100:8}",
        "run: x\nnodes: ${{ params.n }}\nresources: {gpu: '${{ params.gpu }}'}",
    )
    assert got.nodes == 3
    assert got.resources.accelerators[0].count_min == 8


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        (
            "run: |\n  a\n  b ${{ params.lr }} ${{ params.rl }}",
            ":5:22:",
            "did you mean `params.lr`?",
        ),
        ("run: 'x ${{ secrets.T }}'", ":3:9:", "list it under `secrets:` and use it as $T"),
        ("run: x ${{ lr }}", ":3:8:", "did you mean `${{ params.lr }}`?"),
        ("run: 'x ${{ params.lr'", ":3:6:", "never closed"),
    ],
)
def test_a_wrong_expression_is_pointed_at(text: str, place: str, words: str) -> None:
    said = problems("{lr: 1}", text)
    assert place in said
    assert words in said


def test_inserted_values_cannot_blow_up() -> None:
    text = f"{{a: {'x' * 10_000}}}"
    assert len(task(text, f"run: '{'${{ params.a }}' * 100}'").run) == 1_000_000
    said = problems(text, f"run: '{'${{ params.a }}' * 200}'\nenv: {{A: '${{{{ params.a }}}}'}}")
    assert f"more than {MAX_CHARACTERS:,} characters" in said
    assert said.count("hint:") == 1


def test_expressions_that_are_not_closed_are_read_once() -> None:
    """A search that read the rest for each of them would take longer than any test may."""
    assert "never closed" in problems("{a: 1}", f"run: '{'${{ ' * 200_000}'")


def test_a_wrong_parameter_causes_no_second_problem() -> None:
    with pytest.raises(SpecError) as caught:
        task("{n: 1}", "run: x\nnodes: ${{ params.n }}", {"n": "many"})
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("params: {lr: 1}\nrun: echo {{ params.lr }}\n", "{{ params.lr }}"),
        ("params: {lr: 1}\nrun: echo {{lr}} {{ other }}\n", "{{lr}}"),
        ("params: {lr: 1}\nsetup: echo ${params.lr}\nrun: x\n", "${params.lr}"),
        ("env: {A: $HOME/x}\nrun: x\n", "$HOME"),
        ("env:\n  TOKEN: ${HF_TOKEN}\nrun: x\n", "${HF_TOKEN}"),
    ],
)
def test_a_text_that_is_not_replaced_gets_a_note(text: str, told: str) -> None:
    (note,) = parse_file(text).notes
    assert told in note
    assert "not replace" in note or "not expanded" in note


@pytest.mark.parametrize(
    "text",
    [
        "params: {lr: 1}\nrun: echo ${{ params.lr }} ${lr} $${{ params.lr }}\n",
        "run: echo {{ item }} ${A:-b}\nenv: {A: 'costs 5$', B: $, C: $(date), D: '$1'}\n",
    ],
)
def test_other_texts_get_no_note(text: str) -> None:
    assert parse_file(text).notes == ()
