"""Files of a task that change between their snapshot and their upload."""

from pathlib import Path

import pytest

from cavvy.client.errors import SourceChanged
from cavvy.sdk.files import send_frozen
from cavvy.spec.workdir import FolderSnapshot, freeze


@pytest.mark.parametrize("changes", [0, 2])
def test_a_new_snapshot_is_sent_if_a_file_changes(tmp_path: Path, changes: int) -> None:
    (tmp_path / "a").write_text("0")
    sent: list[FolderSnapshot] = []

    def send(snapshot: FolderSnapshot) -> int:
        sent.append(snapshot)
        if len(sent) <= changes:
            (tmp_path / "a").write_text(str(len(sent)))
            raise SourceChanged("a")
        return 7

    assert send_frozen(lambda: freeze(tmp_path), send) == (freeze(tmp_path), 7)
    assert len({snapshot.hash for snapshot in sent}) == changes + 1


def test_a_file_that_keeps_changing_is_told(tmp_path: Path) -> None:
    def send(snapshot: FolderSnapshot) -> int:
        raise SourceChanged("a")

    with pytest.raises(SourceChanged, match="a changed before it was uploaded"):
        send_frozen(lambda: freeze(tmp_path), send)
