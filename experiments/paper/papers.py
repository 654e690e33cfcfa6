"""The numbers of the paper's table 1, to stand beside ours: accuracy in per cent, learned parameters in thousands."""

from __future__ import annotations

DATA = ("cifar10", "flowers102", "catsanddogs")
# criterion, learning, density: learned (K), FLOPs (M), and accuracies on the three data sets; None was not obtained
TABLE: dict[tuple[str, str, float], tuple[float, float, tuple[float | None, ...]]] = {
    ("none", "fine-pruning", 1.0): (23520.8, 1304.7, (97.10, 92.20, 99.30)),
    ("none", "r32", 1.0): (1644.5, 1304.7, (95.32, 78.57, 98.60)),
    ("none", "r8", 1.0): (466.3, 1304.7, (95.35, 80.96, 98.84)),
    ("weight", "fine-pruning", 0.3): (4427.1, 785.4, (96.38, 93.64, 98.64)),
    ("weight", "fine-pruning", 0.1): (599.1, 352.1, (87.23, 72.83, 95.42)),
    ("weight", "r32", 0.3): (618.3, 778.6, (95.59, 94.57, 98.43)),
    ("weight", "r32", 0.1): (294.8, 335.4, (93.04, 89.36, 96.25)),
    ("weight", "r8", 0.3): (210.0, 773.4, (94.91, 92.13, 98.40)),
    ("weight", "r8", 0.1): (128.9, 338.9, (91.24, 86.49, 96.07)),
    ("gradient", "fine-pruning", 0.3): (3719.8, 571.9, (95.95, 94.21, 98.22)),
    ("gradient", "fine-pruning", 0.1): (615.7, 244.7, (91.83, 73.06, 95.84)),
    ("gradient", "r32", 0.3): (601.0, 564.6, (94.91, 93.58, 98.17)),
    ("gradient", "r32", 0.1): (293.1, 244.0, (93.65, 91.35, 97.54)),
    ("gradient", "r8", 0.3): (205.2, 565.2, (94.09, 91.60, 98.15)),
    ("gradient", "r8", 0.1): (128.3, 245.4, (91.25, 87.46, 97.19)),
    ("taylor", "fine-pruning", 0.3): (3392.8, 559.9, (95.71, 92.91, 98.22)),
    ("taylor", "fine-pruning", 0.1): (576.8, 236.9, (88.07, 65.67, 95.30)),
    ("taylor", "r32", 0.3): (599.7, 555.5, (94.88, 93.41, 97.84)),
    ("taylor", "r32", 0.1): (292.6, 242.0, (93.27, 91.30, 97.21)),
    ("taylor", "r8", 0.3): (205.3, 566.2, (93.98, 91.51, 97.90)),
    ("taylor", "r8", 0.1): (128.4, 243.2, (91.22, 86.76, 96.83)),
    ("lrp", "fine-pruning", 0.3): (4428.1, 719.9, (96.54, 95.37, 98.65)),
    ("lrp", "fine-pruning", 0.1): (608.4, 301.6, (93.52, 87.56, None)),
    ("lrp", "r32", 0.3): (592.6, 585.5, (94.85, 93.62, 98.09)),
    ("lrp", "r32", 0.1): (290.9, 270.4, (93.47, 91.22, 97.01)),
    ("lrp", "r8", 0.3): (203.3, 591.1, (93.53, 91.26, 97.80)),
    ("lrp", "r8", 0.1): (128.0, 281.6, (90.94, 85.69, 96.88)),
}


def accuracy(criterion: str, learning: str, density: float, data: str) -> float | None:
    """What the paper states, as a share; None where it states nothing."""
    found = TABLE.get(("none" if density == 1.0 else criterion, learning, density))
    stated = None if found is None else found[2][DATA.index(data)]
    return None if stated is None else stated / 100


def gained(learning: str, density: float) -> float:
    """How much better than fine-pruning, on average over criteria and data sets: the paper's headline, in points."""
    pairs = [
        (ours, base)
        for (criterion, method, at), (_, _, stated) in TABLE.items()
        if method == learning and at == density
        for ours, base in zip(stated, TABLE[criterion, "fine-pruning", at][2], strict=True)
        if ours is not None and base is not None
    ]
    return sum(ours - base for ours, base in pairs) / len(pairs)
