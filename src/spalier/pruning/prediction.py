"""What a network will be once a plan has been carried out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prediction:
    """Sizes and costs before and after; `count` finds the same numbers in the pruned network."""

    channels: int
    """Output channels of the layers that write streams: what the paper's density counts."""
    channels_base: int
    parameters: int
    parameters_base: int
    learned: int
    bytes: int
    """Of the fused network's parameters and buffers."""
    macs: int | None
    macs_base: int | None
    task_bytes: int | None
    """What a task file holds in float32, its header left out; None for a network without adapters."""
    latency: float | None = None
    """Measured seconds for one batch, where the budget was one of latency."""
    latency_base: float | None = None

    @property
    def density(self) -> dict[str, float]:
        """What is left of the unpruned network: of channels (the paper's density), of weights, and of MACs."""
        found = {
            "channels": self.channels / max(self.channels_base, 1),
            "weights": self.parameters / max(self.parameters_base, 1),
        }
        if self.macs is not None and self.macs_base:
            found["macs"] = self.macs / self.macs_base
        return found

    def __str__(self) -> str:
        density = self.density
        lines = [
            f"channels    {self.channels:,} of {self.channels_base:,} ({density['channels']:.1%})",
            f"parameters  {self.parameters:,} of {self.parameters_base:,} ({density['weights']:.1%}), "
            f"learned {self.learned:,}",
        ]
        if self.macs is not None:
            share = f" of {self.macs_base:,} ({density['macs']:.1%})" if "macs" in density else ""
            lines.append(f"MACs        {self.macs:,}{share}")
        lines.append(
            f"bytes       {self.bytes:,}" + (f", of the task {self.task_bytes:,}" if self.task_bytes else "")
        )
        if self.latency is not None and self.latency_base:
            lines.append(
                f"latency     {1e3 * self.latency:.2f} ms of {1e3 * self.latency_base:.2f} "
                f"({self.latency / self.latency_base:.1%}), measured"
            )
        return "\n".join(lines)
