"""`cavvy chat`."""

import pytest

from cavvy.capabilities.language_models.chat_command import find_text
from cavvy.cli.view.failure import CommandFailure


def test_chat_says_which_answer_it_cannot_read() -> None:
    assert find_text(b'{"choices": [{"delta": {"content": "Hi"}}]}', "delta") == "Hi"
    with pytest.raises(CommandFailure, match="the answer is not JSON: <html>"):
        find_text(b"<html>", "message")
