"""The files that nodes download by hash."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cavvy.api.app_state import NodeDownloads


def test_threads_may_add_files_at_the_same_time(tmp_path: Path) -> None:
    """Each of them sees the drafts of the others, which vanish."""
    downloads = NodeDownloads(tmp_path / "downloads")
    contents = [str(number).encode() for number in range(400)]
    with ThreadPoolExecutor(8) as threads:
        names = list(threads.map(downloads.put, contents))
    assert len(set(names)) == len(contents)
    assert {each.name for each in (tmp_path / "downloads").iterdir()} == set(names)
    assert all(downloads.find(name) for name in names)
