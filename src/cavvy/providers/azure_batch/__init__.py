"""Azure Batch: each gang is one job with its own pool. The containers of the job's tasks start the
agent.
"""

from cavvy.providers.azure_batch.manifest import MANIFEST as MANIFEST
