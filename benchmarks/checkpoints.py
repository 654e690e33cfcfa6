"""What a fine-tuned checkpoint keeps of its accuracy as a task of so many bytes, without any learning on.

MiniLM is fine-tuned on TREC's questions for two epochs, all weights, and made a task by `Task.from_checkpoint` with
several budgets. The fine-tuned weights are kept beside the results of the run, so that budgets can be tried again.

    python benchmarks/checkpoints.py --shared ../shared --tuned trec.safetensors
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import torch
import torchvision_ops
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import spalier as sp

torchvision_ops.declare()  # transformers looks for torchvision
RESULTS = Path(__file__).parent / "results" / "checkpoints.json"
SHARES = (None, 50, 100)
"""Budgets: the default, and shares of the base's bytes."""
SAMPLES, BATCH, RATE, TOKENS = 4000, 32, 1e-4, 24


class Questions:
    """TREC, tokenised."""

    def __init__(self, shared: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(shared / "weights/minilm-l6-v2")
        self.folder = shared / "data/text/trec"
        self.classes = sorted({row["label"] for row in self._rows("train")})

    def _rows(self, part: str) -> list[dict[str, str]]:
        with (self.folder / f"{part}.csv").open(encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def tensors(self, part: str) -> dict[str, Tensor]:
        rows = self._rows(part)
        padded = {"padding": "max_length", "truncation": True, "max_length": TOKENS, "return_tensors": "pt"}
        found = self.tokenizer([row["text"] for row in rows], **padded)
        labels = torch.tensor([self.classes.index(row["label"]) for row in rows])
        return {"input_ids": found["input_ids"], "attention_mask": found["attention_mask"], "labels": labels}


def fine_tuned(net: nn.Module, data: dict[str, Tensor]) -> nn.Module:
    """All weights, with AdamW, a warm-up and a rate that falls to zero."""
    steps = 2 * (SAMPLES // BATCH)
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 25, 1) * (1 - n / steps))
    order = torch.randperm(len(data["labels"]))[:SAMPLES].split(BATCH)
    net.train()
    for chosen in (*order, *order):
        optimizer.zero_grad()
        net(**{key: value[chosen] for key, value in data.items()}).loss.backward()
        optimizer.step()
        rates.step()
    return net.eval()


@torch.no_grad()
def accuracy(net: nn.Module, data: dict[str, Tensor]) -> float:
    inputs = {key: value for key, value in data.items() if key != "labels"}
    return float((net(**inputs).logits.argmax(1) == data["labels"]).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, required=True, help="a folder that has data/ and weights/")
    parser.add_argument("--tuned", type=Path, required=True, help="the fine-tuned weights; made where it is missing")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    data = Questions(options.shared)
    from transformers import BertForSequenceClassification

    weights = options.shared / "weights/minilm-l6-v2"
    base = BertForSequenceClassification.from_pretrained(weights, num_labels=len(data.classes)).eval()
    if not options.tuned.exists():
        tuned = fine_tuned(copy.deepcopy(base), data.tensors("train"))
        save_file({key: value.clone() for key, value in tuned.state_dict().items()}, options.tuned)
    net = copy.deepcopy(base)
    net.load_state_dict(load_file(options.tuned))
    test, whole = data.tensors("test"), sum(4 * p.numel() for p in base.parameters())
    report: dict[str, Any] = {"base_bytes": whole, "finetuned": accuracy(net, test), "tasks": []}
    for share in SHARES:
        begun = time.process_time()
        task = sp.Task.from_checkpoint(base, options.tuned, bytes=None if share is None else whole // share)
        row = {"share": share, "bytes": len(task.to_bytes()), "accuracy": accuracy(task.build(base), test)}
        report["tasks"].append(row | {"cpu_seconds": round(time.process_time() - begun, 1)})
        print(report["tasks"][-1], flush=True)
        options.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
