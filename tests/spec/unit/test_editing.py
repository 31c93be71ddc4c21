"""A key of a task file is changed, and the rest of the text stays."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from cavvy.spec.editing import NotEditable, read_key, set_key

FILE = """\
# trains
name: train
resources:  # of a node
  gpu: H100:8  # the fastest
  spot: auto
limits: {duration: 12h, budget: 400}
run: |
  python train.py
"""
GPU = ("resources", "gpu")


@pytest.mark.parametrize("value", ["7h", ""])
@pytest.mark.parametrize("path", [("limits", "duration"), ("limits", "idle"), GPU])
@pytest.mark.parametrize(
    "text",
    [
        "env: {H: &h 12h}\nlimits: {duration: *h}\nresources: {gpu: A100}\n",
        "env: &e {duration: 12h, idle: 5m}\nlimits: *e\nresources: {gpu: A100}\n",
        "env: &e {duration: 12h}\nlimits: {<<: *e, idle: 5m}\nresources: {gpu: A100}\n",
        "limits: {duration: &h 12h}\nenv: {H: *h}\nresources: {gpu: A100}\n",
    ],
)
def test_a_value_that_stands_at_several_places_is_not_changed(
    text: str, path: tuple[str, str], value: str
) -> None:
    with pytest.raises(NotEditable, match=r"an anchor or an alias, [he], in line 1"):
        set_key(text, path, value)
    with pytest.raises(NotEditable):
        read_key(text, path)


@pytest.mark.parametrize(
    ("path", "value", "line", "changed"),
    [
        (GPU, "A100:2", "  gpu: H100:8  # the fastest", "  gpu: A100:2  # the fastest"),
        (("resources", "regions"), "[eu]", "  gpu: H1", "  regions: [eu]\n  gpu: H1"),
        (("limits", "budget"), "25", "budget: 400", "budget: 25"),
        (("limits", "idle"), "5m", "{duration", "{idle: 5m, duration"),
        (("limits", "budget"), "", ", budget: 400", ""),
        (("limits", "duration"), "", "duration: 12h, ", ""),
        (GPU, "", "  gpu: H100:8  # the fastest\n", ""),
        (("retry", "exit"), "1", "run: |", "retry:\n  exit: 1\nrun: |"),
    ],
)
def test_only_the_key_is_changed(
    path: tuple[str, str], value: str, line: str, changed: str
) -> None:
    found = set_key(FILE, path, value)
    assert found == FILE.replace(line, changed)
    assert read_key(found, path) == value


def test_a_table_without_keys_is_removed_and_made() -> None:
    text = "name: a\nresources:\n  gpu: T4\n# end\nrun: x\n"
    without = set_key(text, GPU, "")
    assert without == "name: a\n# end\nrun: x\n"
    assert set_key(without, GPU, "") == without
    assert set_key("name: a\nresources:\nrun: x", GPU, "T4") == (
        "name: a\nresources:\n  gpu: T4\nrun: x"
    )
    assert set_key("name: a", GPU, "T4") == "name: a\nresources:\n  gpu: T4\n"
    assert set_key("resources: {}\n", GPU, "T4") == "resources: {gpu: T4}\n"
    assert set_key("resources:\n  gpu:\n  spot: auto\n", GPU, "T4").splitlines()[1] == "  gpu: T4"


def test_a_list_is_read_as_it_stands() -> None:
    text = "resources:\n  gpu:\n    - H100:8\n    - A100:8\n  spot: auto\n"
    assert read_key(text, GPU) == "- H100:8\n    - A100:8"
    found = set_key(text, GPU, "T4")
    assert yaml.safe_load(found) == {"resources": {"gpu": "T4", "spot": "auto"}}


@pytest.mark.parametrize("text", ["", "a: [", "- 1\n", "{a: 1}\n", "a: 1\n---\nb: 2\n", "x"])
def test_what_is_no_table_of_keys_is_refused(text: str) -> None:
    with pytest.raises(NotEditable):
        set_key(text, GPU, "T4")


KEYS = st.sampled_from(["gpu", "spot", "cpu", "regions"])
VALUES = st.sampled_from(["T4", "H100:8", "[eu, us]", "auto", "4+", '"x y"'])


@given(st.dictionaries(KEYS, VALUES), KEYS, VALUES | st.just(""), st.booleans())
def test_the_file_means_the_same_but_for_the_key(
    given: dict[str, str], key: str, value: str, flow: bool
) -> None:
    pairs = [f"{name}: {text}" for name, text in given.items()]
    table = " {" + ", ".join(pairs) + "}\n" if flow else "\n" + "".join(f"    {p}\n" for p in pairs)
    text = f"name: x # c\nresources:{table}run: |\n  gpu: 1\n\n  y\nnodes: 2\n"
    before = yaml.safe_load(text)
    after = yaml.safe_load(set_key(text, ("resources", key), value))
    wanted = {**(before["resources"] or {}), key: yaml.safe_load(value) if value else None}
    wanted = {name: each for name, each in wanted.items() if name != key or value}
    assert (after.get("resources") or {}) == wanted
    assert {**after, "resources": 0} == {**before, "resources": 0}
