"""A linear layer's product for GPUs, for many rows and a small weight.

Each program holds a tile of the weight in shared memory while the rows come by, so that the weight is read once. It
needs no memory set to zero before it, as cuBLAS's kernel for these shapes does.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sharpwave.ops._overlap import overlap

BLOCK_M, BLOCK_N, STAGES = 64, 128, 3
WIDTHS = 64, 128, 256  # K: a tile of the weight and STAGES of rows are at most 180 KB
ROWS = 16384  # measured on an H200: from here on it is faster than cuBLAS


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x, weight, y, rows,
    TILES: tl.constexpr, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """STRIDE programs share a tile of the weight, one of TILES, and take turns at the rows."""
    n = tl.program_id(0) % TILES * BLOCK_N
    w = weight.load([n, 0])  # [BLOCK_N, K]
    for m in tl.range(tl.program_id(0) // TILES, tl.cdiv(rows, BLOCK_M), STRIDE, num_stages=STAGES):
        # Rows past the end are loaded as 0, and not stored.
        y.store([m * BLOCK_M, n], tl.dot(x.load([m * BLOCK_M, 0]), w.T).to(y.dtype))


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes these matrices."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[1] in WIDTHS
        and weight.shape[0] % BLOCK_N == 0
        and all(v.is_contiguous() and v.data_ptr() % 16 == 0 for v in (x, weight))
        and x.numel() > 0
    )


def pays(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel is faster than cuBLAS's."""
    return x.numel() >= ROWS * weight.shape[1] and serves(x, weight) and overlap(x.device)["OVERLAP"]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Same as `reference.linear`."""
    (n, k), tiles = weight.shape, weight.shape[0] // BLOCK_N
    if not serves(x, weight):
        raise ValueError(
            f"backend='triton' takes contiguous 16-bit matrices, K one of {WIDTHS} and N a multiple of {BLOCK_N}; got "
            f"{x.dtype}, {tuple(x.shape)} and {tuple(weight.shape)}: use backend='reference'"
        )
    flat = x.view(-1, k)
    y = torch.empty(flat.shape[0], n, dtype=x.dtype, device=x.device)
    stride = max(1, min(_multiprocessors(x.device) // tiles, triton.cdiv(flat.shape[0], BLOCK_M)))
    _linear_kernel[(tiles * stride,)](
        TensorDescriptor.from_tensor(flat, [BLOCK_M, k]),
        TensorDescriptor.from_tensor(weight, [BLOCK_N, k]),
        TensorDescriptor.from_tensor(y, [BLOCK_M, BLOCK_N]),
        flat.shape[0],
        TILES=tiles, STRIDE=stride, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, STAGES=STAGES, num_warps=4,
    )  # fmt: skip
    return y.view(*x.shape[:-1], n)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
