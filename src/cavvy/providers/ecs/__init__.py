"""Amazon ECS: each rank of a gang is one task of a cluster, and the task's container starts the
agent.
"""

from cavvy.providers.ecs.manifest import MANIFEST as MANIFEST
