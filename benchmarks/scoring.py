"""What scoring costs: 256 images, as a ratio to one plain full forward and backward over the same images.

Contenders take turns batch by batch on the same network, images and memory layout: a plain pass with all weights
learning, each criterion, and zennit, the reference implementation of relevance propagation.

    python3 dev.py bench-scoring
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
import torch
import torch.nn.functional as F
import torchvision_ops
from torch import Tensor, nn

import spalier as sp
from spalier.text import table

torchvision_ops.declare()  # zennit looks for torchvision as it is imported

RESULTS = Path(__file__).parent / "results" / "scoring.json"
IMAGES, BATCH = 256, 32
CRITERIA = ("weight", "magnitude", "gradient", "taylor", "lrp", "movement", "second_order")
LAYOUTS = {"channels-last": torch.channels_last, "contiguous": torch.contiguous_format}
Batches = list[tuple[Tensor, Tensor]]


def make(name: str, layout: torch.memory_format) -> tuple[nn.Module, Batches]:
    """An adapted network with its structure, and images for it."""
    torch.manual_seed(0)
    net = getattr(sp.models, name)(classes=10, stem="cifar")
    sp.attach_(net, sp.SPLoRA(rank=8), head="fc", example=torch.randn(2, 3, 32, 32))
    net = net.to(memory_format=layout).eval()
    images = torch.randn(IMAGES, 3, 32, 32).contiguous(memory_format=layout)
    labels = torch.randint(0, 10, (IMAGES,))
    return net, list(zip(images.split(BATCH), labels.split(BATCH), strict=True))


def plain(net: nn.Module) -> Callable[[Batches], None]:
    """Forward and backward with every weight learning."""
    whole = sp.fuse(net).train().requires_grad_(True)

    def run(batches: Batches) -> None:
        for x, y in batches:
            whole.zero_grad()
            F.cross_entropy(whole(x), y).backward()

    return run


def criterion(net: nn.Module, name: str) -> Callable[[Batches], None]:
    def run(batches: Batches) -> None:
        sp.score(net, batches, name, loss=F.cross_entropy)

    return run


def zennit(net: nn.Module) -> Callable[[Batches], None]:
    """The same rules, norms merged into convolutions, and relevance read at every norm's place."""
    from zennit.attribution import Gradient
    from zennit.composites import LayerMapComposite
    from zennit.rules import Epsilon, Pass, ZPlus
    from zennit.torchvision import ResNetCanonizer
    from zennit.types import Activation, AvgPool, BatchNorm, Convolution, Linear

    whole = torchvision_like(net)
    rules = [
        (Convolution, ZPlus()),
        (Linear, Epsilon(1e-6)),
        (AvgPool, Epsilon(1e-6)),
        (Activation, Pass()),
        (BatchNorm, Pass()),
    ]
    composite = LayerMapComposite(rules, canonizers=[ResNetCanonizer()])

    def run(batches: Batches) -> None:
        seen: dict[str, Tensor] = {}

        def note(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Tensor) -> None:
                output.register_hook(lambda relevance: seen.update({name: relevance.abs().sum((0, 2, 3))}))

            return hook

        with Gradient(whole, composite) as attributor:
            convolutions = [(n, m) for n, m in whole.named_modules() if isinstance(m, nn.Conv2d)]
            handles = [m.register_forward_hook(note(n)) for n, m in convolutions]
            for x, y in batches:
                attributor(x, torch.eye(10)[y])
            for handle in handles:
                handle.remove()

    return run


def torchvision_like(net: nn.Module) -> nn.Module:
    """torchvision's class with the same weights: zennit's canonizer knows that one."""
    import torchvision

    name = "resnet50" if any(hasattr(m, "conv3") for m in net.modules()) else "resnet18"
    found: nn.Module = getattr(torchvision.models, name)(num_classes=10)
    found.conv1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
    found.maxpool = nn.Identity()
    found.load_state_dict(sp.fuse(net).state_dict())
    layout = LAYOUTS["channels-last"] if net.conv1.weight.stride(1) == 1 else LAYOUTS["contiguous"]  # type: ignore[operator, union-attr]
    return found.to(memory_format=layout).eval()  # type: ignore[call-overload, no-any-return]


def measure(name: str, layout: str, repeats: int, chosen: list[str]) -> dict[str, Any]:
    net, batches = make(name, LAYOUTS[layout])
    runs = {"plain": plain(net), **{c: criterion(net, c) for c in chosen if c != "zennit"}}
    if "zennit" in chosen:
        runs["zennit"] = zennit(copy.deepcopy(net))
    for run in runs.values():
        run(batches[:1])  # the first batch allocates
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for _ in range(repeats):
        for each in names:
            start = time.process_time()
            runs[each](batches)
            times[each].append(round(time.process_time() - start, 4))
        names = [*names[1:], names[0]]
    ratios = {
        each: statistics.median(a / b for a, b in zip(times[each], times["plain"], strict=True))
        for each in times
        if each != "plain"
    }
    threads = torch.get_num_threads()
    return {"network": name, "layout": layout, "threads": threads, "cpu_seconds": times, "ratios": ratios}


def markdown(report: dict[str, Any]) -> str:
    """The table as the docs show it."""
    columns = [*CRITERIA, "zennit"]
    lines = ["| network | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in report["rows"]:
        numbers = " | ".join(_shown(row["ratios"].get(c)) for c in columns)
        lines.append(f"| {row['network']}, {row['layout']} | {numbers} |")
    return "\n".join(lines)


def _shown(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}" if ratio < 0.1 else f"{ratio:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--criteria", nargs="+", default=[*CRITERIA, "zennit"])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    for name in options.networks:
        for layout in options.layouts:
            row = measure(name, layout, options.repeats, options.criteria)
            shown = [[c, f"{r:.3f}"] for c, r in row["ratios"].items()]
            print(f"{name}, {layout}\n" + table(["criterion", "ratio"], shown), flush=True)
            save(options.output, row)


def save(output: Path, row: dict[str, Any]) -> None:
    """Put one row among those of earlier runs."""
    rows = json.loads(output.read_text())["rows"] if output.exists() else []
    rows = [r for r in rows if (r["network"], r["layout"]) != (row["network"], row["layout"])] + [row]
    rows.sort(key=lambda r: (r["network"], r["layout"]))
    machine = {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": platform.machine(),
    }
    report = {"images": IMAGES, "batch": BATCH, "machine": machine, "rows": rows}
    output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
