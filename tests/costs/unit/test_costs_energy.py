"""Energy and its emissions."""

import pytest

from cavvy.client.metrics import describe_energy
from cavvy.client.wire import EnergyView
from cavvy.costs.energy import weigh_energy
from cavvy.domain.ledger import EnergyUse
from cavvy.domain.units import format_energy, format_grams


def use(provider: str, region: str, kwh: float) -> EnergyUse:
    return EnergyUse(provider=provider, region=region, joules=round(kwh * 3.6e6))


def test_each_region_has_the_grid_of_its_country() -> None:
    found = weigh_energy([use("aws", "us-east-1", 1), use("ssh", "de-cellar", 2)])
    assert found is not None
    assert (found.joules, found.unplaced_j) == (10_800_000, 0)
    assert found.grids == {"de": 2024, "us": 2024}
    assert found.co2_g == 384 + 2 * 344
    assert weigh_energy([]) is None
    assert weigh_energy([use("local", "here", 0)]) is None


def test_energy_of_unknown_places_has_no_grams_and_is_named() -> None:
    alone = weigh_energy([use("local", "here", 1)])
    assert alone is not None
    assert (alone.unplaced_j, alone.co2_g, alone.grids) == (3_600_000, 0, {})
    both = weigh_energy([use("local", "here", 1), use("aws", "ap-south-1", 1), use("x", "ua", 1)])
    assert both is not None
    view = EnergyView(
        joules=both.joules,
        co2_g=both.co2_g,
        unplaced_j=both.unplaced_j,
        grids=dict(both.grids),
    )
    assert describe_energy(view) == (
        "3 kWh, 964 g of CO2 (grid of in and ua, 2022 to 2024; without 1 kWh in unknown countries)"
    )


@pytest.mark.parametrize(
    ("joules", "text"),
    [
        (0, "0 J"),
        (12.34, "12.3 J"),
        (3599, "3599 J"),
        (3600, "1 Wh"),
        (3_599_000, "1 kWh"),
        (5.4e9, "1.5 MWh"),
        (1e15, "278 GWh"),
    ],
)
def test_energy_has_a_unit_that_fits(joules: float, text: str) -> None:
    assert format_energy(joules) == text


def test_masses_have_units_that_fit() -> None:
    assert [*map(format_grams, (0.25, 999.4, 1000, 2.5e6, 3e9))] == [
        "0.25 g",
        "999 g",
        "1 kg",
        "2.5 t",
        "3,000 t",
    ]
