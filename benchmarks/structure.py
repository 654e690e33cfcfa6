"""Finding and pruning the structure of real networks: Spalier beside Torch-Pruning.

Three parts, each with its own section in the results:

    python benchmarks/structure.py coverage   # some 200 networks, halved at random: are they still right?
    python benchmarks/structure.py trace      # what `trace` costs beyond `torch.export` alone
    python benchmarks/structure.py prune      # what `prune_` costs, beside Torch-Pruning's graph and step
    python benchmarks/structure.py table      # write the table into docs/structure.md

Both libraries get the same networks in float64 and the same inputs, and remove half of everything at random.
Torch-Pruning is used as its documentation and examples say, by a program that knows no network by name: layers that
make the output are ignored, numbers of heads are read from attributes, and sizes of heads are set after pruning.
timm's fused attention is off for it, as in its examples. It is tried with and without the numbers of heads, and the
better result counts. It goes through the networks of the test zoo, Spalier through those of the survey too.

Results are written network by network, so a run that was stopped goes on with ``coverage --resume``; a network that
ended the process is listed with that.

Right means: the pruned network computes what the whole network computes with zeros for every weight that is gone.
Norms and standardised weights count only what is left, as removal means. This check reads nothing but the weights
that survived (and, for norms and standardised weights, the pruned layer itself on what is left), and it is the same
for both. Spalier's own check in ``prune_`` has to pass as well.

All seconds are CPU seconds of one thread: what else the machine does counts little in them.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import re
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import torch
import torchvision_ops
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

import spalier as sp
import survey
from peer import RATIO, Call, numbers_of_heads, set_head_sizes, torch_pruner

torchvision_ops.declare()
zoo: Any = import_module("zoo")  # of the tests, whose types nobody checks

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 40  # for one library on one network
TOLERANCE = 1e-4  # of the largest output; some networks compute parts in float32
RESULTS = Path(__file__).parent / "results" / "structure.json"
DOCUMENT = ROOT / "docs" / "structure.md"


# ---------------------------------------------------------------------------------------------------------------
# Coverage
# ---------------------------------------------------------------------------------------------------------------


def coverage(names: Sequence[str], resume: bool, keep: bool) -> None:
    found = rows() if names or resume or keep else {}
    for entry in networks():
        if (names and entry.name not in names) or (resume and entry.name in found):
            continue
        known = found.get(entry.name, {}).get("torch_pruning")
        peer = {} if known is None or not keep else {"torch_pruning": known}
        found[entry.name] = {"spalier": {"error": "the process ended"}, **peer}
        write_coverage(found)
        call = zoo.arguments(entry.example(), torch.float64)
        row = found[entry.name] = {"spalier": attempt(partial(try_spalier, entry.make, call)), **peer}
        if entry in zoo.ZOO and not peer:
            row["torch_pruning"] = best_of_torch_pruning(entry.make().double(), call)
        write_coverage(found)
        print(entry.name, json.dumps(row), flush=True)
    print(json.dumps(summary(found), indent=1))


def networks() -> list[Any]:
    """Those of the test zoo, but for what was made for the tests, and those of the survey."""
    others = [entry for entry in zoo.ZOO if not entry.name.startswith("made/") or entry.name == "made/unet"]
    return [*others, *survey.entries()]


def rows() -> dict[str, Any]:
    report = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return dict(report.get("coverage", {}).get("networks", {}))


def write_coverage(found: dict[str, Any]) -> None:
    order = [entry.name for entry in networks()]
    in_order = dict(sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order)))
    update("coverage", {"ratio": RATIO, "summary": summary(in_order), "networks": in_order})


def attempt(run: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Fill a row as far as it goes; what is raised becomes its last field."""
    row: dict[str, Any] = {}
    torch.manual_seed(0)
    try:
        with limited(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run(row)
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {first_line(error)}"[:300]
    return row


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


class OutOfTimeError(Exception):
    """A library took too long for a network."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise OutOfTimeError(f"more than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def try_spalier(make: Callable[[], nn.Module], call: Call, row: dict[str, Any]) -> None:
    net = make().double()
    whole = copy.deepcopy(net)
    start = time.process_time()
    structure = sp.trace(net, call[1] or call[0])
    row["trace_seconds"] = round(time.process_time() - start, 2)
    row |= {"streams": len(structure.streams), "units": structure.units}
    row["prunable"] = round(structure.prunable, 4)
    row["stays"] = stays(structure)
    plan = half(structure)
    start = time.process_time()
    sp.prune_(net, plan)
    row["prune_seconds"] = round(time.process_time() - start, 2)
    row |= {"own_check": True, "removed": removed(whole, net)}
    numbered = copy.deepcopy(whole)
    with torch.no_grad():
        for parameter in numbered.parameters():
            parameter.copy_(numbers(parameter))
    sp.prune_(numbered, plan, check=False)
    survivors = {name: p.detach() for name, p in numbered.named_parameters(remove_duplicate=False)}
    judge(whole, net, survivors, call, row)


def stays(structure: sp.Structure) -> dict[str, float]:
    """The share of the weights that no unit takes with it, by the reason."""
    taken = {tensor for tensor, _ in structure.axes}
    total = sum(math.prod(structure.shapes[name]) for name in structure.parameters)
    found: Counter[str] = Counter()
    for name in structure.parameters - taken:
        reasons = [short(f.reason) for f in structure.frozen if f.tensor == name]
        # a layer that makes the output has an axis that is cut elsewhere: what holds that one is the reason
        inner = [reason for reason in reasons if reason not in ENDS] or reasons or ["a single channel"]
        found[inner[0]] += math.prod(structure.shapes[name])
    shares = {reason: round(count / total, 4) for reason, count in found.most_common()}
    return {reason: share for reason, share in shares.items() if share >= 0.005}


ENDS = ("an output of the network", "taps")


def short(reason: str) -> str:
    """A reason without names and numbers, which are those of one network."""
    text = re.sub(r"the code of \S+( itself)?", "its code", reason)
    text = re.sub(r" at \S+:\d+", "", text)
    return re.sub(r"does not follow: .*", "does not follow", text)


def half(structure: sp.Structure) -> sp.Plan:
    """Half of the units of every stream, at random, or as many as have to stay."""
    draw = torch.Generator().manual_seed(0)
    keep = {}
    for stream in structure.streams:
        order = torch.randperm(stream.size, generator=draw).tolist()
        keep[stream.name] = order[: max(stream.least, round(stream.size * (1 - RATIO)))]
    return sp.Plan(structure, keep)


def best_of_torch_pruning(net: nn.Module, call: Call) -> dict[str, Any]:
    """With numbers of heads, and, if that is not right, without: in some networks the found ones do harm."""
    heads = numbers_of_heads(net)
    for module in net.modules():  # its examples for timm turn this off: the fused kernel has a scale of its own
        if hasattr(module, "fused_attn"):
            setattr(module, "fused_attn", False)  # noqa: B010  (no module declares it)
    row = attempt(partial(try_torch_pruning, copy.deepcopy(net), call, True))
    if heads and not row.get("equal") and "OutOfTime" not in row.get("error", ""):
        other = attempt(partial(try_torch_pruning, net, call, False))
        row = max(row, other, key=lambda r: [r.get(k, False) for k in ("equal", "shape_right", "runs")])
    return row


def try_torch_pruning(net: nn.Module, call: Call, with_heads: bool, row: dict[str, Any]) -> None:
    whole = copy.deepcopy(net)
    for parameter in net.parameters():  # it cuts gradients with their weights, so these tell what is left
        parameter.grad = numbers(parameter)
    start = time.process_time()
    pruner = torch_pruner(net, call, with_heads)
    built = time.process_time() - start
    row["groups"] = sum(1 for _ in pruner.DG.get_all_groups(pruner.ignored_layers, pruner.root_module_types))
    start = time.process_time()
    pruner.step()
    row["seconds"] = round(built + time.process_time() - start, 2)
    row["removed"] = removed(whole, net)
    set_head_sizes(net)
    survivors = {}
    for name, parameter in net.named_parameters(remove_duplicate=False):
        assert parameter.grad is not None
        survivors[name] = parameter.grad
    judge(whole, net, survivors, call, row)


def judge(whole: nn.Module, pruned: nn.Module, survivors: dict[str, Tensor], call: Call, row: dict[str, Any]) -> None:
    """Run the pruned network, and compare it with the masked one."""
    row |= {"runs": False, "shape_right": False, "equal": False}
    found = outputs(pruned, call)
    row["runs"] = True
    wanted = outputs(masked(whole, pruned, survivors), call)
    row["shape_right"] = [x.shape for x in found] == [x.shape for x in wanted]
    if row["shape_right"]:
        difference = max(relative_difference(*pair) for pair in zip(found, wanted, strict=True))
        row["difference"] = float(f"{difference:.1e}")
        row["equal"] = difference <= TOLERANCE


@torch.no_grad()
def outputs(net: nn.Module, call: Call) -> list[Tensor]:
    result = net.eval()(*call[0], **call[1])
    return [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]


def relative_difference(found: Tensor, wanted: Tensor) -> float:
    scale = wanted.abs().max().clamp(min=torch.finfo(wanted.dtype).tiny)
    return float(((found - wanted).abs().max() / scale).nan_to_num(float("inf")))


def removed(whole: nn.Module, pruned: nn.Module) -> float:
    was, now = (sum(p.numel() for p in net.parameters()) for net in (whole, pruned))
    return round(1 - now / was, 4)


# The masked network.


def numbers(parameter: Tensor) -> Tensor:
    """Each entry's place. Cut like the weight, they tell which entries are left."""
    return torch.arange(parameter.numel(), dtype=parameter.dtype).view(parameter.shape)


def masked(whole: nn.Module, pruned: nn.Module, survivors: dict[str, Tensor]) -> nn.Module:
    """The whole network with zeros for what did not survive."""
    net = copy.deepcopy(whole)
    shapes = {name: p.shape for name, p in net.named_parameters(remove_duplicate=False)}
    left = {name: places.long().flatten() for name, places in survivors.items()}
    for name, parameter in list(net.named_parameters(remove_duplicate=False)):
        mask = torch.zeros(parameter.numel(), dtype=parameter.dtype)
        mask[left[name]] = 1
        path, _, own = name.rpartition(".")
        setattr(net.get_submodule(path), own, nn.Parameter(parameter.detach() * mask.view(parameter.shape)))
    for path, module in net.named_modules():
        name = f"{path}.weight"
        if name not in left or len(left[name]) == shapes[name].numel():
            continue
        small = pruned.get_submodule(path)
        if is_statistical_norm(module):
            first = isinstance(module, nn.GroupNorm) or "2d" in type(module).__name__
            module.forward = partial(norm_what_is_left, small, left[name], shapes[name].numel(), first)
        elif isinstance(module, _ConvNd) and type(module).forward not in PLAIN_FORWARDS:
            ins, outs = channels_left(module, left[name])
            module.forward = partial(convolve_what_is_left, small, ins, outs, module.out_channels)
    return net


PLAIN_FORWARDS = {
    kind.forward
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
}


def is_statistical_norm(module: nn.Module) -> bool:
    """A norm whose mean runs over channels, so that a zero would count in it."""
    named = "norm" in type(module).__name__.lower()
    return named and not isinstance(module, _NormBase) and isinstance(module.weight, Tensor)


def norm_what_is_left(small: nn.Module, kept: Tensor, size: int, first: bool, x: Tensor) -> Tensor:
    axes = (1, -1) if first else (-1, 1)
    axis = next(a for a in axes if x.shape[a] == size)
    return torch.zeros_like(x).index_copy(axis, kept, small(x.index_select(axis, kept)))


def convolve_what_is_left(small: nn.Module, ins: Tensor, outs: Tensor, size: int, x: Tensor) -> Tensor:
    """For convolutions that standardise their weights: a weight of zero would count."""
    y: Tensor = small(x.index_select(1, ins))
    return y.new_zeros(len(y), size, *y.shape[2:]).index_copy(1, outs, y)


def channels_left(module: _ConvNd, left: Tensor) -> tuple[Tensor, Tensor]:
    rows = left // module.weight[0].numel()
    columns = left % module.weight[0].numel() // module.weight[0, 0].numel()
    group = rows // (module.out_channels // module.groups)
    return (group * (module.in_channels // module.groups) + columns).unique(), rows.unique()


# ---------------------------------------------------------------------------------------------------------------
# Speed
# ---------------------------------------------------------------------------------------------------------------


def torchvision_net(name: str) -> tuple[nn.Module, Call]:
    from torchvision import models

    return getattr(models, name)().eval(), ((torch.randn(1, 3, 224, 224),), {})


def torchvision_video(name: str, *shape: int) -> tuple[nn.Module, Call]:
    from torchvision.models import video

    return getattr(video, name)().eval(), ((torch.randn(1, 3, *shape),), {})


def timm_net(name: str, size: int = 224) -> tuple[nn.Module, Call]:
    import timm

    return timm.create_model(name).eval(), ((torch.randn(1, 3, size, size),), {})


def llama() -> tuple[nn.Module, Call]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
        intermediate_size=2048, vocab_size=32000, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), ((), {"input_ids": torch.randint(0, 32000, (1, 16))})


def resnet50_cifar() -> tuple[nn.Module, Call]:
    return sp.models.resnet50(classes=10, stem="cifar").eval(), ((torch.randn(1, 3, 32, 32),), {})


Make = Callable[[], tuple[nn.Module, Call]]
TRACED: dict[str, Make] = {
    "torchvision resnet50, 224x224": partial(torchvision_net, "resnet50"),
    "torchvision vit_b_16, 224x224": partial(torchvision_net, "vit_b_16"),
    "transformers Llama, 100M, 16 tokens": llama,
    "timm mobilevit_s, 256x256": partial(timm_net, "mobilevit_s", 256),
    "timm cait_xxs24_224, 224x224": partial(timm_net, "cait_xxs24_224"),
    "timm nextvit_small, 224x224": partial(timm_net, "nextvit_small"),
    "timm swinv2_cr_tiny_224, 224x224": partial(timm_net, "swinv2_cr_tiny_224"),
    "torchvision swin3d_t, 8x64x64": partial(torchvision_video, "swin3d_t", 8, 64, 64),
    "torchvision mvit_v2_s, 16x224x224": partial(torchvision_video, "mvit_v2_s", 16, 224, 224),
}
PRUNED: dict[str, Make] = {
    "torchvision resnet50, 224x224": partial(torchvision_net, "resnet50"),
    "spalier resnet50, cifar stem, 32x32": resnet50_cifar,
}
Times = dict[str, list[float]]


def trace_speed(make: Make, repeats: int) -> dict[str, Any]:
    """Seconds of `trace`, which exports the network first and may find it in its cache, beside the export alone."""
    net, call = make()
    contenders: dict[str, Callable[[nn.Module], object]] = {
        "export": lambda net: torch.export.export(net, *call, strict=False),
        "trace": lambda net: sp.trace(net, call[1] or call[0]),
        "cached": lambda net: sp.trace(net, call[1] or call[0], cache=folder),
    }
    with tempfile.TemporaryDirectory() as folder:
        times = in_turns(contenders, net, repeats)
    return summed_up(times, {"trace : export": ratio(times["trace"], times["export"])})


def prune_speed(make: Make, repeats: int) -> dict[str, Any]:
    """Seconds of `prune_`, with and without its check, beside all that Torch-Pruning does: graph, pruner and step."""
    net, call = make()
    plan = half(sp.trace(net, call[1] or call[0]))
    contenders: dict[str, Callable[[nn.Module], object]] = {
        "trace": lambda net: sp.trace(net, call[1] or call[0]),
        "prune_": lambda net: sp.prune_(net, plan),
        "prune_ unchecked": lambda net: sp.prune_(net, plan, check=False),
        "torch-pruning": lambda net: torch_pruner(net, call).step(),
    }
    times = in_turns(contenders, net, repeats)
    theirs = times["torch-pruning"]
    both = [sum(pair) for pair in zip(times["trace"], times["prune_"], strict=True)]
    return summed_up(
        times,
        {
            "prune_ : torch-pruning": ratio(times["prune_"], theirs),
            "prune_ unchecked : torch-pruning": ratio(times["prune_ unchecked"], theirs),
            "trace and prune_ : torch-pruning": ratio(both, theirs),
        },
    )


def in_turns(contenders: dict[str, Callable[[nn.Module], object]], net: nn.Module, repeats: int) -> Times:
    """CPU seconds on fresh copies. Contenders take turns, so that a busy machine slows all alike."""
    times: Times = {name: [] for name in contenders}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(repeats + 1):
            for name, run in contenders.items():
                fresh = copy.deepcopy(net)
                start = time.process_time()
                run(fresh)
                if number:  # the first round warms up
                    times[name].append(round(time.process_time() - start, 4))
    return times


def ratio(ours: list[float], theirs: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, theirs, strict=True)), 3)


def summed_up(times: Times, ratios: dict[str, float]) -> dict[str, Any]:
    medians = {name: round(statistics.median(found), 4) for name, found in times.items()}
    print(json.dumps({"medians": medians, "ratios": ratios}), flush=True)
    return {"medians": medians, "ratios": ratios, "seconds": times}


# ---------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------


def markdown() -> str:
    """The tables as docs/structure.md shows them, one for each family."""
    found = rows()
    parts = []
    for family in survey.FAMILIES:
        own = {name: row for name, row in found.items() if survey.family(name) == family}
        parts += [f"### {family[0].upper()}{family[1:]}", "", *lines_of(own), ""] if own else []
    right = sum(is_right(row["spalier"]) for row in found.values())
    beside = [row for row in found.values() if "torch_pruning" in row]
    ours, theirs = (sum(is_right(row[key]) for row in beside) for key in ("spalier", "torch_pruning"))
    share = statistics.median(row["spalier"].get("prunable", 0) for row in found.values())
    parts.append(
        f"Right and smaller: {right} of {len(found)} networks; of the {len(beside)} that Torch-Pruning was tried on, "
        f"{ours} with Spalier and {theirs} with Torch-Pruning. Of the median network {share:.0%} of the weights are "
        "prunable."
    )
    return "\n".join(parts)


def lines_of(found: dict[str, Any]) -> list[str]:
    lines = [
        "| network | prunable | units | trace, s | equal | what stays, and why | Torch-Pruning: equal |",
        "|---|---:|---:|---:|---|---|---|",
    ]
    for name, row in found.items():
        ours = row["spalier"]
        share = f"{ours['prunable']:.0%}" if "prunable" in ours else "–"
        cells = [name.partition("/")[2], share, shown(ours, "units"), shown(ours, "trace_seconds"), said(ours, "equal")]
        cells += [why(ours), said(row["torch_pruning"], "equal") if "torch_pruning" in row else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def why(row: dict[str, Any]) -> str:
    if "error" in row:
        return str(row["error"]).replace("|", "/")[:120]
    return "; ".join(f"{share:.0%} {reason}" for reason, share in list(row.get("stays", {}).items())[:2])


def shown(row: dict[str, Any], key: str) -> str:
    return f"{row[key]:,}" if key in row else "–"


def said(row: dict[str, Any], key: str) -> str:
    if row.get(key) and key == "equal" and not row["removed"]:
        return "nothing removed"
    return "yes" if row.get(key) else "no"


def is_right(row: dict[str, Any]) -> bool:
    return bool(row.get("equal")) and row.get("removed", 0) > 0


def write_table() -> None:
    before, _, rest = DOCUMENT.read_text().partition("<!-- table -->")
    after = rest.partition("<!-- /table -->")[2]
    DOCUMENT.write_text(f"{before}<!-- table -->\n\n{markdown()}\n\n<!-- /table -->{after}")


def summary(found: dict[str, Any]) -> dict[str, int]:
    """How many networks each library gets how far with."""
    counted = {}
    for library in ("spalier", "torch_pruning"):
        each = [row[library] for row in found.values() if library in row]
        counted[f"{library} networks"] = len(each)
        counted[f"{library} raises"] = sum("error" in row for row in each)
        for key in ("runs", "shape_right", "equal"):
            counted[f"{library} {key}"] = sum(bool(row.get(key)) for row in each)
        counted[f"{library} right and smaller"] = sum(is_right(row) for row in each)
    return counted


def machine() -> dict[str, Any]:
    from importlib.metadata import version

    packages = ("torch", "torchvision", "timm", "transformers", "torch-pruning")
    return {name: version(name) for name in packages} | {
        "spalier": sp.__version__,
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "processor": platform.machine(),
    }


def update(section: str, content: dict[str, Any]) -> None:
    report = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    report[section] = {"machine": machine(), **content}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(compact(report) + "\n")


def compact(report: dict[str, Any]) -> str:
    """JSON with a line for each network and library, and for each list of times."""
    return _lines(report, 0)


def _lines(value: Any, depth: int) -> str:
    if not isinstance(value, dict) or not any(isinstance(v, dict | list) for v in value.values()):
        return json.dumps(value)
    pad = " " * depth
    inner = (f"{pad} {json.dumps(key)}: {_lines(inside, depth + 1)}" for key, inside in value.items())
    return "{\n" + ",\n".join(inner) + f"\n{pad}}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("coverage", "trace", "prune", "table")
    parser.add_argument("parts", nargs="*", choices=parts, default=list(parts))
    parser.add_argument("--networks", nargs="+", default=[], help="only these; the others stay as they are")
    parser.add_argument("--resume", action="store_true", help="leave out networks that have a result")
    parser.add_argument("--keep", action="store_true", help="take over what was measured of Torch-Pruning")
    parser.add_argument("--repeats", type=int, default=9, help="timed rounds of each contender")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "coverage" in options.parts:
        coverage(options.networks, options.resume, options.keep)
    if "trace" in options.parts:
        found = {name: trace_speed(make, options.repeats) for name, make in TRACED.items()}
        update("trace_speed", {"repeats": options.repeats, "networks": found})
    if "prune" in options.parts:
        found = {name: prune_speed(make, options.repeats) for name, make in PRUNED.items()}
        update("prune_speed", {"repeats": options.repeats, "networks": found})
    if "table" in options.parts:
        write_table()


if __name__ == "__main__":
    main()
