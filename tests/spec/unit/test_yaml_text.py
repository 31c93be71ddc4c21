"""Values that Cavvy writes as YAML are read back unchanged, by readers of YAML 1.1 and of 1.2."""

import pytest
import yaml

from cavvy.providers.formats.notes import dump_yaml
from cavvy.sdk.values import write_text
from cavvy.spec.tree import read_table

BREAKS = ["\x85", "\u2028", "\u2029", "\r", "\r\n", "\t", "\x0b", "\x0c", "\x1c", "\ufeff", "\xa0"]
SHAPES = ["{0}", "a{0}b", "a{0}b\nc\n", "{0}a\nb", "a\n{0}b\n", "a\nb{0}", "a\n\n{0}\n", "{0}\n"]
NUMBERS = ["1e-05", "1e5", "1.0e5", "-3E9", "0o7", "0x1f", "010", "08", "1_000", "12:30:00", ".5"]
WORDS = ["y", "N", "yes", "off", "no", "~", "null", "true", "=", "<<", ".nan", "2024-01-01", ""]


@pytest.mark.parametrize("mark", BREAKS, ids=ascii)
def test_characters_that_end_lines_elsewhere_are_kept(mark: str) -> None:
    texts = {f"t{index}": shape.format(mark) for index, shape in enumerate(SHAPES)}
    assert read_table(write_text(texts)) == texts
    assert yaml.safe_load(dump_yaml(texts)) == texts
    assert read_table(dump_yaml(texts)) == texts


@pytest.mark.parametrize("text", NUMBERS + WORDS)
def test_texts_that_look_like_other_values_stay_texts(text: str) -> None:
    written = dump_yaml({text: text})
    assert yaml.safe_load(written) == {text: text}
    assert read_table(written) == {text: text}
    if text in "yYnN" and text:  # PyYAML reads these as texts, other readers of 1.1 as booleans
        assert written == f"'{text}': '{text}'\n"


@pytest.mark.parametrize("number", [1e-05, -3e-09, 1e16, 1e22, 0.1, 1.5e-07, 5, 10**30])
def test_numbers_stay_numbers(number: float) -> None:
    assert yaml.safe_load(dump_yaml([number])) == [number]
    assert read_table(dump_yaml({"x": number})) == {"x": number}
