"""The page of error codes has what the gateway answers, with each status."""

import re
from pathlib import Path

from cavvy.api.errors import reference
from cavvy.capabilities.serving.gateway.own_answers import AnswerCode

CAPABILITIES = Path(__file__).resolve().parents[3] / "src/cavvy/capabilities"
_ROW = re.compile(r"^\| `([\w-]+)` \| ([\d, ]+) \|", re.MULTILINE)
_SENT = re.compile(r"(?:OwnAnswer|_write_limit)\(\s*(\d{3}),\s*AnswerCode\.(\w+)")
_OF_HAPROXY = re.compile(r"(\d{3}): \(AnswerCode\.(\w+),")


def test_the_page_has_every_code_that_the_gateway_answers_with_its_statuses() -> None:
    _, _, table = reference().partition("## Answers of services")
    listed = dict(_ROW.findall(table.partition("\n## ")[0]))
    assert set(listed) == {each.value for each in AnswerCode}
    source = "".join(path.read_text("utf-8") for path in CAPABILITIES.rglob("*.py"))
    sent = {(AnswerCode[name].value, status) for status, name in _SENT.findall(source)}
    sent |= {(AnswerCode[name].value, status) for status, name in _OF_HAPROXY.findall(source)}
    assert len(sent) > len(AnswerCode)  # the patterns still find them
    assert sent - {(code, each) for code in listed for each in listed[code].split(", ")} == set()
