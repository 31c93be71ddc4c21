"""The contract suite of the provider seam: subclass `ProviderContract`, give it a
`ProviderUnderTest`, and pytest does the rest.

It ships with Cavvy, so that third parties can run it on their providers; see
docs/guides/write-a-provider.md. Only tests import this module, since it needs pytest.
"""

from cavvy.providers.contract.ends import EndTests
from cavvy.providers.contract.harness import ContractHarness, Play, ProviderUnderTest
from cavvy.providers.contract.launches import LaunchTests
from cavvy.providers.contract.looks import LookTests
from cavvy.providers.contract.offers import OfferTests

__all__ = ["ContractHarness", "Play", "ProviderContract", "ProviderUnderTest"]


class ProviderContract(OfferTests, LaunchTests, LookTests, EndTests):
    """Rules that every provider must keep. Override `place`, and `run_scenario` and `lose_reply` if
    the defaults do not fit.
    """
