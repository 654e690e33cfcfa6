"""How far a run is: a bar with the time that is left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO


class Progress:
    """Shows steps as they are done. Lines go to standard error, so that results can be piped."""

    def __init__(self, total: int, done: int, shown: bool, stream: TextIO | None = None) -> None:
        self.total, self.done, self.begun = total, done, done
        self.stream = stream or sys.stderr
        self.shown = shown
        self.start = time.monotonic()
        self.bar = self._bar() if shown and self.stream.isatty() else None

    def _bar(self) -> Any:
        from tqdm import tqdm

        return tqdm(total=self.total, initial=self.done, unit="step", file=self.stream, dynamic_ncols=True)

    def step(self, what: str, loss: float) -> None:
        """One more step is done."""
        self.done += 1
        if self.bar is not None:
            self.bar.update()
            self.bar.set_description(what, refresh=False)
            self.bar.set_postfix(loss=f"{loss:.3f}", refresh=False)

    def line(self, text: str) -> None:
        """Say something that stays, with how far the run is and how long it will take."""
        if not self.shown:
            return
        if self.bar is not None:
            self.bar.write(text, file=self.stream)
        else:
            print(f"[{self.done}/{self.total}{self._left()}] {text}", file=self.stream, flush=True)

    def _left(self) -> str:
        done = self.done - self.begun
        if not done or self.done >= self.total:
            return ""
        seconds = (time.monotonic() - self.start) / done * (self.total - self.done)
        return f", {_duration(seconds)} left"

    def close(self) -> None:
        """Take the bar away."""
        if self.bar is not None:
            self.bar.close()


def _duration(seconds: float) -> str:
    """A time in words.

    >>> _duration(42), _duration(4000)
    ('42s', '1h06m')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
