"""Random numbers that need no saved state. The random numbers depend only on the run's seed, the
step and the rank.
"""

import random

import numpy as np
import torch

LARGE = 2**64


def mix(*numbers: int) -> int:
    """Mix several numbers into one 64-bit seed, with the finalizer of SplitMix64 (Steele et al.,
    OOPSLA 2014) for each number.
    """
    state = 0
    for number in numbers:
        state = (state ^ (number % LARGE)) + 0x9E3779B97F4A7C15 & LARGE - 1
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & LARGE - 1
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & LARGE - 1
        state ^= state >> 31
    return state


def sow(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, on the CPU and on this rank's accelerator."""
    sow_host(seed)
    if torch.accelerator.is_available():
        torch.get_device_module().manual_seed(seed % 2**63)


def sow_host(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators on the CPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed % 2**63)


def list_states() -> list[bytes]:
    """Return the states of the generators on the CPU. A state changes if a number is drawn."""
    name, keys, *rest = np.random.get_state(legacy=True)
    plain = [random.getstate(), name, np.asarray(keys).tobytes(), rest]
    return [repr(plain).encode(), torch.get_rng_state().numpy().tobytes()]
