"""A training step of SPLoRA against full fine-tuning, its peers and the lower bound, side by side in one run.

The lower bound freezes every adapted weight and learns norms and head: a forward pass and the gradients of inputs,
norms and head, which any adapter has to compute. Contenders take turns step by step, so that a busy machine slows
all alike; the table shows medians of the rounds' ratios. All run in the same memory layout and make the same
optimizer step.

    python3 dev.py bench                      # every row, about twenty minutes on two cores
    python3 dev.py bench --rows resnet18      # one row; the results of others stay as they are
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import torch
import torchvision_ops
from torch import Tensor, nn

import spalier as sp
from spalier.text import table

torchvision_ops.declare()  # peft looks for torchvision as it is imported

RANK = 8
RESULTS = Path(__file__).parent / "results" / "training_step.json"


@dataclass(frozen=True)
class Row:
    """A network and a batch to train it on."""

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    head: str
    layout: torch.memory_format = torch.contiguous_format
    described: str = ""


def resnet(name: str, stem: Any, size: int, batch: int, layout: torch.memory_format) -> Row:
    def images() -> dict[str, Tensor]:
        x = torch.randn(batch, 3, size, size).contiguous(memory_format=layout)
        return {"x": x, "labels": torch.randint(0, 10, (batch,))}

    def loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(net(batch["x"]), batch["labels"])

    make = lambda: getattr(sp.models, name)(classes=10, stem=stem)  # noqa: E731
    kind = "channels-last" if layout == torch.channels_last else "contiguous"
    return Row(make, images, loss, "fc", layout, f"{stem} stem, {size}x{size}, batch {batch}, {kind}")


def vit() -> Row:
    def make() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=384, num_attention_heads=6, intermediate_size=1536, num_labels=10,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        net: nn.Module = ViTForImageClassification(config)
        return net

    def batch() -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(4, 3, 224, 224), "labels": torch.randint(0, 10, (4,))}

    return Row(make, batch, hugging_face_loss, "classifier", described="ViT-S/16, 224x224, batch 4")


def bert() -> Row:
    def make() -> nn.Module:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        net: nn.Module = BertForSequenceClassification(config)
        return net

    def batch() -> dict[str, Tensor]:
        return {"input_ids": torch.randint(0, 30000, (4, 128)), "labels": torch.randint(0, 10, (4,))}

    return Row(make, batch, hugging_face_loss, "classifier", described="BERT-base, 4 x 128 tokens")


def hugging_face_loss(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = net(**batch).loss
    return loss


LAST = torch.channels_last
ROWS: dict[str, Callable[[], Row]] = {
    "resnet18": lambda: resnet("resnet18", "cifar", 32, 32, LAST),
    "resnet50": lambda: resnet("resnet50", "cifar", 32, 32, LAST),
    "resnet50-batch8": lambda: resnet("resnet50", "cifar", 32, 8, LAST),
    "resnet50-batch4": lambda: resnet("resnet50", "cifar", 32, 4, LAST),
    "resnet50-224": lambda: resnet("resnet50", "imagenet", 224, 8, LAST),
    "vit-s": vit,
    "bert-base": bert,
    "resnet18-contiguous": lambda: resnet("resnet18", "cifar", 32, 32, torch.contiguous_format),
}


LEGEND = """CPU time of a step: full is fine-tuning all weights, bound the lower bound, published the paper's library,
peft its LoRA; saved is what is kept for backward, against the bound's. All adapters have rank 8."""

# Contenders: each turns a fresh network into one that is ready to train.


def adapted_layers(net: nn.Module, row: Row) -> list[str]:
    """Every convolution, or every linear layer of a transformer, but the head."""
    kinds = nn.Linear if row.layout == torch.contiguous_format and not _has_convolutions(net) else nn.Conv2d
    return [name for name, m in net.named_modules() if isinstance(m, kinds) and not name.startswith(row.head)]


def _has_convolutions(net: nn.Module) -> bool:
    return sum(isinstance(m, nn.Conv2d) for m in net.modules()) > 1  # a ViT's patches are one convolution


def fine_tuning(net: nn.Module, row: Row) -> nn.Module:
    return net.requires_grad_(True)


def lower_bound(net: nn.Module, row: Row) -> nn.Module:
    return _let_learn(net, row, lambda name, parameter: False)


def spalier_splora(net: nn.Module, row: Row) -> nn.Module:
    sp.attach_(net, sp.SPLoRA(RANK), targets=adapted_layers(net, row), head=row.head)
    return net


def published_splora(net: nn.Module, row: Row) -> nn.Module:
    from sp_adapters.splora import SPLoRAConv2d, SPLoRALinear

    for name in adapted_layers(net, row):
        kind = SPLoRAConv2d if isinstance(net.get_submodule(name), nn.Conv2d) else SPLoRALinear
        net.set_submodule(name, kind.from_module(net.get_submodule(name), rank=RANK))
    return _let_learn(net, row, lambda name, parameter: ".adapter." in name)


def peft_lora(net: nn.Module, row: Row) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets = adapted_layers(net, row)
    wrapped: nn.Module = get_peft_model(net, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=targets))
    return _let_learn(wrapped, row, lambda name, parameter: "lora_" in name)


CONTENDERS: dict[str, Callable[[nn.Module, Row], nn.Module]] = {
    "full": fine_tuning,
    "bound": lower_bound,
    "spalier": spalier_splora,
    "published": published_splora,
    "peft": peft_lora,
}


def _let_learn(net: nn.Module, row: Row, also: Callable[[str, nn.Parameter], bool]) -> nn.Module:
    """Norms and the head learn in every contender; ``also`` says what else does."""
    norms = {id(p) for m in net.modules() if "Norm" in type(m).__name__ for p in m.parameters()}
    for name, parameter in net.named_parameters():
        head = f".{row.head}." in f".{name}"
        parameter.requires_grad_(id(parameter) in norms or head or also(name, parameter))
    return net


class Trainer:
    """One contender, ready to step."""

    def __init__(self, contender: str, row: Row) -> None:
        torch.manual_seed(0)
        net = CONTENDERS[contender](row.make().train(), row)
        self.net: nn.Module = net.to(memory_format=row.layout)  # type: ignore[call-overload]
        self.row, self.batch = row, row.batch()
        self.learned = [p for p in self.net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.learned, lr=1e-4, momentum=0.9)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.row.loss(self.net, self.batch).backward()
        self.optimizer.step()

    def timed_step(self) -> tuple[float, float]:
        """CPU and wall seconds of one step."""
        cpu, wall = time.process_time(), time.perf_counter()
        self.step()
        return time.process_time() - cpu, time.perf_counter() - wall

    def saved_bytes(self) -> int:
        """Bytes kept for backward, each storage once, parameters and buffers not counted."""
        held = {t.untyped_storage().data_ptr() for t in (*self.net.parameters(), *self.net.buffers())}
        kept = saved_tensors(self.row.loss(self.net, self.batch))
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
        return sum(size for pointer, size in storages.items() if pointer not in held)


def saved_tensors(loss: Tensor) -> list[Tensor]:
    """What all nodes behind a loss keep, found by a walk: hooks that would watch it change what layers keep."""
    seen: set[Any] = set()
    waiting: list[Any] = [loss.grad_fn]
    found: list[Tensor] = []
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
            own = getattr(node, "saved_tensors", None)
            kept = own or [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
            found += [t for value in kept for t in (value if isinstance(value, list | tuple) else [value])]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


Times = dict[str, list[tuple[float, float]]]


def measure(row: Row, repeats: int) -> dict[str, Any]:
    trainers = {name: Trainer(name, row) for name in CONTENDERS}
    times: Times = {name: [] for name in trainers}
    for trainer in trainers.values():
        trainer.step()  # the first step allocates
    names = list(trainers)
    for _ in range(repeats):
        for name in names:
            times[name].append(trainers[name].timed_step())
        names = [*names[1:], names[0]]  # no contender always follows the same one
    saved = {name: trainer.saved_bytes() for name, trainer in trainers.items()}
    contenders = {
        name: {
            "cpu_seconds": [round(cpu, 4) for cpu, _ in times[name]],
            "wall_seconds": [round(wall, 4) for _, wall in times[name]],
            "saved_bytes": saved[name],
            "learned": sum(p.numel() for p in trainers[name].learned),
        }
        for name in trainers
    }
    return {"described": row.described, "contenders": contenders, "ratios": ratios(times, saved)}


def ratios(times: Times, saved: dict[str, int]) -> dict[str, float]:
    """Medians over the rounds of CPU time against fine-tuning and the bound; saved bytes against the bound's."""

    def against(name: str, other: str) -> float:
        rounds = zip(times[name], times[other], strict=True)
        return statistics.median(mine[0] / theirs[0] for mine, theirs in rounds)

    found = {f"{name} : full": against(name, "full") for name in times if name != "full"}
    found["spalier : bound"] = against("spalier", "bound")
    adapters = ("spalier", "published", "peft")
    return found | {f"saved {name}": saved[name] / saved["bound"] for name in adapters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=21, help="interleaved steps of each contender")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = {}
    for name in options.rows:
        row = ROWS[name]()
        print(f"{name}: {row.described}, {options.repeats} repeats", flush=True)
        rows[name] = measure(row, options.repeats)
        print(show({name: rows[name]}) + "\n", flush=True)
    if options.output.exists():
        rows = {**json.loads(options.output.read_text())["rows"], **rows}
    rows = {name: rows[name] for name in ROWS if name in rows}
    report = {"rank": RANK, "repeats": options.repeats, "machine": machine(), "rows": rows}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(show(rows) + "\n\n" + LEGEND + f"\nwritten to {options.output}")


def show(rows: dict[str, Any]) -> str:
    names = list(next(iter(rows.values()))["ratios"])
    cells = [[name, *(f"{row['ratios'][key]:.2f}" for key in names)] for name, row in rows.items()]
    return table(["network", *names], cells)


def markdown(report: dict[str, Any]) -> str:
    """The table as the README shows it."""
    columns = {
        "bound : full": "lower bound",
        "spalier : full": "**Spalier**",
        "published : full": "published library",
        "peft : full": "PEFT",
        "spalier : bound": "Spalier : bound",
        "saved spalier": "saved, Spalier",
        "saved published": "saved, published",
        "saved peft": "saved, PEFT",
    }
    lines = ["| network | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, row in report["rows"].items():
        numbers = " | ".join(f"{row['ratios'][key]:.2f}" for key in columns)
        lines.append(f"| {name.split('-batch')[0].removesuffix('-contiguous')}: {row['described']} | {numbers} |")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": platform.machine(),
    }


if __name__ == "__main__":
    main()
