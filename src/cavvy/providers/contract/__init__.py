"""The contract suite for providers: subclass `ProviderContract` and override its fixture `place`
with a `ProviderUnderTest`; pytest collects the tests.

The suite ships with Cavvy, so that third parties can test their providers; see
docs/extend/write-a-provider.md. Only tests import this module, since it needs pytest.
"""

import pkgutil

import pytest

# before the imports below: failed assertions of the suite then show the values that differ
pytest.register_assert_rewrite(
    *(f"{__name__}.{each.name}" for each in pkgutil.iter_modules(__path__))
)

from cavvy.providers.contract.faults import FaultTests
from cavvy.providers.contract.gangs import EndTests, LaunchTests, LookTests
from cavvy.providers.contract.harness import (
    ContractHarness,
    FaultyPlace,
    LaunchFault,
    Play,
    ProviderUnderTest,
)
from cavvy.providers.contract.offers import OfferTests
from cavvy.providers.contract.repairs import LosesNodes, RepairFaultTests, RepairTests

__all__ = [
    "ContractHarness",
    "FaultTests",
    "FaultyPlace",
    "LaunchFault",
    "LosesNodes",
    "Play",
    "ProviderContract",
    "ProviderUnderTest",
    "RepairFaultTests",
    "RepairTests",
]


class ProviderContract(OfferTests, LaunchTests, LookTests, EndTests):
    """The rules that every provider must follow. Override `place`; override `run_scenario` and
    `lose_reply` if the default methods do not fit the infrastructure. Add `FaultTests` as a second
    base class for a provider that starts a gang with several requests, and `RepairTests` and
    `RepairFaultTests` for a provider that replaces single nodes.
    """
