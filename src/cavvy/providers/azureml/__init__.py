"""Azure Machine Learning: each gang is one command job, whose containers start the agent."""

from cavvy.providers.azureml.manifest import MANIFEST as MANIFEST
