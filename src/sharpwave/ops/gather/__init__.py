"""Rows of a buffer, cast and padded on the way to a network."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sharpwave.ops import _backends
from sharpwave.ops._library import register


def _kernel(source, index, dtype, multiple, *, backend="auto"):
    return _backends.load("gather", source.device, backend).gather_rows(source, index, dtype, multiple)


def _fake(source, index, dtype, multiple, *, backend="auto"):
    rows = source.shape[0] if index is None else index.shape[0]
    return source.new_empty(rows, *source.shape[1:-1], padded(source.shape[-1], multiple), dtype=dtype)


_op = register(
    "gather_rows(Tensor source, Tensor? index, ScalarType dtype, int multiple, *, str backend='auto') -> Tensor",
    _kernel,
    _fake,
)


def padded(width: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `width`."""
    return -(-width // multiple) * multiple


def rows_contiguous(x: Tensor) -> bool:
    """Whether each x[i] is contiguous, wherever it begins."""
    return x.is_contiguous() or x.shape[0] == 0 or x[0].is_contiguous()


def gather_rows(
    source: Tensor,
    index: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    multiple: int = 1,
    out: Tensor | None = None,
    backend: _backends.Backend = "auto",
) -> Tensor:
    """Selected rows, or all, cast and padded with zeros to a width that a GEMM likes: one read and one write a byte.

        out[m, ..., d] = source[index[m], ..., d] for d < D, else 0

    Args:
        source: (N, ..., D), at least two dimensions, any dtype; each row contiguous, or all is copied first. Rows may
            lie apart, as those of one time step in a rollout do.
        index: (M,) int64 on source's device, in [0, N); out of range is an error on a CPU, undefined on a GPU. None:
            every row in order.
        dtype: of the result, source's own by default. uint8 becomes a floating dtype divided by 255, for pictures.
        multiple: the width D is padded to a multiple of this, >= 1. At bf16, a GEMM whose inner dimension is no
            multiple of 8 takes 4 to 5 times as long on an H200.
        out: written and returned instead of a new tensor; of the result's shape and dtype, each row contiguous.
        backend: see `sharpwave.ops`.

    Returns:
        (M, ..., D') of `dtype`, contiguous without `out`. Casts round to nearest even. No gradient. Deterministic.

    Raises:
        ValueError: a shape or `multiple` does not fit. TypeError: `index` is not int64, or `out` of another dtype.
    """
    if source.ndim < 2:
        raise ValueError(f"source must have at least two dimensions; got shape {tuple(source.shape)}")
    if index is not None and index.ndim != 1:
        raise ValueError(f"index must be (M,); got shape {tuple(index.shape)}")
    if index is not None and index.dtype != torch.int64:
        raise TypeError(f"index must be int64; got {index.dtype}")
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1; got {multiple}")
    dtype = source.dtype if dtype is None else dtype
    if out is None:
        return _op(source, index, dtype, multiple, backend=backend)
    n = source.shape[0] if index is None else index.shape[0]
    _check_out(out, (n, *source.shape[1:-1], padded(source.shape[-1], multiple)), dtype, rows=True)
    _backends.load("gather", source.device, backend).gather_rows(source, index, dtype, multiple, out)
    return out


def gather_fields(
    sources: Sequence[Tensor], index: Tensor, out: Sequence[Tensor], *, backend: _backends.Backend = "auto"
) -> None:
    """The same rows of several tensors, in one launch on a GPU.

        out[i][m] = sources[i][index[m]]

    Args:
        sources: (N, ...) each, any dtype, contiguous.
        index: (M,) int64, in [0, N); out of range is an error on a CPU, undefined on a GPU.
        out: written; (M, ...) each, of its source's dtype, contiguous.
        backend: see `sharpwave.ops`.

    Raises:
        ValueError: a shape does not fit. TypeError: `index` is not int64, or a dtype differs.
    """
    if index.ndim != 1:
        raise ValueError(f"index must be (M,); got shape {tuple(index.shape)}")
    if index.dtype != torch.int64:
        raise TypeError(f"index must be int64; got {index.dtype}")
    if len(sources) != len(out):
        raise ValueError(f"out must have a tensor for each of the {len(sources)} sources; got {len(out)}")
    for source, target in zip(sources, out, strict=True):
        if not source.is_contiguous():
            raise ValueError(f"sources must be contiguous; got strides {source.stride()}: pass source.contiguous()")
        _check_out(target, (index.shape[0], *source.shape[1:]), source.dtype)
    if sources:
        _backends.load("gather", index.device, backend).gather_fields(sources, index, out)


def _check_out(out: Tensor, shape: tuple[int, ...], dtype: torch.dtype, rows: bool = False) -> None:
    """With `rows` it is enough that each row is contiguous."""
    if tuple(out.shape) != shape or not (rows_contiguous(out) if rows else out.is_contiguous()):
        raise ValueError(
            f"out must be {'of contiguous rows' if rows else 'contiguous'} of shape {shape}; got {tuple(out.shape)}, "
            f"strides {out.stride()}"
        )
    if out.dtype != dtype:
        raise TypeError(f"out must be {dtype}; got {out.dtype}")
