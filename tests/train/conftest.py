"""Fixtures of the tests of training."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    """Scripts that are measured have PyTorch imported."""
    from tests.train.warm_probe import warm_probes

    with warm_probes():
        yield
