"""Models that others have made, in a folder of the user."""

from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import pytest
from tests.blob_source import BlobSource

from cavvy.capabilities.models.command import _agree_to_files
from cavvy.cli.view.failure import CommandFailure
from cavvy.client.landing import Receipts


def test_a_model_arrives_in_a_folder_of_the_user_after_a_question(tmp_path: Path) -> None:
    (tmp_path / ".bashrc").write_text("mine\n")
    blobs = {sha256(data).hexdigest(): data for data in (b"evil\n", b"mine\n")}
    evil, mine = blobs
    source, receipts = cast(Any, BlobSource(blobs)), Receipts(tmp_path, str(tmp_path / "state"))
    with pytest.raises(CommandFailure, match=r"replaced: \.bashrc; nothing was written"):
        _agree_to_files(source, "p", tmp_path, [(".bashrc", evil, 5)], receipts, False)
    files = [(".bashrc", mine, 5), ("Makefile", mine, 5)]
    with pytest.raises(CommandFailure, match=r"new in it: Makefile; nothing was written"):
        _agree_to_files(source, "p", tmp_path, files, receipts, False)
    _agree_to_files(source, "p", tmp_path, [(".bashrc", mine, 5)], receipts, False)
    _agree_to_files(source, "p", tmp_path, [(".bashrc", evil, 5)], receipts, True)
