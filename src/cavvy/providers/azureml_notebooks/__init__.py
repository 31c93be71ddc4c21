"""Azure Machine Learning's compute instances: each session is a managed notebook, which starts the
agent when it is created.
"""

from cavvy.providers.azureml_notebooks.manifest import MANIFEST as MANIFEST
