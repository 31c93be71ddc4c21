"""What holds for every cloud that is reached by the key of a Google service account."""

import asyncio
import json

import pytest
from tests.contract.gcp_stand_in import PROJECT, make_key

from cavvy.providers.base import Refused
from cavvy.providers.contract.rest_cloud import RestContract, RestPlace


@pytest.mark.usefixtures("keys_read_once")
class ServiceAccountContract(RestContract):
    def test_a_wrong_key_is_refused(self, account: RestPlace) -> None:
        name, told = self.package.MANIFEST.name, json.loads(account.file.read_text())
        account.file.write_text(json.dumps({**told, "private_key": make_other_key()}))
        with pytest.raises(Refused, match=rf"\[providers.{name}\].*sign in again with"):
            asyncio.run(account.provider("ours").offers())
        account.file.write_text("wrong")
        with pytest.raises(Refused, match=rf"\[providers.{name}\] key_file: .* is not the key"):
            asyncio.run(account.provider("ours").offers())

    def test_facts_tell_where_the_key_was_found_and_not_the_key(self, account: RestPlace) -> None:
        facts = asyncio.run(account.provider("ours").whoami())
        email = f"cavvy@{PROJECT}.iam.gserviceaccount.com"
        assert ("credentials", f"{email} ({account.file})") in facts
        assert ("project", PROJECT) in facts
        assert self.stand_in.key not in str(facts)
        assert "PRIVATE KEY" not in str(facts)


def make_other_key() -> str:
    """The private key of another account."""
    return make_key.__wrapped__()[0]
