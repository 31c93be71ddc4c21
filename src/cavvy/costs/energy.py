"""Weighs measured energy by the emissions of the grids that it came from."""

from collections.abc import Iterable, Mapping

from cavvy.catalog.regions import find_grid
from cavvy.domain.ledger import EnergyUse
from cavvy.domain.values import Struct

_KWH_J = 3_600_000


class EnergyTotal(Struct, frozen=True, kw_only=True):
    """Energy in joules, and the grams of CO2 that the grids of its regions emitted for it.
    `unplaced_j` is the part in regions whose country is unknown, for which no grams are counted.
    `grids` are the countries of the others, with the years of their grids' figures.
    """

    joules: int
    co2_g: float
    unplaced_j: int
    grids: Mapping[str, int]


def weigh_energy(uses: Iterable[EnergyUse]) -> EnergyTotal | None:
    """Add up energy; return None if none was measured. See `cavvy.catalog.regions` for the source
    of the emissions.
    """
    joules, unplaced, grams, grids = 0, 0, 0.0, dict[str, int]()
    for use in uses:
        joules += use.joules
        grid = find_grid(use.provider, use.region)
        if grid is None:
            unplaced += use.joules
        else:
            grams += use.joules / _KWH_J * grid.grams
            grids[grid.country] = grid.year
    if not joules:
        return None
    return EnergyTotal(
        joules=joules,
        co2_g=float(f"{grams:.6g}"),
        unplaced_j=unplaced,
        grids=dict(sorted(grids.items())),
    )
