"""AWS Batch: each gang is one job in a queue, and the job's containers start the agent."""

from cavvy.providers.aws_batch.manifest import MANIFEST as MANIFEST
