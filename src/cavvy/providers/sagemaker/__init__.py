"""Amazon SageMaker: each gang is one training job, whose containers start the agent."""

from cavvy.providers.sagemaker.manifest import MANIFEST as MANIFEST
