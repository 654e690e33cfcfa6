"""The table that `attach_` returns: what learns, what is frozen, and what an adapter costs."""

from __future__ import annotations

from dataclasses import dataclass

from spalier._table import table


@dataclass(frozen=True)
class Row:
    """One module with parameters of its own."""

    name: str
    kind: str
    parameters: int
    rank: int | None
    learned: int
    learns: str
    """``adapter``, ``norm``, ``head``, ``weights``, or ``frozen`` with a reason."""

    @property
    def is_dear(self) -> bool:
        """True where the adapter costs more than the weight that it adapts."""
        return self.learns == "adapter" and self.learned > self.adapted

    adapted: int = 0
    """How many weights the adapter updates; biases are not among them."""


@dataclass(frozen=True)
class Summary:
    """What learns in an adapted network, by module and in total; prints as a table."""

    rows: tuple[Row, ...]
    parameters: int
    learned: int

    def __str__(self) -> str:
        cells = [
            [
                row.name,
                row.kind,
                f"{row.parameters:,}",
                "-" if row.rank is None else str(row.rank),
                f"{row.learned:,}",
                row.learns + (" (!)" if row.is_dear else ""),
            ]
            for row in self.rows
        ]
        lines = [table(["layer", "kind", "parameters", "rank", "learned", "learns"], cells)]
        share = 100 * self.learned / self.parameters
        lines.append(f"learned: {self.learned:,} of {self.parameters:,} parameters ({share:.1f}%)")
        if any(row.is_dear for row in self.rows):
            lines.append("(!) the adapter costs more than the weight it adapts; cap=True lowers its rank")
        return "\n".join(lines)
