"""A script for torchrun: sharded training in which rank 1 runs out of memory at step 3."""

import json
import os
import sys
from pathlib import Path

from tests.train.programs import split_and_short

from cavvy import train


def main(folder: Path) -> None:
    rank = os.environ["RANK"]
    with (folder / f"starts-{rank}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    os.chdir(folder)
    found = split_and_short(lambda said: None, train.Plan(shards=2), 5, 3, 1, 11)
    result = [found["steps"], len(found["losses"]), found["losses"], found["micro"]]
    (folder / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
