"""A missing secret is reported before the folder is uploaded."""

from pathlib import Path

import pytest
from tests.system.trust import user_at

pytestmark = pytest.mark.system
SERVED = """
name: hook
run: "true"
workdir: .
service: {events: [{webhook: push, secret: PUSH}, {webhook: other, secret: OTHER}]}
"""
RUN = "{name: job, run: 'true', workdir: ., secrets: [PUSH]}"


def test_a_missing_secret_is_reported_before_the_upload(tmp_path: Path) -> None:
    with user_at(tmp_path) as user:
        said = user.cli("serve", user.task(SERVED), code=1)
        assert "project default has no secret PUSH, OTHER" in said
        assert "cavvy secret set PUSH -p default; cavvy secret set OTHER -p default" in said
        assert "working folder" not in said, "nothing was uploaded"
        said = user.cli("run", user.task(RUN), code=1)
        assert "project default has no secret PUSH" in said
        assert "working folder" not in said
