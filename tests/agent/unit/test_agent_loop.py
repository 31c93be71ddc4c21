"""The agent's loop: what was ready is told to whom it belonged."""

import os

from cavvy.agent.loop import READ, EventLoop


def test_a_file_that_gets_the_number_of_one_closed_in_the_same_round_is_not_taken_for_ready() -> (
    None
):
    loop, heard = EventLoop(), []
    ends = [os.pipe(), os.pipe()]
    readers = [reader for reader, _ in ends]
    for _, writer in ends:
        os.write(writer, b"x")
    fresh: list[int] = []

    def replace(reader: int) -> None:
        """Whoever comes first closes the other, whose number goes to a pipe in which nothing is."""
        heard.append(f"old {reader}")
        other = next(each for each in readers if each != reader)
        for each in readers:
            loop.unwatch(each)
        os.close(other)
        fresh.extend(os.pipe())
        assert other in fresh
        os.dup2(fresh[0], other)
        loop.watch(other, READ, lambda events: heard.append("new"))
        loop.after(0.01, loop.stop)

    for reader in readers:
        loop.watch(reader, READ, lambda events, reader=reader: replace(reader))
    loop.run()
    assert len(heard) == 1
    for each in {*readers, *(writer for _, writer in ends), *fresh}:
        os.close(each)
