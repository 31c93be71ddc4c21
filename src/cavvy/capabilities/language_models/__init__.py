"""Language models on services: OpenAI's API for all models of a project, its files and batches."""
