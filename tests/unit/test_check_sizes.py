"""The gate of sizes counts what it says."""

import ast
from pathlib import Path

import pytest
from scripts import check_sizes
from scripts.check_sizes import complexity_of, measure


@pytest.mark.parametrize(
    ("body", "complexity"),
    [
        ("return 1", 1),
        ("return 1 if a and b or c else 2", 4),
        ("return [x for x in a if x if b]", 4),
        ("for x in a:\n  while b: pass", 3),
        ("try: a()\n except E: b()\n except F: c()\n finally: d()", 3),
        ("match a:\n  case 1: pass\n  case b if b: pass\n  case _: pass", 3),
        ("def g():\n  if a: pass\n return g", 2),
    ],
)
def test_complexity_counts_branches_operands_and_comprehensions(body: str, complexity: int) -> None:
    assert complexity_of(ast.parse(f"def f(a, b, c):\n {body}").body[0]) == complexity


def test_lines_tokens_and_branches_have_bounds_of_their_own() -> None:
    fits = "def f(x):\n" + "    x += 1\n" * 59
    assert measure("a.py", fits) == {}
    assert "61 lines" in measure("a.py", fits + "    x += 1\n")["a.py f"]
    wide = f"def f():\n    return [{'1, ' * 150}]  # and a comment\n"
    assert "308 tokens" in measure("a.py", wide)["a.py f"]
    assert measure("a.py", wide.replace("1, " * 4, "", 1)) == {}
    assert "complexity" in measure("a.py", f"def f(a):\n    return {'a or ' * 20}a\n")["a.py f"]
    assert measure("a.py", f"def f(a):\n    return {'a or ' * 19}a\n") == {}
    assert list(measure("a.py", "x = 1\n" * 601)) == ["a.py"]


def test_the_list_of_what_is_too_large_may_only_shrink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_sizes, "SOURCE", tmp_path)
    monkeypatch.setattr(check_sizes, "TO_SPLIT", tmp_path / "list.txt")
    (tmp_path / "list.txt").write_text("a.py f\n")
    (tmp_path / "a.py").write_text("def f(x):\n" + "    x += 1\n" * 60)
    assert check_sizes.list_faults() == []
    (tmp_path / "a.py").write_text("def f(x):\n    return x\n")
    assert check_sizes.list_faults() == ["a.py f is within bounds or gone: take it out of list.txt"]
