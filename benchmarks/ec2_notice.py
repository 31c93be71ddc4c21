"""Runs a training on a simulated EC2, which interrupts it with the real notice of two minutes:
`python benchmarks/ec2_notice.py`.

Needs root, like the tests of EC2. The first offer has no capacity, the instance of the second is
reclaimed, and the third finishes the job. Afterwards, the weights must equal those of an
undisturbed run, the bill must be the sum of the instances' lifetimes, and no object may be left in
the cloud.
"""

import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.providers.aws.system.test_aws_jobs import be_interrupted, quick_ec2_at, user_of

NOTICE = timedelta(minutes=2)


def main() -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rm-") as folder:
        root = Path(folder)
        with quick_ec2_at(root / "ec2") as ec2:
            with user_of(ec2, root / "user") as user:
                be_interrupted(ec2, user, NOTICE)
            taken = next(life for life in ec2.cloud.history if life.taken_at is not None)
            assert taken.taken_at is not None
            assert taken.shut_at is not None
            early = (taken.taken_at - taken.shut_at).total_seconds()
            assert ec2.cloud.left() == {}
    print(
        f"a notice of {NOTICE.total_seconds():.0f} s: the node was given back {early:.0f} s before "
        "EC2 would take it"
    )
    print(f"the whole scenario took {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
