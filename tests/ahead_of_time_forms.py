"""Kernels of the tests' own, compiled ahead of time: one that is plain, one that spills, one that takes too much."""

import triton
import triton.language as tl

from intarsia.gpu_kernels import Specialisation


@triton.jit
def scale(x, out, factor, width, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(x + at, mask=at < width).to(tl.float32)
    tl.store(out + at, row * factor, mask=at < width)


@triton.jit
def centre(x, out, BLOCK: tl.constexpr):
    """Every number of the row is alive until their mean is known."""
    at = tl.arange(0, BLOCK)
    row = tl.load(x + at)
    tl.store(out + at, row - tl.sum(row, 0) / BLOCK)


@triton.jit
def product(a, b, out, depth, N: tl.constexpr, K: tl.constexpr):
    rows, inner = tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((N, N), tl.float32)
    for start in range(0, depth, K):
        left = tl.load(a + rows[:, None] * depth + start + inner[None, :])
        right = tl.load(b + (start + inner)[:, None] * N + rows[None, :])
        total = tl.dot(left, right, total)
    tl.store(out + rows[:, None] * N + rows[None, :], total)


def plain():
    signature = {"x": "*bf16", "out": "*fp32", "factor": "fp32", "width": "i32"}
    aligned = ("x", "out")
    return Specialisation(
        name="scale[bf16]", kernel=scale, signature=signature, constants={"BLOCK": 256}, aligned=aligned
    )


def specialisations():
    pointers = {"x": "*fp32", "out": "*fp32"}
    matrices = {"a": "*bf16", "b": "*bf16", "out": "*fp32", "depth": "i32"}
    return [
        plain(),
        Specialisation(name="centre", kernel=centre, signature=pointers, constants={"BLOCK": 32768}, num_warps=1),
        Specialisation(
            name="product",
            kernel=product,
            signature=matrices,
            constants={"N": 128, "K": 128},
            aligned=tuple(matrices),
            num_warps=8,
            num_stages=5,
        ),
    ]
