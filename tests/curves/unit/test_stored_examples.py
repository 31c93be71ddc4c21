"""Which pictures and the like of a rank are kept."""

from itertools import pairwise

import pytest

from cavvy.capabilities.curves import examples
from cavvy.capabilities.curves.examples import check, choose_removed
from cavvy.domain.figures import StepExample


def test_the_first_and_the_last_stay_and_the_rest_is_spread() -> None:
    steps = [*range(0, 100)]
    known: list[tuple[str, int, float | None, int]] = []
    for step in steps:
        known.append(("p", step, float(step), 10))
        removed = {*choose_removed(known)}
        known = [each for each in known if each[1] not in removed]
    kept = [number for _, number, _, _ in known]
    assert len(kept) == examples.MOST_STEPS
    assert (kept[0], kept[-1]) == (0, 99)
    gaps = [two - one for one, two in pairwise(kept)]
    assert max(gaps) <= 4


def test_the_name_with_the_most_bytes_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examples, "MOST_BYTES", 100)
    large = [("large", number, float(number), 40) for number in range(3)]
    assert choose_removed([*large, ("small", 9, None, 15)]) == [1]
    assert choose_removed([("one", 1, None, 101)]) == [1]


@pytest.mark.parametrize(
    ("kind", "data", "found"),
    [
        ("image", b"\xff\xd8\xff\xe0", "image/jpeg"),
        ("image", b"RIFF\0\0\0\0WEBP", "image/webp"),
        ("image", b"RIFF\0\0\0\0WAVE", None),
        ("audio", b"RIFF\0\0\0\0WAVE", "audio/wav"),
        ("text", b"\xff", None),
        ("image", b"<svg/>", None),
        ("table", b"3", None),
        ("histogram", b'{"edges": [0], "counts": [1]}', None),
    ],
)
def test_only_known_types_are_stored(kind: str, data: bytes, found: str | None) -> None:
    checked = check(StepExample(name="a", kind=kind, data=data))
    assert (checked[0] if checked else None) == found
