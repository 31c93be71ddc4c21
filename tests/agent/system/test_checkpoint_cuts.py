"""A power cut at any moment leaves a whole checkpoint of programs that write all the time, real
trainers among them. `scripts/drills/checkpoint_cuts.py` cuts more often and measures how old the
resumed states are.
"""

import pytest
from scripts.drills.checkpoint_cuts import cut_often
from scripts.drills.checkpoint_writers import WRITERS
from tests.system.workload_packages import PACKAGES_OF_TESTS, find_python

pytestmark = pytest.mark.system
CUTS = 2


@pytest.mark.parametrize("name", WRITERS)
def test_a_program_resumes_from_a_whole_checkpoint(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = WRITERS[name]
    if writer.modules:
        pytest.importorskip("torch", reason="PyTorch is not installed")
    python, why = find_python(writer.modules)
    if python is None:
        pytest.skip(f"not all of {', '.join(writer.modules)} can be installed: {why}")
    for key, value in PACKAGES_OF_TESTS.items():
        monkeypatch.setenv(key, value)
    ages, faults = cut_often(writer, [python], cuts=CUTS, every_s=2.0, seed=7)
    assert not faults
    assert len(ages) == CUTS
