"""Pages over an older server, which lacks a route, or for a user whose role does not permit it."""

import pytest
from tests.console_rig import CannedClient, listing, sign_in

from cavvy.client import ApiError, IncompatibleVersions, wire
from cavvy.client.transport import HttpAnswer

MISSING = IncompatibleVersions("server-too-old", "the server is older than this client", "", 404)
FORBIDDEN = ApiError("role-needed", "your role does not permit this", "", 403)


class OlderServer(CannedClient):
    """A server that knows only the lists of jobs."""

    refusal: ApiError = MISSING

    def send(self, method: str, target: str, *arguments: object, **named: object) -> HttpAnswer:
        if target.partition("?")[0] not in self.answers:
            raise self.refusal
        return super().send(method, target, *arguments, **named)

    def sibling(self) -> "OlderServer":
        made = OlderServer(self.answers, self.asked)
        made.refusal = self.refusal
        return made


@pytest.mark.parametrize("refusal", [MISSING, FORBIDDEN])
@pytest.mark.parametrize("page", ["/", "/jobs"])
def test_a_page_shows_what_the_server_gives(page: str, refusal: ApiError) -> None:
    jobs = [listing("train")]
    listed, found = wire.JobPage(jobs=jobs, cursor=None), wire.JobMatches(jobs=jobs, total=1)
    client = OlderServer({"/v1/jobs": listed, "/v1/job-search": found})
    client.refusal = refusal
    answer = sign_in(client).get(page)
    assert answer.status_code == 200
    assert "train" in answer.text
