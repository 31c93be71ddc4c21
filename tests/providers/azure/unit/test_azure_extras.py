"""The prices of disks and addresses in Azure's price list."""

from datetime import date

import pytest

from cavvy.providers.azure.price_list import read_extras

SETTINGS = {"disk_type": "StandardSSD_LRS", "disk_gib": 128, "public_ip": True}


@pytest.mark.parametrize("prices", [(9.6, 12.0), (12.0, 9.6)])
def test_the_dearest_of_several_prices_of_a_meter_counts(prices: tuple[float, float]) -> None:
    items = [
        {
            "meterName": "E10 LRS Disk",
            "unitOfMeasure": "1/Month",
            "retailPrice": usd,
            "currencyCode": "USD",
        }
        for usd in prices
    ]
    (found,) = read_extras(items, SETTINGS, date(2026, 11, 22))
    assert (found.name, found.price.micros) == ("StandardSSD_LRS", 12_000_000)
