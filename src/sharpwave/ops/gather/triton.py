"""Selecting, casting and padding rows for GPUs, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _gather_kernel(
    source_ptr, index_ptr, out_ptr, rows, width,
    PADDED: tl.constexpr, SCALE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    offs_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    source = source_ptr + tl.load(index_ptr + m) * rows * width
    out = out_ptr + m * rows * PADDED
    for start in tl.static_range(0, PADDED, BLOCK_D):
        offs_d = start + tl.arange(0, BLOCK_D)
        mask_r = (offs_r < rows)[:, None]
        mask = mask_r & (offs_d < width)[None, :]  # [BLOCK_R, BLOCK_D]
        x = tl.load(source + offs_r[:, None].to(tl.int64) * width + offs_d[None, :], mask=mask, other=0)
        if SCALE:
            x = x.to(tl.float32) / 255.0
        x = x.to(out_ptr.dtype.element_ty)
        tl.store(
            out + offs_r[:, None].to(tl.int64) * PADDED + offs_d[None, :], x, mask=mask_r & (offs_d < PADDED)[None, :]
        )


def gather_rows(source: Tensor, index: Tensor, dtype: torch.dtype, multiple: int) -> Tensor:
    """Same as `reference.gather_rows`; any dtypes that Triton can cast between."""
    source = source.contiguous()
    width = source.shape[-1]
    rows = source[0].numel() // max(width, 1)
    wide = -(-width // multiple) * multiple
    out = torch.empty(index.shape[0], *source.shape[1:-1], wide, dtype=dtype, device=source.device)
    if out.numel() == 0:
        return out
    scale = source.dtype == torch.uint8 and dtype.is_floating_point
    if source.dtype == torch.bool:
        source = source.view(torch.uint8)
    written = out.view(torch.uint8) if dtype == torch.bool else out
    block_d = min(triton.next_power_of_2(wide), 1024)
    block_r = max(1, min(triton.next_power_of_2(rows), 4096 // block_d))
    _gather_kernel[(index.shape[0], triton.cdiv(rows, block_r))](
        source, index, written, rows, width, PADDED=wide, SCALE=scale, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=4
    )  # fmt: skip
    return out
