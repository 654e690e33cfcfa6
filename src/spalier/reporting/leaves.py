"""The leaves of a branch: each channel a leaf, or, where there are more channels than room, each few a twig.

Whatever goes at the same step is one path, so that a page can cut a branch back by hiding paths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

_TALLEST = 16.0
_FINEST = 2.0  # pixels between two leaves or twigs


def paths(lives: Sequence[int], x: float, y: float, half: float, room: float) -> dict[int, str]:
    """What to draw by step of cutting, around a trunk at x, half so wide to each side, with room above and below."""
    slots = max(1, int(half / _FINEST))
    left, right = lives[0::2], lives[1::2]
    many = -(-max(len(left), len(right), 1) // slots)
    found: dict[int, list[str]] = defaultdict(list)
    for side, sign in ((left, -1), (right, 1)):
        bins = [side[i : i + many] for i in range(0, len(side), many)]
        pitch = half / max(-(-len(left) // many), 1)
        for place, held in enumerate(bins):
            at = x + sign * (place + 0.6) * pitch
            if many == 1:
                found[held[0]].append(_leaf(at, y, pitch, room, sign, place))
            else:
                _twig(found, held, many, at, y, room)
    return {step: "".join(pieces) for step, pieces in sorted(found.items())}


def _leaf(x: float, y: float, pitch: float, room: float, sign: int, place: int) -> str:
    """A pointed leaf, above and below the branch in turn, leaning outwards."""
    up = -1 if place % 2 else 1
    wide = min(max(0.62 * pitch, 1.6), 0.42 * room)
    tall = up * min(0.86 * room, max(2.6 * pitch, 9.0))
    lean = sign * min(0.45 * pitch, 0.4 * room)
    a, b = f"{lean - wide:.1f} {tall * 0.45:.1f}", f"{wide:.1f} {-tall * 0.35:.1f}"
    return f"M{x:.1f} {y:.1f}q{a} {lean:.1f} {tall:.1f}q{b} {-lean:.1f} {-tall:.1f}"


def _twig(
    found: dict[int, list[str]], held: Sequence[int], many: int, x: float, y: float, room: float
) -> None:
    """A stroke for all that were there, and on it a shorter one for all that outlived each step."""
    for step in sorted(set(held)):
        tall = min(1.6 * room, _TALLEST) * sum(life >= step for life in held) / many
        found[step].append(f"M{x:.1f} {y - tall / 2:.1f}v{tall:.1f}")


def is_twigs(count: int, half: float) -> bool:
    """Whether a branch of so many channels is drawn with strokes."""
    return -(-count // 2) > max(1, int(half / _FINEST))
