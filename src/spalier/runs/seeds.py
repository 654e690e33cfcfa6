"""Numbers to seed with, as functions of where a run is, so that randomness has no state to save."""

from __future__ import annotations

import hashlib


def seed_of(*parts: int | str) -> int:
    """A number of 63 bits that depends on every part.

    >>> seed_of(0, "step", 1) != seed_of(0, "step", 2)
    True
    """
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
