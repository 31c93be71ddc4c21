"""Records on disk, written by several at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cavvy.providers.hosts.records import AgentExit, read, write


def test_two_that_write_one_record_at_once_do_not_take_each_others_file(tmp_path: Path) -> None:
    path = tmp_path / "exit.json"

    def write_often(code: int) -> None:
        for _ in range(300):
            write(path, AgentExit(exit_code=code))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write_often, range(4)))
    found = read(path, AgentExit)
    assert found is not None
    assert found.exit_code in range(4)
    assert [each.name for each in tmp_path.iterdir()] == ["exit.json"]
