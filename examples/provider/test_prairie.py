"""The Prairie's provider keeps the contract."""

import prairie_provider
from prairie_provider.cloud import PrairieCloud
from prairie_stand_in import PrairieStandIn

from cavvy.providers.contract.rest_cloud import RestContract


class TestPrairie(RestContract):
    package, traits, stand_in = prairie_provider, PrairieCloud.traits, PrairieStandIn
