"""The contract suite of the provider seam: subclass `ProviderContract`, give it a `Place`, and
pytest does the rest.

It ships with Cavvy, so that providers of third parties can run it; see
docs/guides/write-a-provider.md. Nothing but tests imports this room, since it needs pytest.
"""

from cavvy.providers.contract.ends import Ends
from cavvy.providers.contract.launches import Launches
from cavvy.providers.contract.looks import Looks
from cavvy.providers.contract.offers import Offers
from cavvy.providers.contract.stage import Place, Play, Stage

__all__ = ["Place", "Play", "ProviderContract", "Stage"]


class ProviderContract(Offers, Launches, Looks, Ends):
    """What every provider must keep. Override `place`; `run_story` and `lose_reply` where the
    defaults do not fit.
    """
