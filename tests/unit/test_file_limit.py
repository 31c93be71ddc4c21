"""The server raises its limit on open files."""

import resource
import subprocess
import sys

import pytest

CODE = """
import resource
from cavvy.api.embedded import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
raise_file_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("hard", "soft"), [(300, 300), (5000, 5000), (70_000, 65_536)])
def test_the_limit_is_raised_as_far_as_permitted(hard: int, soft: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip(f"the hard limit of this process is below {hard}: run `ulimit -Hn {hard}`")
    command = [sys.executable, "-c", CODE.format(hard=hard)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout.split() == [str(soft), str(hard)]
