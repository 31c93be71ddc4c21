"""The deadline policies by name, for the command line, the simulator and plans."""

from collections.abc import Mapping

from cavvy.planner.deadline.policy import DeadlinePolicy
from cavvy.planner.spot.classic import GreedyPolicy, OnDemandPolicy, SpotOnlyPolicy, UniformProgress
from cavvy.planner.spot.view import PolicyMaker

POLICIES: Mapping[str, PolicyMaker] = {
    "auto": DeadlinePolicy,
    "uniform-progress": UniformProgress,
    "greedy": GreedyPolicy,
    "on-demand": OnDemandPolicy,
    "spot-only": SpotOnlyPolicy,
}
# Other names of policies, such as the values of `resources.spot`
ALIASES: Mapping[str, str] = {"up": "uniform-progress", "never": "on-demand", "only": "spot-only"}


def find_policy(name: str) -> PolicyMaker:
    """Return the constructor of the policy with this name. Raises KeyError for an unknown name."""
    return POLICIES[ALIASES.get(name, name)]
