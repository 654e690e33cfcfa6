"""Two networks run in step: one waits at each layer until the other has got there."""

from __future__ import annotations

from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor, nn

from spalier.errors import RecoveryError


class Lockstep:
    """Runs a network in a thread of its own that hands over what its layers return, one at a time."""

    def __init__(self, net: nn.Module, layers: list[str], args: Any, kwargs: Any) -> None:
        self._net, self._layers, self._args, self._kwargs = net, layers, args, kwargs
        self._handed: Queue[tuple[str, Any]] = Queue(maxsize=1)
        self._stopped = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> Lockstep:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def output(self, layer: str) -> Tensor:
        """What a layer returned; the layers have to be asked for in the order in which they run."""
        while True:
            try:
                name, value = self._handed.get(timeout=0.05)
                break
            except Empty:
                if not self._thread.is_alive() and self._handed.empty():
                    raise RecoveryError(f"{layer} does not run in the unpruned network") from None
        if isinstance(value, BaseException):
            raise RecoveryError(
                f"the unpruned network does not run on the calibration batches: {value}"
            ) from value
        if name != layer:
            raise RecoveryError(
                f"the layers run in another order than before the prune: {layer} instead of {name}"
            )
        assert isinstance(value, Tensor)
        return value

    def _run(self) -> None:
        handles = []
        for name in self._layers:

            def hook(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                self._hand(name, output)

            layer = self._net.get_submodule(name)  # what it returns itself, before a gather spreads it
            handles.append(layer.register_forward_hook(hook, prepend=True))
        try:
            with torch.no_grad():
                self._net(*self._args, **self._kwargs)
        except _Stopped:
            pass
        except BaseException as error:  # handed to whoever waits
            self._hand("", error, final=True)
        finally:
            for handle in handles:
                handle.remove()

    def _hand(self, name: str, value: Any, *, final: bool = False) -> None:
        while not self._stopped.is_set():
            try:
                self._handed.put((name, value), timeout=0.05)
                return
            except Full:
                continue
        if not final:
            raise _Stopped


class _Stopped(Exception):
    """Nobody waits any more."""
