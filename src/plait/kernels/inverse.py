"""Inverses of unit lower triangular matrices by blocks: those of halves first, then what lies between them.

    | A  . |-1     |     A^-1          .   |
    | B  D |    =  | -D^-1 B A^-1    D^-1  |

Shapes: N matrices [C, C], C a power of two from 16 to LARGEST.
"""

# Triton comes with torch where there are GPUs
# pyright: reportMissingImports=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SMALL = 16
"""rows of the blocks that are inverted row by row"""
LARGEST = 128
"""rows, whose halves fit into the shared memory of every GPU"""


def unit_inverse(a_NCC: Tensor) -> Tensor:
    """(I + A)^-1 in fp32, A being the strictly lower part of what is given."""
    N, C, _ = a_NCC.shape
    a_NCC = a_NCC.contiguous()
    out_NCC = torch.empty_like(a_NCC)
    h = SMALL
    with torch.cuda.device_of(a_NCC):
        _small[(N * C // h,)](a_NCC, out_NCC, C=C, SIZE=h, num_warps=1)
        while h < C:
            _double[(N * C // (2 * h),)](a_NCC, out_NCC, C=C, SIZE=h, num_warps=h // SMALL)
            h *= 2
    return out_NCC


@triton.jit
def _small(a, out, C: tl.constexpr, SIZE: tl.constexpr):
    """A program for each block on the diagonal: by substitution."""
    block = tl.program_id(0).to(tl.int64)
    t, s = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    at = block * SIZE * C + block % (C // SIZE) * SIZE + t * C + s
    rest = tl.where(t > s, tl.load(a + at), 0)
    inverse = (t == s).to(tl.float32)
    for row in range(1, SIZE):
        own = tl.sum(tl.where(t == row, rest, 0), 0)  # of A: what row t takes from those before it
        inverse -= tl.where(t == row, tl.sum(own[:, None] * inverse, 0)[None, :], 0)
    tl.store(out + at, inverse)


@triton.jit
def _double(a, out, C: tl.constexpr, SIZE: tl.constexpr):
    """A program for each pair of blocks on the diagonal, whose inverses are in `out`."""
    block = tl.program_id(0).to(tl.int64)
    first = block * 2 * SIZE * C + block % (C // (2 * SIZE)) * 2 * SIZE
    t, s = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    at = first + t * C + s
    left = tl.load(out + at)
    right = tl.load(out + at + SIZE * C + SIZE)
    between = tl.load(a + at + SIZE * C)
    between = tl.dot(between, left, input_precision="tf32x3")
    tl.store(out + at + SIZE * C, -tl.dot(right, between, input_precision="tf32x3"))
    tl.store(out + at + SIZE, tl.zeros((SIZE, SIZE), tl.float32))
