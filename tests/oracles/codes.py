"""Codes of few bits, one number after the other, in plain Python."""

import itertools


def levels_of(levels):
    """All codes, in order."""
    half = (levels - 1) // 2
    return [-1, 1] if levels == 2 else list(range(-half, half + 1))


def nearest(value, scale, levels):
    """The code whose multiple of the scale is nearest; 0 for a scale of 0, where there is one."""
    if levels == 2:
        return -1 if value < 0 else 1
    return 0 if scale == 0 else min(levels_of(levels), key=lambda code: abs(value - code * scale))


def packed(codes, levels):
    """Digits to the base of levels, as many as fit into a byte."""
    digits = [levels_of(levels).index(code) for code in codes]
    many = max(n for n in range(1, 9) if levels**n <= 256)
    found = []
    for begin in range(0, len(digits), many):
        found.append(sum(digit * levels**place for place, digit in enumerate(digits[begin : begin + many])))
    return found


def error(row, codes, scale, metric):
    """``e metric e^T`` of one row."""
    gaps = [value - scale * code for value, code in zip(row, codes, strict=True)]
    indices = range(len(gaps))
    return sum(gaps[i] * metric[i][j] * gaps[j] for i, j in itertools.product(indices, indices))
