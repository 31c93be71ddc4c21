"""The scaling rules of other systems, as simplified re-implementations with the constants of their
sources. Each rule is a pure function of a state and a view.
"""

from collections.abc import Mapping

from cavvy.sim.serving.history import ScalingRule
from cavvy.sim.serving.rules.keda import KedaRule
from cavvy.sim.serving.rules.knative import AibrixRule, KnativeRule
from cavvy.sim.serving.rules.ray_serve import RayServeRule
from cavvy.sim.serving.rules.request_rate import DstackRule, SkyServeRule

# each with the default parameters of its system
RULES: Mapping[str, ScalingRule] = {
    "knative": KnativeRule(),
    "keda": KedaRule(),
    "ray-serve": RayServeRule(),
    "skyserve": SkyServeRule(),
    "dstack": DstackRule(),
    "aibrix": AibrixRule(),
}
