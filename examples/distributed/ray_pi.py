"""Estimate pi by throwing darts in Ray tasks, on every node in turn of the cluster that
`ray.init()` finds.
"""

import random

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

DARTS, TASKS = 200_000, 8


@ray.remote
def throw(seed: int) -> "tuple[int, str]":
    """How many darts hit the circle, and the node that threw them."""
    generator = random.Random(seed)
    hits = sum(generator.random() ** 2 + generator.random() ** 2 <= 1 for _ in range(DARTS))
    return hits, ray.get_runtime_context().get_node_id()


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    places = [
        NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        for node in ray.nodes()
        if node["Alive"]
    ]
    tasks = [
        throw.options(scheduling_strategy=places[seed % len(places)]).remote(seed)
        for seed in range(TASKS)
    ]
    found = ray.get(tasks)
    nodes = {node for _, node in found}
    pi = 4 * sum(hits for hits, _ in found) / (DARTS * TASKS)
    print(f"pi is about {pi:.3f}, by {len(nodes)} of {len(places)} nodes", flush=True)
