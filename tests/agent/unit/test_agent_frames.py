"""Frames of a tunnel survive any cutting of the stream, and a frame above the limit is refused."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cavvy.agent.access.frames import DATA, HEAD, encode_frame, read_frames

FRAMES = st.lists(
    st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 13), st.binary(max_size=40)), max_size=6
)


@settings(deadline=None)
@given(FRAMES, st.lists(st.integers(0, 400), max_size=8))
def test_frames_arrive_as_they_were_sent_however_the_stream_is_cut(
    frames: list[tuple[int, int, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(encode_frame(*frame) for frame in frames)
    ends = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    buffer, read = bytearray(), []
    for begin, end in pairwise(ends):
        buffer += stream[begin:end]
        read += read_frames(buffer)
    assert (read, buffer) == (frames, b"")


def test_a_frame_above_the_limit_is_refused_before_its_payload_arrives() -> None:
    buffer = bytearray(encode_frame(1, DATA, b"fits") + HEAD.pack(2, DATA, 5))
    frames = read_frames(buffer, lambda number, kind: 4)
    assert next(frames) == (1, DATA, b"fits")
    with pytest.raises(ValueError, match="too large"):
        next(frames)
