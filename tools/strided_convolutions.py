"""Which convolutions write past their memory in PyTorch's CPU backward pass; run it again for another PyTorch or CPU.

Every block of memory ends at a page that nobody may touch, so an overrun ends the process at once, also one that
would go unnoticed; each shape runs in a process of its own. Takes a minute or two on Linux on x86, with a C compiler.

Found with PyTorch 2.13 (oneDNN 3.12) on AVX2: it writes past its memory (with two threads it may hang instead) where

- a 2-d convolution has a 1x1 kernel, one group, no padding, a stride in either direction that divides the input's size,
- its input or weight is channels-last in float32, with 1 to 7 channels, whatever the outputs,
- and the gradient of the weight is asked for, of 2 samples or more, or one large one.

So does a transposed convolution with 1 to 7 outputs that has output_padding. Nothing else of what is tried here does:
8 inputs or more, kernels of 2 to 7, groups, sizes that the stride does not divide, the contiguous layout, bfloat16, the
output, the gradient of the input; nor does anything with ONEDNN_MAX_CPU_ISA=AVX or SSE41 in the environment.

With AVX-512, and there in bfloat16 too, the limit is 16 inputs instead of 8, by oneDNN's source and by the table in
uxlfoundation/oneDNN#6035, the report of the fault. `spalier.adapters.forward` keeps clear of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

GUARD = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

extern void __libc_free(void *);
enum { PAGE = 4096, WROTE_IN_SLACK = 66 };
struct head { char *base; size_t room, size; uint64_t mark; };  /* in the page before the block */
static const uint64_t MARK = 0x5041474545444745;

int posix_memalign(void **out, size_t align, size_t size) {
    size_t whole = (size + align - 1) / align * align, room = PAGE + (whole + PAGE - 1) / PAGE * PAGE;
    char *base = mmap(0, room + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return ENOMEM;
    mprotect(base + room, PAGE, PROT_NONE);
    char *at = base + room - whole;
    memset(at + size, 0xA5, whole - size);
    ((struct head *)at)[-1] = (struct head){base, room, size, MARK};
    *out = at;
    return 0;
}

void free(void *block) {
    struct head *head = (struct head *)block - 1;
    if (!block) return;
    if ((uintptr_t)block % 64 || head->mark != MARK) { __libc_free(block); return; }
    for (char *at = (char *)block + head->size; at < head->base + head->room; at++)
        if ((unsigned char)*at != 0xA5) _exit(WROTE_IN_SLACK);
    munmap(head->base, head->room + PAGE);
}
"""

OUTCOMES = {0: "ok", 66: "overrun", -signal.SIGSEGV: "overrun", -signal.SIGALRM: "hang", 70: "wrong"}


class Shape(NamedTuple):
    """One layer, its input, and how it is run."""

    inputs: int
    outputs: int = 8
    kernel: int = 1
    stride: tuple[int, int] = (2, 2)
    size: tuple[int, int] = (32, 32)
    batch: int = 16
    groups: int = 1
    transposed: bool = False
    channels_last: bool = True
    threads: int = 1
    weight: bool = True
    dtype: torch.dtype = torch.float32


def shapes() -> Iterator[Shape]:
    """What is tried."""
    for inputs in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 15, 16, 17, 24, 33, 64):
        for outputs in (1, 7, 8, 13, 24, 64):
            yield Shape(inputs, outputs)
    for inputs in (1, 5, 7, 12):
        for stride in ((1, 1), (1, 2), (2, 1), (3, 3), (4, 2)):
            yield Shape(inputs, stride=stride, size=(24, 24))
        for side in (2, 8, 15, 33, 56, 112):
            yield Shape(inputs, size=(side, side))
        for batch in (1, 2, 3, 64):
            yield Shape(inputs, batch=batch)
        for kernel in (2, 3, 5, 7):
            yield Shape(inputs, kernel=kernel)
        yield Shape(inputs, channels_last=False)
        yield Shape(inputs, weight=False)
        yield Shape(inputs, threads=2)
        yield Shape(inputs, dtype=torch.bfloat16)
        yield Shape(16, inputs, transposed=True, size=(16, 16))
        yield Shape(4 * inputs, groups=4)


def run(shape: Shape) -> None:
    """Two backward passes, the first compared with the contiguous layout in float64."""
    torch.set_num_threads(shape.threads)
    torch.manual_seed(0)
    layer: nn.Module
    if shape.transposed:
        layer = nn.ConvTranspose2d(shape.inputs, shape.outputs, 1, shape.stride, output_padding=1, bias=False)
    else:
        layer = nn.Conv2d(
            shape.inputs,
            shape.outputs,
            shape.kernel,
            shape.stride,
            padding=shape.kernel // 2,
            groups=shape.groups,
            bias=False,
        )
    x = torch.randn(shape.batch, *shape.size, shape.inputs).permute(0, 3, 1, 2)
    expected = gradients(layer.double(), x.double().contiguous(), shape.weight)
    layer.to(shape.dtype)
    if shape.channels_last:
        layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    else:
        x = x.clone(memory_format=torch.contiguous_format)
    for _ in range(2):
        found = gradients(layer, x.to(shape.dtype), shape.weight)
        tolerance = 1e-3 if shape.dtype == torch.float32 else 5e-2
        for one, other in zip(found, expected, strict=True):
            if not (one - other).abs().max() <= tolerance * other.abs().max():
                os._exit(70)


def gradients(layer: nn.Module, x: torch.Tensor, weight: bool) -> tuple[torch.Tensor, ...]:
    """Of the input, and of the weight where that is asked for."""
    x = x.detach().requires_grad_()
    out = layer(x)
    torch.manual_seed(1)
    grad = torch.rand(out.shape).to(out)
    return torch.autograd.grad((out * grad).sum(), [x, *(layer.parameters() if weight else ())])


def outcome(shape: Shape) -> str:
    """How a process ends that runs it."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        run(shape)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return OUTCOMES.get(code, f"ended with {code}")


def sweep() -> None:
    """Print what does not end well, and what was tried."""
    tried = 0
    for shape in shapes():
        tried += 1
        found = outcome(shape)
        if found != "ok":
            given = {k: v for k, v in shape._asdict().items() if v != Shape._field_defaults.get(k)}
            print(f"{found}: {', '.join(f'{key} {value}' for key, value in given.items())}", flush=True)
    print(f"{tried} shapes, PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")


def main() -> None:
    """Sweep in a process whose memory is guarded."""
    if "guard" in sys.argv:
        sweep()
        return
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.c"), Path(folder, "guard.so")
        source.write_text(GUARD)
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
        environment = {**os.environ, "LD_PRELOAD": str(library)}
        subprocess.run([sys.executable, __file__, "guard"], env=environment, check=True)


if __name__ == "__main__":
    main()
