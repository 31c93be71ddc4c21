"""Links to the next page of a list lead to the server that was asked."""

import pytest

from cavvy.http_client import is_same_server


@pytest.mark.parametrize(
    ("url", "same"),
    [
        # https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices
        ("https://prices.azure.com:443/api/retail/prices?$skip=100", True),
        ("https://Prices.Azure.com/api", True),
        ("http://prices.azure.com/api", False),
        ("https://prices.azure.com:8443/api", False),
        ("https://prices.azure.com.example.org/api", False),
        ("https://prices.azure.com@example.org/api", False),
        ("/api/retail/prices", False),
        ("https://[broken", False),
        ("https://prices.azure.com:none/api", False),
    ],
)
def test_a_default_port_is_the_same_server(url: str, same: bool) -> None:
    assert is_same_server(url, "https://prices.azure.com") is same
