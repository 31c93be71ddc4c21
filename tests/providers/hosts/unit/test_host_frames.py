"""The framing of all links: frames survive any cutting of the stream; nonsense is refused."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cavvy.providers.hosts.supervisor.frames import LIMIT, FrameReader, encode_frame

FRAMES = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(["id", "do", "näme"]), st.integers() | st.text(max_size=9)),
        st.binary(max_size=40),
    ),
    max_size=6,
)


@settings(deadline=None)
@given(FRAMES, st.lists(st.integers(0, 400), max_size=8))
def test_frames_arrive_as_they_were_sent_however_the_stream_is_cut(
    frames: list[tuple[dict[str, object], bytes]], cuts: list[int]
) -> None:
    stream = b"".join(encode_frame(head, data) for head, data in frames)
    ends = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader = FrameReader()
    parts = [stream[begin:end] for begin, end in pairwise(ends)]
    assert [frame for part in parts for frame in reader.feed(part)] == frames


def test_a_frame_without_bytes_is_one_line_of_json() -> None:
    assert encode_frame({"id": 1}) == b'{"id":1}\n'
    assert FrameReader().feed(b'{"id": 1, "do": "look"}\n') == [({"id": 1, "do": "look"}, b"")]


@pytest.mark.parametrize(
    "stream",
    [
        b"Welcome to this host\n",
        b"[1]\n",
        b"\xff\n",
        json.dumps({"size": -1}).encode() + b"\n",
        json.dumps({"size": "8"}).encode() + b"\n",
        json.dumps({"size": LIMIT + 1}).encode() + b"\n",
    ],
)
def test_what_is_no_frame_is_refused(stream: bytes) -> None:
    with pytest.raises(ValueError):
        FrameReader().feed(stream)


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    reader = FrameReader()
    assert reader.feed(b" " * LIMIT) == []
    with pytest.raises(ValueError, match="longer than"):
        reader.feed(b" ")
