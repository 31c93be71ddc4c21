"""The job format of Azure Machine Learning."""
