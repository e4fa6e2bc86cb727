"""Selecting, casting and padding rows for GPUs, in one pass."""

import functools
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sharpwave.ops.gather import padded, rows_contiguous

_LARGE = 4096  # words of a row that programs of their own copy, in blocks of as many


@triton.jit
def _gather_kernel(
    source_ptr, index_ptr, out_ptr, rows, width, stride_source, stride_out,
    PADDED: tl.constexpr, INDEXED: tl.constexpr, SCALE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    offs_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    source = source_ptr + (tl.load(index_ptr + m) if INDEXED else m) * stride_source
    out = out_ptr + m * stride_out
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


@triton.jit
def _fields_kernel(sources, outs, index_ptr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    row = tl.load(index_ptr + m)
    for i in tl.static_range(len(WORDS)):
        if tl.program_id(1) == i:
            for start in range(0, WORDS[i], BLOCK):
                offs = start + tl.arange(0, BLOCK)
                mask = offs < WORDS[i]
                tl.store(
                    outs[i] + m * WORDS[i] + offs, tl.load(sources[i] + row * WORDS[i] + offs, mask=mask), mask=mask
                )


@triton.jit
def _large_kernel(source_ptr, index_ptr, out_ptr, rows, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Blocks of rows, one after the other in each program."""
    blocks: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    for item in tl.range(tl.program_id(0), rows * blocks, tl.num_programs(0), num_stages=1):
        m = (item // blocks).to(tl.int64)
        offs = item % blocks * BLOCK + tl.arange(0, BLOCK)
        mask = offs < WORDS
        x = tl.load(source_ptr + tl.load(index_ptr + m) * WORDS + offs, mask=mask, eviction_policy="evict_first")
        tl.store(out_ptr + m * WORDS + offs, x, mask=mask)


def gather_fields(sources: Sequence[Tensor], index: Tensor, out: Sequence[Tensor]) -> None:
    """Same as `reference.gather_fields`; rows are copied as the widest words they are made of."""
    pairs = [_as_words(s, o) for s, o in zip(sources, out, strict=True) if o.numel()]
    for s, o in pairs:
        if s.shape[1] >= _LARGE:
            rows, words = o.shape
            programs = min(rows * triton.cdiv(words, _LARGE), _programs(o.device))
            _large_kernel[(programs,)](s, index, o, rows, WORDS=words, BLOCK=_LARGE, num_warps=8)
    pairs = [(s, o) for s, o in pairs if s.shape[1] < _LARGE]
    if not pairs:
        return
    words = tuple(s[0].numel() for s, _ in pairs)
    _fields_kernel[(index.shape[0], len(pairs))](
        tuple(s for s, _ in pairs), tuple(o for _, o in pairs), index,
        WORDS=words, BLOCK=min(1024, triton.next_power_of_2(max(words))), num_warps=1,
    )  # fmt: skip


@functools.cache
def _programs(device: torch.device) -> int:
    """Half the multiprocessors: on a memory's whole bandwidth, all that runs beside a gather would wait for memory."""
    return torch.cuda.get_device_properties(device).multi_processor_count // 2 if device.type == "cuda" else 3


def _as_words(source: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Both as (rows, words) of int32 where a row is a whole number of those, else of bytes."""
    source, out = (x.reshape(x.shape[0], -1).view(torch.uint8) for x in (source, out))
    if source.shape[1] % 4 == 0 and source.data_ptr() % 4 == out.data_ptr() % 4 == 0:
        return source.view(torch.int32), out.view(torch.int32)
    return source, out


def gather_rows(
    source: Tensor, index: Tensor | None, dtype: torch.dtype, multiple: int, out: Tensor | None = None
) -> Tensor:
    """Same as `reference.gather_rows`; any dtypes that Triton can cast between."""
    source = source if rows_contiguous(source) else source.contiguous()
    width = source.shape[-1]
    rows = math.prod(source.shape[1:-1])
    wide = padded(width, multiple)
    n = source.shape[0] if index is None else index.shape[0]
    if out is None:
        out = torch.empty(n, *source.shape[1:-1], wide, dtype=dtype, device=source.device)
    if out.numel() == 0:
        return out
    scale = source.dtype == torch.uint8 and dtype.is_floating_point
    if source.dtype == torch.bool:
        source = source.view(torch.uint8)
    written = out.view(torch.uint8) if dtype == torch.bool else out
    block_d = min(triton.next_power_of_2(wide), 1024)
    block_r = max(1, min(triton.next_power_of_2(rows), 4096 // block_d))
    _gather_kernel[(n, triton.cdiv(rows, block_r))](
        source, index, written, rows, width, source.stride(0), out.stride(0),
        PADDED=wide, INDEXED=index is not None, SCALE=scale, BLOCK_R=block_r, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
    return out
