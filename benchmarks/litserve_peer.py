"""The service of one task in LitServe, for `serving.py --parts frameworks`: ``pip install litserve`` first."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import litserve
import torch

import spalier as sp
from spalier.networks import open_network
from spalier.predicting import collate, named, probabilities, to_sample


class OneTask(litserve.LitAPI):  # type: ignore[misc]
    folder = Path()

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        task = sp.Store(self.folder / "tasks").load("task0000")
        self.info, self.net = task.info, task.build(open_network("resnet18", classes=100))

    def decode_request(self, request: dict[str, str]) -> Any:
        return to_sample(self.info, base64.b64decode(request["image"]))

    def batch(self, inputs: Any) -> Any:
        return collate(self.info, inputs)

    def predict(self, batch: Any) -> Any:
        return probabilities(self.net, batch)

    def unbatch(self, output: Any) -> Any:
        return list(output)

    def encode_response(self, output: Any) -> Any:
        return {"predictions": named(self.info, output[None], 5)}


def run(folder: Path, port: int) -> None:
    api = OneTask(max_batch_size=32, batch_timeout=0.001, api_path="/v1/tasks/task0000/predict")
    api.folder = folder
    litserve.LitServer(api, accelerator="cpu").run("127.0.0.1", port, generate_client_file=False, log_level="error")
