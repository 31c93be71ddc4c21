"""What the gateway asks of the paths of models (`serving.gateway.door.SharedPaths`)."""

import time
from collections.abc import Iterable
from pathlib import Path

from cavvy.capabilities.language_models.batch_runs import BatchRuns
from cavvy.capabilities.language_models.file_store import FileStore
from cavvy.capabilities.language_models.model_route import (
    ModelPath,
    ModelRoutes,
    Open,
    explain_path,
    read_model_path,
)
from cavvy.capabilities.language_models.openai_files import OpenAiFiles
from cavvy.capabilities.serving.gateway.config import GatewayConfig
from cavvy.capabilities.serving.gateway.heads import RequestHead
from cavvy.capabilities.serving.gateway.own_answers import Answer
from cavvy.capabilities.serving.gateway.seams import ClientRequest, OpenRequest
from cavvy.capabilities.serving.gateway.service_queue import ServiceQueue


class ModelPaths:
    """The routes of OpenAI's API below `/v1` and `/PROJECT/v1`, with their files and batches."""

    def __init__(self, config: GatewayConfig, admit: Open) -> None:
        store = FileStore(Path(config.state) / "openai")
        self._runs = BatchRuns(
            store, config.limits, lambda owners, model: self._models.find_owned(owners, model)
        )
        self._files = OpenAiFiles(self._runs)
        self._models = ModelRoutes(admit, config.limits, self._files.open)

    def set_services(self, services: Iterable[ServiceQueue]) -> None:
        self._models.set_services(services)

    def find(self, head: RequestHead) -> ModelPath | None:
        return read_model_path(head)

    def open_request(self, request: ClientRequest, at: ModelPath) -> OpenRequest | Answer | None:
        return self._models.open_request(request, at, time.time())

    def explain(self, head: RequestHead) -> Answer | None:
        return explain_path(head)

    def tick(self, now: float) -> None:
        self._files.tick(now)

    def stop(self) -> None:
        self._runs.closing = True

    async def close(self) -> None:
        await self._runs.close()
