"""Notebook instances of Amazon SageMaker: each session is a managed notebook, which starts the
agent.
"""

from cavvy.providers.sagemaker_notebooks.manifest import MANIFEST as MANIFEST
