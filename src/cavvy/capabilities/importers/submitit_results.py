"""Fetches what a function that submitit has submitted left in the checkpoint of its job."""

from pathlib import Path

from cavvy.client.blobs import download_snapshot
from cavvy.client.model_folder import make_model_folder
from cavvy.sdk.client import Client

_BELOW = "results"


def fetch_results(client: Client, job_id: str, folder: Path) -> None:
    """Write the result and the logs of an ended job to a folder. Raises CavvyError."""
    job = client.job(job_id)
    with job._connections.use() as connection:
        made = make_model_folder(connection, job.project, job.name, [], _BELOW)
        download_snapshot(connection, job.project, made.snapshot, _BELOW, folder)
