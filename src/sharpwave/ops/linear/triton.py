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

from sharpwave.ops._overlap import after_previous, overlap

BLOCK_M, BLOCK_N = 64, 128
WIDTHS = 64, 128, 256  # K: a tile of the weight, four of rows and one of results are at most 208 KB
# Measured on an H200: it is faster than cuBLAS from FEW rows on; from MANY on with a stage more, and not overlapped.
FEW, MANY = 8192, 16384


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x, weight, y, rows,
    TILES: tl.constexpr, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    SETTLED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """STRIDE programs share a tile of the weight, one of TILES, and take turns at the rows."""
    n = tl.program_id(0) % TILES * BLOCK_N
    if SETTLED:
        w = weight.load([n, 0])  # [BLOCK_N, K]
        after_previous(OVERLAP)
    else:
        after_previous(OVERLAP)
        w = weight.load([n, 0])
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
    if x.numel() < FEW * weight.shape[1] or not serves(x, weight) or not overlap(x.device)["OVERLAP"]:
        return False
    # Of the GPUs that can overlap launches, some have less shared memory.
    return _shared_memory(x.device) >= 2 * (BLOCK_N * 256 + 4 * BLOCK_M * 256 + BLOCK_M * BLOCK_N) + 1024


def linear(x: Tensor, weight: Tensor, settled: bool = False) -> Tensor:
    """Same as `reference.linear`."""
    (n, k), tiles = weight.shape, weight.shape[0] // BLOCK_N
    if not serves(x, weight):
        raise ValueError(
            f"backend='triton' takes contiguous 16-bit matrices, K one of {WIDTHS} and N a multiple of {BLOCK_N}; got "
            f"{x.dtype}, {tuple(x.shape)} and {tuple(weight.shape)}: use backend='reference'"
        )
    flat = x.view(-1, k)
    many = flat.shape[0] >= MANY
    y = torch.empty(flat.shape[0], n, dtype=x.dtype, device=x.device)
    stride = max(1, min(_multiprocessors(x.device) // tiles, triton.cdiv(flat.shape[0], BLOCK_M)))
    _linear_kernel[(tiles * stride,)](
        TensorDescriptor.from_tensor(flat, [BLOCK_M, k]),
        TensorDescriptor.from_tensor(weight, [BLOCK_N, k]),
        TensorDescriptor.from_tensor(y, [BLOCK_M, BLOCK_N]),
        flat.shape[0],
        TILES=tiles, STRIDE=stride, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, STAGES=4 if many else 3, SETTLED=settled,
        num_warps=4, **({"OVERLAP": False} if many else overlap(x.device)),
    )  # fmt: skip
    return y.view(*x.shape[:-1], n)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may take."""
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]
