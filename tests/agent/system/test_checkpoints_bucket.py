"""Checkpoints in a bucket: sent by signed requests, resumed from there, swept, and whole
whatever is killed.
"""

import random
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from secrets import token_hex

import pytest
from tests.system.server_state import follow_to_end
from tests.system.storages import servers, start_s3

from cavvy.client import connect
from cavvy.store.objects.base import ObjectBucket
from cavvy.store.objects.locations import open_place

__all__ = ["servers"]
pytestmark = pytest.mark.system
RUN = """
name: saver
retry: {preemption: 3}
checkpoint: {path: state, every: 60s, storage: s3://data/FOLDER/here}
run: |
  ls state
  if test "$CAVVY_ATTEMPT" = 1; then
    python3 -c "import random; open('state/big', 'wb').write(random.Random(7).randbytes((20 << 20) + 5))"
    mkdir -p state/deep; echo one >state/deep/a; chmod 750 state/deep/a; ln -s deep/a state/link
    exit 75
  fi
  if test "$CAVVY_ATTEMPT" = 2; then rm state/deep/a; echo two >state/deep/a; exit 75; fi
  sha256sum state/big; cat state/link; stat -c %a state/deep/a
  test "$CAVVY_ATTEMPT" = 4 || { echo three >state/deep/a; exit 75; }
"""


def test_a_job_saves_to_a_bucket_and_goes_on_from_it(home: Path, servers: Path) -> None:
    keys, folder = (
        start_s3(servers / "s3"),
        f"kept-{token_hex(4)}",
    )  # the server stays, for other tests and tries
    place = open_place("s3://data/x", keys, lambda: datetime.now(UTC)).place
    assert isinstance(place, ObjectBucket)
    with connect() as client:
        for name, value in keys.items():
            client.put_secret("default", name, value)
        client.submit(RUN.replace("FOLDER", folder))
        follow_to_end(client, "saver")
        job = client.job("default", "saver")
        events = "\n".join(each.text for each in client.events("default", "saver").events)
        assert (job.phase, job.attempt) == ("done", 4), events
        log = b"".join(client.logs("default", "saver", attempt=4)).decode().splitlines()
    digest = random.Random(7).randbytes((20 << 20) + 5)
    assert log == [
        "big",
        "deep",
        "link",
        f"{sha256(digest).hexdigest()}  state/big",
        "three",
        "644",
    ]
    assert "checkpoint 3 is safe" in events
    assert "resuming from checkpoint 3 of attempt 3" in events
    kept, _ = place.list(f"{folder}/here/default/")
    assert (
        len(kept) == 2 + 1 + 2
    )  # two lists of files, the large one once, and the small one of each
    assert not list(
        (home / "storage").glob("default/*/blobs/*")
    )  # nothing of it lies at the server
