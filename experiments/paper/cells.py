"""Cells: one run each, named after what tells it from the others, and the experiments that they make up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from experiments.paper.protocol import CRITERIA, Protocol

METHODS: Mapping[str, Mapping[str, Any]] = {
    "fine-pruning": {"method": "fine-pruning"},
    "r32": {"method": "splora", "rank": 32},
    "r8": {"method": "splora", "rank": 8},
}
"""What learns, as the paper's table has it."""
RANKS = (1, 2, 4, 8, 16, 32, 64)
Masks = Literal["enforced", "released"]


@dataclass(frozen=True)
class Cell:
    """One run: what happens before the first prune, which cells may share, and what happens after it."""

    data: str
    trunk: str
    """Names all settings of the first block but the seed; cells of equal trunks share it."""
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    variant: str
    seed: int
    masks: Masks = "enforced"
    teacher: str = ""
    """The trunk whose unpruned network teaches this one."""
    labels: Mapping[str, Any] = field(default_factory=dict)
    """What tables and figures find it by."""

    @property
    def name(self) -> str:
        """The name of its folder and of its results."""
        return f"{self.data}-{self.variant}-{self.trunk}-seed{self.seed}"

    @property
    def trunk_name(self) -> str:
        """The name of the folder of its first block."""
        return f"{self.data}-{self.trunk}-seed{self.seed}"


def experiments(protocol: Protocol) -> dict[str, list[Cell]]:
    """All cells by experiment; a cell may be in several."""
    made = {
        "table": _table,
        "control": _control,
        "masks": _masks,
        "literal": _literal,
        "writers": _writers,
        "distillation": _distillation,
        "ranks": _ranks,
        "ablation": _ablation,
    }
    return {name: [cell for seed in protocol.seeds for cell in make(protocol, seed)] for name, make in made.items()}


def in_order(found: Mapping[str, Sequence[Cell]]) -> list[Cell]:
    """Every cell once, all of the first seed before any of the next."""
    cells = {cell.name: cell for several in found.values() for cell in several}
    return sorted(cells.values(), key=lambda cell: cell.seed)  # which keeps their order otherwise


def cell_of(
    protocol: Protocol,
    data: str,
    learning: str,
    seed: int,
    *,
    criterion: str = "taylor",
    variant: str = "",
    adapter: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
    masks: Masks = "enforced",
    teacher: str = "",
    base: Mapping[str, Any] | None = None,
) -> Cell:
    """A cell as the table has it, but for what is said."""
    method = METHODS.get(learning) or {"method": "splora", "rank": int(learning[1:])}
    own, other = dict(adapter or {}), dict(base or {})
    parts = [
        learning,
        *(f"{key}={_text(value)}" for key, value in own.items()),
        *filter(None, [other.get("network")]),
    ]
    settings = {
        **protocol.settings(data, method["method"]),
        **method,
        **other,
        "adapter_options": own,
        "seed": seed,
    }
    told = {
        "data": data,
        "learning": learning,
        "criterion": criterion,
        "seed": seed,
        "variant": variant,
        **own,
    }
    told |= {"network": other["network"]} if other else {}
    return Cell(
        data=data,
        trunk="-".join(parts),
        before=settings,
        after={"criterion": criterion, **(after or {})},
        variant="-".join(filter(None, (criterion, variant))),
        seed=seed,
        masks=masks,
        teacher=teacher,
        labels=told,
    )


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def teacher_of(protocol: Protocol, cell: Cell) -> Cell:
    """A cell that begins as the teacher of this one did."""
    return cell_of(protocol, cell.data, cell.teacher, cell.seed)


def _table(protocol: Protocol, seed: int) -> Iterator[Cell]:
    """The paper's table 1 and figures 3, 5 and 6; `random` is the control that it lacks."""
    for data in protocol.data:
        for criterion in protocol.criteria[data]:
            for learning in METHODS:
                yield cell_of(protocol, data, learning, seed, criterion=criterion)


def _control(protocol: Protocol, seed: int) -> Iterator[Cell]:
    """Unpruned networks that learn for as many epochs as the pruned ones do."""
    for learning in METHODS:
        cell = cell_of(protocol, "cifar10", learning, seed, criterion="unpruned")
        longer = {"epochs": protocol.epochs(cell.before), "densities": ()}
        yield replace(cell, trunk=f"{cell.trunk}-longer", before={**cell.before, **longer}, after={})


def _masks(protocol: Protocol, seed: int) -> Iterator[Cell]:
    """Masks that are applied once and released, as in the published code."""
    for learning in METHODS:
        yield cell_of(protocol, "cifar10", learning, seed, variant="released", masks="released")


def _literal(protocol: Protocol, seed: int) -> Iterator[Cell]:
    """The criteria as the published code computes them, with masks enforced."""
    options = {"criterion_options": {"literal": True}}
    for criterion in CRITERIA:
        yield cell_of(protocol, "cifar10", "r8", seed, criterion=criterion, variant="literal", after=options)


def _writers(protocol: Protocol, seed: int) -> Iterator[Cell]:
    """Layers that write into one stream keep the same channels, by the sum of their scores or by the mean."""
    for variant, together in (("coupled", "sum"), ("coupled-mean", "mean")):
        for learning in METHODS:
            after = {"writers": "coupled", "select_options": {"aggregate": together}}
            yield cell_of(protocol, "cifar10", learning, seed, variant=variant, after=after)


def _distillation(protocol: Protocol, seed: int) -> Iterator[Cell]:
    """A teacher beside the labels: the network itself before it was pruned, or the fine-tuned one."""
    for learning in ("r32", "r8"):
        for variant, teacher in (("self-taught", learning), ("taught", "fine-pruning")):
            yield cell_of(protocol, "cifar10", learning, seed, variant=variant, teacher=teacher)


def _ranks(protocol: Protocol, seed: int) -> Iterator[Cell]:
    """Which rank is worth its bytes: each rank, the whole kernel, and rank 32 whose components are pruned too."""
    for rank in RANKS:
        yield cell_of(protocol, "cifar10", f"r{rank}", seed)
    for rank in protocol.whole_kernel:
        yield cell_of(protocol, "cifar10", f"r{rank}", seed, adapter={"kernel": "full"})
    for share in (0.25, 0.0625):
        yield cell_of(
            protocol,
            "cifar10",
            "r32",
            seed,
            variant=f"rank-pruned={share:g}",
            after={"select_options": {"rank": share}},
        )


def _ablation(protocol: Protocol, seed: int) -> Iterator[Cell]:
    """Ranks and the range of the first values (figure 4)."""
    for rank in protocol.ablation_ranks:
        for init in protocol.ablation_inits:
            own = {} if init == 1e-4 else {"init_range": init}
            yield cell_of(protocol, "cifar10", f"r{rank}", seed, adapter=own, base=protocol.ablation)
