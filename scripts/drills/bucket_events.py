"""Each object of a bucket gets one result, though the server is killed (SIGKILL) while it works.

    python scripts/drills/bucket_events.py --objects 1000 --kills 2

The bucket is a SeaweedFS on this machine, and the replica runs on this machine. Each result must be
the content of its object. A replica may get a call again if the server was killed before it stored
the result; the drill prints how often that happened. The exit code is 1 if anything is wrong.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.system.event_calls import check_each_once, put_objects, serve_reader  # noqa: E402
from tests.system.storages import start_s3  # noqa: E402
from tests.system.trust import user_at  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--objects", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keys = start_s3(Path(folder) / "s3")
        put_objects(keys, "drill", given.objects)
        with user_at(Path(folder) / "user") as user:
            begun = time.monotonic()
            try:
                serve_reader(user, keys, "drill")
                check_each_once(user, "drill", given.objects, given.kills)
                took_s = time.monotonic() - begun
                calls = (user.work / "called").read_text().split()
            finally:
                user.cli("server", "stop", code=None)
    print(
        f"{given.objects} objects, {given.kills} kills: {given.objects} results, each once, in "
        f"{took_s:.0f} s; {len(calls) - len(set(calls))} calls were repeated"
    )


if __name__ == "__main__":
    main()
