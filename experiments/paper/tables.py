"""The tables of docs/paper.md, from the cells' results and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.paper import papers
from experiments.paper.cells import METHODS, RANKS
from experiments.paper.found import Found
from experiments.paper.protocol import Protocol
from spalier.text import Mean, mean

NAMES = {"fine-pruning": "fine-pruning", "r32": "SPLoRA r32", "r8": "SPLoRA r8"}
_COUPLED, _TAUGHT = ("coupled", "coupled-mean"), ("self-taught", "taught")
DATA = {"cifar10": "CIFAR-10", "flowers102": "Flowers 102", "catsanddogs": "Cats & Dogs"}


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Mean | None) -> str:
    return "" if value is None else str(value)


def _whole(value: Mean | None) -> str:
    return "" if value is None else f"{value.value:,.0f}"


def _percent(density: float) -> str:
    return f"{100 * density:g}%"


def _stated(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


# -- the main table ---------------------------------------------------------------------------------------------------


def main_table(found: Found, protocol: Protocol) -> str:
    """Accuracies on all data sets, ours beside the paper's."""
    titles = ["criterion", "learning", "channels"]
    for data in protocol.data:
        titles += [DATA[data], "paper"]
    rows = []
    for learning in METHODS:
        rows.append(["", NAMES[learning], "100%", *_accuracies(found, protocol, "taylor", learning, 1.0)])
    for criterion in protocol.criteria["cifar10"]:
        for learning in METHODS:
            for density in protocol.shown[1:]:
                cells = _accuracies(found, protocol, criterion, learning, density)
                rows.append([criterion, NAMES[learning], _percent(density), *cells])
    return markdown(titles, rows)


def _accuracies(found: Found, protocol: Protocol, criterion: str, learning: str, density: float) -> Iterator[str]:
    for data in protocol.data:
        yield _cell(found.mean(density, data=data, criterion=criterion, learning=learning))
        yield _stated(papers.accuracy(criterion, learning, density, data))


def size_table(found: Found, protocol: Protocol) -> str:
    """What the networks of the table cost: learned, MACs, bytes; by Taylor."""
    titles = ["data", "learning", "channels", "weights", "MACs", "learned", "task file, bytes"]
    rows = []
    for data in protocol.data:
        for learning in METHODS:
            for density in protocol.shown:
                labels: dict[str, Any] = {"data": data, "criterion": "taylor", "learning": learning}
                shares = [found.mean(density, name, **labels) for name in ("channels", "weights", "macs")]
                if shares[0] is None:
                    continue
                sizes = [found.mean(density, name, scale=1, **labels) for name in ("learned", "bytes")]
                rows.append([DATA[data], NAMES[learning], *(_share(s) for s in shares), *map(_whole, sizes)])
    return markdown(titles, rows)


def _share(value: Mean | None) -> str:
    return "" if value is None else f"{value.value:.1f}%"


def gain_table(found: Found, protocol: Protocol) -> str:
    """SPLoRA's accuracy less fine-pruning's at the same channels, in points, seed by seed: what is left of +6.9."""
    titles = [
        "data",
        "criterion",
        "learning",
        *(f"{_percent(d)}" for d in protocol.shown),
        "the paper's, at 30%",
        "at 10%",
    ]
    rows = []
    for data in protocol.data:
        for criterion in protocol.criteria["cifar10"]:
            for learning in ("r32", "r8"):
                gains = [_gain(found, density, data, criterion, learning) for density in protocol.shown]
                if gains[-1] is None:
                    continue
                stated = [_stated_gain(data, criterion, learning, density) for density in (0.3, 0.1)]
                rows.append([DATA[data], criterion, NAMES[learning], *map(_signed, gains), *stated])
    return markdown(titles, rows)


def _gain(found: Found, density: float, data: str, criterion: str, learning: str, **other: Any) -> Mean | None:
    """Differences between cells of the same seed."""
    base = _by_seed(found, density, data=data, criterion=criterion, learning="fine-pruning", **other)
    own = _by_seed(found, density, data=data, criterion=criterion, learning=learning, **other)
    return mean([own[seed] - base[seed] for seed in own if seed in base])


def _by_seed(found: Found, density: float, number: str = "test", **labels: Any) -> dict[int, float]:
    return {
        cell["labels"]["seed"]: 100 * row[number]
        for cell in found.pick(**labels)
        for row in cell["rows"]
        if row["target"] == density and row.get(number) is not None
    }


def _signed(value: Mean | None) -> str:
    if value is None:
        return ""
    spread = "" if value.deviation is None else f" ± {value.deviation:.1f}"
    return f"{value.value:+.1f}{spread}"


def _stated_gain(data: str, criterion: str, learning: str, density: float) -> str:
    own, base = (papers.accuracy(criterion, name, density, data) for name in (learning, "fine-pruning"))
    return "" if own is None or base is None else f"{100 * (own - base):+.1f}"


# -- what the paper did otherwise -------------------------------------------------------------------------------------


def masks_table(found: Found, protocol: Protocol) -> str:
    """Masks enforced, released, and released but removed in the end."""
    found = found.alike(data=["cifar10"], criterion=["taylor"], learning=list(METHODS), variant=["", "released"])
    titles = [
        "learning",
        "channels",
        "enforced",
        "released",
        "pruned filters that are alive",
        "released, then removed",
    ]
    rows = []
    for learning in METHODS:
        labels: dict[str, Any] = {"data": "cifar10", "criterion": "taylor", "learning": learning}
        for density in protocol.shown[1:]:
            released = found.rows(density, **labels, variant="released")
            alive = mean([100 * row["alive"] / row["pruned"] for row in released])
            rows.append(
                [
                    NAMES[learning],
                    _percent(density),
                    _cell(found.mean(density, **labels)),
                    _cell(found.mean(density, **labels, variant="released")),
                    _share(alive),
                    _cell(found.mean(density, "test_removed", **labels, variant="released")),
                ]
            )
    return markdown(titles, rows)


def released_gains(found: Found, protocol: Protocol) -> str:
    """SPLoRA less fine-pruning where masks are enforced and where they are not."""
    titles = ["learning", "masks", *(_percent(d) for d in protocol.shown[1:])]
    rows = []
    for learning in ("r32", "r8"):
        for words, variant in (("enforced", ""), ("released", "released")):
            gains = [_gain(found, d, "cifar10", "taylor", learning, variant=variant) for d in protocol.shown[1:]]
            rows.append([NAMES[learning], words, *map(_signed, gains)])
    return markdown(titles, rows)


def literal_table(found: Found, protocol: Protocol) -> str:
    """Criteria where the signal is, as published, and random numbers."""
    found = found.alike(
        data=["cifar10"], learning=["r8"], criterion=protocol.criteria["cifar10"], variant=["", "literal"]
    )
    titles = ["criterion", "computed", *(_percent(d) for d in protocol.shown[1:])]
    rows = []
    for criterion in protocol.criteria["cifar10"]:
        for words, variant in (("ours", ""), ("as published", "literal")):
            means = [
                found.mean(d, data="cifar10", criterion=criterion, learning="r8", variant=variant)
                for d in protocol.shown[1:]
            ]
            if means[-1] is not None:
                rows.append([criterion, words if criterion != "random" else "", *map(_cell, means)])
    return markdown(titles, rows)


def writers_table(found: Found, protocol: Protocol) -> str:
    """Free writers against coupled ones; the same share of channels is not the same share of work."""
    found = found.alike(data=["cifar10"], criterion=["taylor"], learning=list(METHODS), variant=["", *_COUPLED])
    titles = ["learning", "writers", "channels", "weights", "MACs", "accuracy"]
    ways = {"free": "", "coupled, scores summed": _COUPLED[0], "coupled, their mean": _COUPLED[1]}
    rows = []
    for learning in METHODS:
        for words, variant in ways.items():
            labels: dict[str, Any] = {
                "data": "cifar10",
                "criterion": "taylor",
                "learning": learning,
                "variant": variant,
            }
            for density in protocol.shown[1:]:
                accuracy = found.mean(density, **labels)
                if accuracy is None:
                    continue
                costs = [found.mean(density, name, **labels) for name in ("weights", "macs")]
                rows.append([NAMES[learning], words, _percent(density), *map(_share, costs), str(accuracy)])
    return markdown(titles, rows)


def control_table(found: Found, protocol: Protocol) -> str:
    """Unpruned networks with as many epochs as the pruned ones have had."""
    titles = ["learning", "unpruned, before pruning begins", "unpruned, as many epochs as to 10%", "at 10%"]
    rows = []
    for learning in METHODS:
        own = found.alike(data=["cifar10"], criterion=["taylor", "unpruned"], variant=[""], learning=[learning])
        labels: dict[str, Any] = {"data": "cifar10", "learning": learning}
        means = [
            own.mean(1.0, criterion="taylor", **labels),
            own.mean(1.0, criterion="unpruned", **labels),
            own.mean(0.1, criterion="taylor", **labels),
        ]
        if means[1] is not None:
            rows.append([NAMES[learning], *map(_cell, means)])
    return markdown(titles, rows)


# -- open questions ---------------------------------------------------------------------------------------------------


def distillation_table(found: Found, protocol: Protocol) -> str:
    """Labels alone, the network itself as a teacher, the fine-tuned one; less fine-pruning at 30%."""
    found = found.alike(data=["cifar10"], criterion=["taylor"], learning=list(METHODS), variant=["", *_TAUGHT])
    titles = ["learning", "teacher", *(_percent(d) for d in protocol.shown[1:]), "less fine-pruning, at 30%"]
    base: dict[str, Any] = {"data": "cifar10", "criterion": "taylor"}
    fine = [found.mean(d, learning="fine-pruning", **base) for d in protocol.shown[1:]]
    rows = [[NAMES["fine-pruning"], "none", *map(_cell, fine), ""]]
    seeds = _by_seed(found, 0.3, learning="fine-pruning", **base)
    for learning in ("r32", "r8"):
        for words, variant in zip(("none", "itself, unpruned", "fine-tuned network"), ("", *_TAUGHT), strict=True):
            labels: dict[str, Any] = {**base, "learning": learning, "variant": variant}
            own = _by_seed(found, 0.3, **labels)
            gap = mean([own[seed] - seeds[seed] for seed in own if seed in seeds])
            means = [found.mean(d, **labels) for d in protocol.shown[1:]]
            rows.append([NAMES[learning], words, *map(_cell, means), _signed(gap)])
    return markdown(titles, rows)


def ranks_table(found: Found, protocol: Protocol) -> str:
    """What each rank costs and gives at 10% of the channels, and whether another gives as much for fewer bytes."""
    found = found.alike(data=["cifar10"], criterion=["taylor"], variant=["", "rank-pruned=0.25", "rank-pruned=0.0625"])
    titles = [
        "adapter",
        "learned at 10%",
        "file at 10%, bytes",
        "accuracy at 10%",
        "at 30%",
        "as good with fewer bytes",
    ]
    numbers = {words: _costs(found, labels) for words, labels in _kinds(protocol)}
    known = {words: each for words, each in numbers.items() if each["test"] is not None}
    rows = [
        [
            words,
            _whole(each["learned"]),
            _whole(each["bytes"]),
            _cell(each["test"]),
            _cell(each["at 30%"]),
            _better(words, known),
        ]
        for words, each in known.items()
    ]
    return markdown(titles, rows)


def _kinds(protocol: Protocol) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is compared by bytes."""
    for rank in RANKS:
        yield f"r{rank}", {"learning": f"r{rank}"}
    for rank in protocol.whole_kernel:
        yield f"r{rank}, whole kernel", {"learning": f"r{rank}", "kernel": "full"}
    for share, value in (("a quarter", "0.25"), ("a sixteenth", "0.0625")):
        yield f"r32, {share} of its components kept", {"learning": "r32", "variant": f"rank-pruned={value}"}
    yield "fine-pruning", {"learning": "fine-pruning"}


def _costs(found: Found, labels: dict[str, Any]) -> dict[str, Mean | None]:
    own = {"data": "cifar10", "criterion": "taylor", **labels}
    return {
        "learned": found.mean(0.1, "learned", scale=1, **own),
        "bytes": found.mean(0.1, "bytes", scale=1, **own),
        "test": found.mean(0.1, **own),
        "at 30%": found.mean(0.3, **own),
    }


def _better(words: str, known: dict[str, dict[str, Mean | None]]) -> str:
    """The smallest file that is at least as accurate as this one, and smaller; by means."""

    def value(name: str, number: str) -> float:
        mean = known[name][number]
        assert mean is not None
        return mean.value

    found = [
        other
        for other in known
        if value(other, "bytes") < value(words, "bytes") and value(other, "test") >= value(words, "test")
    ]
    return min(found, key=lambda other: value(other, "bytes")) if found else ""


def ablation_table(found: Found, protocol: Protocol) -> str:
    """Ranks and ranges of the first values."""
    found = found.alike(data=["cifar10"], criterion=["taylor"], learning=[f"r{r}" for r in protocol.ablation_ranks])
    titles = ["rank", "range of W_up", *(_percent(d) for d in protocol.shown)]
    rows = []
    other = protocol.ablation.get("network", "")
    for rank in protocol.ablation_ranks:
        for init in protocol.ablation_inits:
            labels: dict[str, Any] = {
                "data": "cifar10",
                "criterion": "taylor",
                "learning": f"r{rank}",
                "init_range": init,
                "network": other,
            }
            means = [found.mean(d, **labels) for d in protocol.shown]
            if means[0] is not None:
                rows.append([str(rank), f"±{init:g}", *map(_cell, means)])
    return markdown(titles, rows)


def pays_from(base: float, file: float, network: float) -> int | None:
    """The fewest tasks for which base + T files < T networks; None where that is never so.

    >>> pays_from(100, 1, 11), pays_from(100, 11, 11)
    (11, None)
    """
    return None if network <= file else int(base // (network - file)) + 1


def times_table(found: Found, protocol: Protocol) -> str:
    """How long whole runs take, from 100% to 10%."""
    titles = ["data", "learning", "first block, s", "whole run, s", "runs"]
    rows = []
    for data in protocol.data:
        for learning in METHODS:
            labels: dict[str, Any] = {"data": data, "learning": learning, "criterion": "taylor"}
            times = [found.mean(d, "seconds", scale=1, **labels) for d in (1.0, 0.1)]
            if times[1] is not None:
                rows.append([DATA[data], NAMES[learning], *map(_whole, times), str(times[1].count)])
    return markdown(titles, rows)


TABLES: dict[str, Callable[[Found, Protocol], str]] = {
    "main": main_table,
    "sizes": size_table,
    "gains": gain_table,
    "masks": masks_table,
    "released-gains": released_gains,
    "literal": literal_table,
    "writers": writers_table,
    "control": control_table,
    "distillation": distillation_table,
    "ranks": ranks_table,
    "ablation": ablation_table,
    "times": times_table,
}
"""By the name that the page gives them."""
