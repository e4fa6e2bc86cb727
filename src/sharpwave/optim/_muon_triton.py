"""Muon's step for GPUs: eighteen launches, however many parameters there are.

Two pass over the gradient: the sums of squares that clipping and normalisation need, then momentum, written down as
float16 matrices of length 1. Fifteen are Newton-Schulz steps of all matrices side by side (Gram matrix, its polynomial,
product), each matrix lying wide and padded with zeros to whole tiles. One writes the weights and their bf16 copies.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64
# Columns of the table of tiles. Whose it is and where in it: parameter, row, column. The parameter's addresses of
# weight, momentum and bf16 copy (0: none), and the copy's row length; its number of entries and its row length; whether
# it is orthogonalised, and then whether it lies turned in its wide form, and that form's place and row length.
_PARAM, _ROW, _COL = (tl.constexpr(i) for i in range(3))
_WEIGHT, _MOMENTUM, _COPY, _COPY_WIDTH = (tl.constexpr(i) for i in range(3, 7))
_SIZE, _COLS = (tl.constexpr(i) for i in range(7, 9))
_MATRIX, _TALL, _PLACE, _WIDTH = (tl.constexpr(i) for i in range(9, 13))
_COLUMNS = tl.constexpr(13)


@triton.jit
def _tile(tiles_ptr, TILE: tl.constexpr):
    """This program's line of the table; its entries' rows, columns and places in the parameter; and their mask."""
    here = tiles_ptr + tl.program_id(0) * _COLUMNS
    row = tl.load(here + _ROW).to(tl.int32) + tl.arange(0, TILE)[:, None]
    col = tl.load(here + _COL).to(tl.int32) + tl.arange(0, TILE)[None, :]
    cols = tl.load(here + _COLS).to(tl.int32)
    inside = row * cols + col
    return here, row, col, inside, (inside < tl.load(here + _SIZE).to(tl.int32)) & (col < cols)


@triton.jit
def _gradient(grads, strides, here, row, col, mask):
    """The tile's gradient. A gradient may be a slice of a wider matrix, so it has a row length of its own."""
    param = tl.load(here + _PARAM)
    address, stride = grads[0].to(tl.int64), strides[0]
    for i in tl.static_range(1, len(grads)):
        address = tl.where(param == i, grads[i].to(tl.int64), address)
        stride = tl.where(param == i, strides[i], stride)
    g_ptr = address.to(tl.pointer_type(tl.float32))
    return tl.load(g_ptr + row * stride + col, mask=mask, other=0.0)


@triton.jit
def _sums_kernel(grads, strides, tiles_ptr, sums_ptr, bad_ptr, TILE: tl.constexpr):
    """Of each tile: g g, g m and m m summed up; and the place in its parameter of the first entry not finite."""
    pid, tiles = tl.program_id(0), tl.num_programs(0)
    here, row, col, inside, mask = _tile(tiles_ptr, TILE)
    g = _gradient(grads, strides, here, row, col, mask)
    momentum_ptr = tl.load(here + _MOMENTUM).to(tl.pointer_type(tl.float32))
    m = tl.load(momentum_ptr + inside, mask=mask, other=0.0)
    # Side by side, for every reduction costs two barriers.
    products = tl.join(tl.join(g * g, m * m), tl.join(g * m, tl.where(tl.abs(g) < float("inf"), 0.0, 1.0)))
    sums = tl.sum(tl.reshape(products, [TILE * TILE, 4]), 0)
    offs = tl.arange(0, 4)
    tl.store(sums_ptr + offs * tiles + pid, sums)
    first = 2147483647
    if tl.sum(tl.where(offs == 3, sums, 0.0), 0) > 0:
        first = tl.min(tl.min(tl.where(tl.abs(g) < float("inf"), 2147483647, inside), 1), 0)
    tl.store(bad_ptr + pid, first)


@triton.jit
def _momentum_kernel(
    grads, strides, tiles_ptr, sums_ptr, bad_ptr, keep_ptr, control_ptr, norm_ptr, skipped_ptr, first_bad_ptr, x_ptr,
    offsets_ptr, max_norm, mu,
    HAS_KEEP: tl.constexpr, KEEP_FINITE: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The new momentum; each matrix's update over its length, wide; and what the step comes to, for the last kernel."""
    pid, tiles = tl.program_id(0), tl.num_programs(0)
    here, row, col, inside, mask = _tile(tiles_ptr, TILE)
    param = tl.load(here + _PARAM)
    g = _gradient(grads, strides, here, row, col, mask)
    momentum_ptr = tl.load(here + _MOMENTUM).to(tl.pointer_type(tl.float32))
    m = tl.load(momentum_ptr + inside, mask=mask, other=0.0)

    # Every program adds the same sums in the same order: cheaper than one more launch.
    gg = tl.zeros([TILES], tl.float64)
    own_gg, own_gm, own_mm = gg, gg, gg
    first = tl.full([TILES], 9223372036854775807, tl.int64)
    for start in range(0, tiles, TILES):
        offs = start + tl.arange(0, TILES)
        some = offs < tiles
        owner = tl.load(tiles_ptr + offs * _COLUMNS + _PARAM, mask=some, other=-1)
        squares = tl.load(sums_ptr + offs, mask=some, other=0.0).to(tl.float64)
        gm = tl.load(sums_ptr + tiles + offs, mask=some, other=0.0).to(tl.float64)
        mm = tl.load(sums_ptr + 2 * tiles + offs, mask=some, other=0.0).to(tl.float64)
        gg += squares
        own_gg += tl.where(owner == param, squares, 0.0)
        own_gm += tl.where(owner == param, gm, 0.0)
        own_mm += tl.where(owner == param, mm, 0.0)
        if pid == 0:
            bad = tl.load(bad_ptr + offs, mask=some, other=2147483647)
            place = bad + tl.load(offsets_ptr + owner, mask=some, other=0)
            first = tl.minimum(first, tl.where(bad < 2147483647, place, 9223372036854775807))
    norm = tl.sqrt(tl.sum(gg, 0)).to(tl.float32)
    finite = tl.where(tl.abs(norm) < float("inf"), 1, 0)
    keep = finite
    if HAS_KEEP:
        if KEEP_FINITE:
            keep = tl.where(tl.abs(tl.load(keep_ptr).to(tl.float32)) < float("inf"), finite, 0)
        else:
            keep = tl.where(tl.load(keep_ptr) != 0, finite, 0)
    scale = tl.minimum(max_norm / (norm + 1e-6), 1.0)
    if pid == 0:
        tl.store(norm_ptr, norm)
        tl.store(control_ptr, scale)
        tl.store(control_ptr + 1, keep.to(tl.float32))
        tl.store(skipped_ptr, tl.load(skipped_ptr) + (1 - keep))
        if finite == 0:
            tl.store(first_bad_ptr, tl.min(first, 0))

    g *= scale
    new = tl.fma(mu, m, g)
    if keep != 0:
        tl.store(momentum_ptr + inside, new, mask=mask)
    if tl.load(here + _MATRIX) != 0:
        # |u|^2 of u = (1 + mu) s g + mu^2 m, out of the three sums.
        a, b = (1.0 + mu) * scale, mu * mu
        square = tl.sum(own_gg, 0) * a * a + 2.0 * tl.sum(own_gm, 0) * a * b + tl.sum(own_mm, 0) * b * b
        length = tl.maximum(tl.sqrt(tl.maximum(square, 0.0)).to(tl.float32), 1e-7)
        x = (tl.fma(mu, new, g) * (1.0 / length)).to(x_ptr.dtype.element_ty)
        x_ptr += tl.load(here + _PLACE)
        width = tl.load(here + _WIDTH).to(tl.int32)
        if tl.load(here + _TALL) != 0:
            tl.store(x_ptr + tl.trans(col) * width + tl.trans(row), tl.trans(x), mask=tl.trans(mask))
        else:
            tl.store(x_ptr + row * width + col, x, mask=mask)


@triton.jit
def _gram_kernel(
    x_ptr, out_ptr, jobs_ptr, b, c, POLYNOMIAL: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """A tile of X X^T and its mirror image; POLYNOMIAL: of b X + c X X^T, for a symmetric X."""
    at = jobs_ptr + tl.program_id(0) * 6
    x_ptr += tl.multiple_of(tl.load(at), 64)
    width = tl.multiple_of(tl.load(at + 1), 64)  # of X
    out_ptr += tl.multiple_of(tl.load(at + 2), 64)
    side = tl.multiple_of(tl.load(at + 3), 64)  # of X X^T
    offs_i = tl.load(at + 4) * BLOCK + tl.arange(0, BLOCK)
    offs_j = tl.load(at + 5) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, width, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < width
        left = tl.load(x_ptr + offs_i[:, None] * width + offs_k[None, :], mask=mask_k[None, :], other=0.0)
        right = tl.load(x_ptr + offs_j[:, None] * width + offs_k[None, :], mask=mask_k[None, :], other=0.0)
        acc = tl.dot(left, tl.trans(right), acc)
    if POLYNOMIAL:
        acc = c * acc + b * tl.load(x_ptr + offs_i[:, None] * width + offs_j[None, :]).to(tl.float32)
    out = acc.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs_i[:, None] * side + offs_j[None, :], out)
    tl.store(out_ptr + offs_j[:, None] * side + offs_i[None, :], tl.trans(out))


@triton.jit
def _product_kernel(x_ptr, p_ptr, out_ptr, jobs_ptr, a, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile of a X + P X."""
    at = jobs_ptr + tl.program_id(0) * 6
    place = tl.multiple_of(tl.load(at), 64)
    width = tl.multiple_of(tl.load(at + 1), 64)
    p_ptr += tl.multiple_of(tl.load(at + 2), 64)
    side = tl.multiple_of(tl.load(at + 3), 64)
    offs_i = tl.load(at + 4) * BLOCK + tl.arange(0, BLOCK)
    offs_j = tl.load(at + 5) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, side, BLOCK_K):
        offs_k = start + tl.arange(0, BLOCK_K)
        mask_k = offs_k < side
        left = tl.load(p_ptr + offs_i[:, None] * side + offs_k[None, :], mask=mask_k[None, :], other=0.0)
        right = tl.load(x_ptr + place + offs_k[:, None] * width + offs_j[None, :], mask=mask_k[:, None], other=0.0)
        acc = tl.dot(left, right, acc)
    here = place + offs_i[:, None] * width + offs_j[None, :]
    acc += a * tl.load(x_ptr + here).to(tl.float32)
    tl.store(out_ptr + here, acc.to(out_ptr.dtype.element_ty))


@triton.jit
def _apply_kernel(
    grads, strides, tiles_ptr, sizes_ptr, control_ptr, lr_ptr, x_ptr, mu, TILE: tl.constexpr
):  # fmt: skip
    """w <- w - lr direction, and its rounded copy."""
    here, row, col, inside, mask = _tile(tiles_ptr, TILE)
    weight_ptr = tl.load(here + _WEIGHT).to(tl.pointer_type(tl.float32))
    weight = tl.load(weight_ptr + inside, mask=mask, other=0.0)
    if tl.load(here + _MATRIX) != 0:
        x_ptr += tl.load(here + _PLACE)
        width = tl.load(here + _WIDTH).to(tl.int32)
        if tl.load(here + _TALL) != 0:
            x = tl.trans(tl.load(x_ptr + tl.trans(col) * width + tl.trans(row), mask=tl.trans(mask), other=0.0))
        else:
            x = tl.load(x_ptr + row * width + col, mask=mask, other=0.0)
        direction = x.to(tl.float32) * tl.load(sizes_ptr + tl.load(here + _PARAM))
    else:
        momentum_ptr = tl.load(here + _MOMENTUM).to(tl.pointer_type(tl.float32))
        g = _gradient(grads, strides, here, row, col, mask) * tl.load(control_ptr)
        direction = tl.fma(mu, tl.load(momentum_ptr + inside, mask=mask, other=0.0), g)
    if tl.load(control_ptr + 1) != 0:
        weight -= tl.load(lr_ptr) * direction
        tl.store(weight_ptr + inside, weight, mask=mask)
        copy = tl.load(here + _COPY)
        if copy != 0:
            copy_ptr = copy.to(tl.pointer_type(tl.bfloat16))
            tl.store(copy_ptr + row * tl.load(here + _COPY_WIDTH).to(tl.int32) + col, weight.to(tl.bfloat16), mask=mask)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


class Plan:
    """Where the kernels find one group of parameters: tables of tiles and parameters, and room to work in.

    Args:
        params: contiguous float32, on one device. momenta: like them.
        matrices: which of them are orthogonalised.
        copies: of each, a bf16 matrix of at least its size that is kept equal to it, or None.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        momenta: Sequence[Tensor],
        matrices: Sequence[bool],
        copies: Sequence[Tensor | None],
        coefficients: Sequence[tuple[float, float, float]],
    ):
        device = params[0].device
        self.coefficients = coefficients
        self.pointers = _pointers(params) + _pointers(momenta)
        offsets, sizes = [], []
        tiles, grams, polynomials, products = [], [], [], []
        offset = place = square = 0
        for i, (p, m, matrix, copy) in enumerate(zip(params, momenta, matrices, copies, strict=True)):
            # A vector is read as rows of one tile's width, the last of them short.
            rows, cols = p.shape if p.ndim == 2 else (triton.cdiv(p.numel(), TILE), TILE)
            tall = matrix and rows > cols
            short, long = (cols, rows) if tall else (rows, cols)
            side, width = _round_up(short, TILE), _round_up(long, TILE)
            copied = (0, 0) if copy is None else (copy.data_ptr(), copy.stride(0))
            fields = (p.data_ptr(), m.data_ptr(), *copied, p.numel(), cols, matrix, tall, place, width)
            tiles += [(i, row, col, *fields) for row in range(0, rows, TILE) for col in range(0, cols, TILE)]
            offsets.append(offset)
            sizes.append(max(1.0, rows / cols) ** 0.5)
            if matrix:
                for row in range(side // TILE):
                    for col in range(row + 1):
                        grams.append((place, width, square, side, row, col))
                        polynomials.append((square, side, square, side, row, col))
                    products += [(place, width, square, side, row, col) for col in range(width // TILE)]
                place += side * width
                square += side * side
            offset += p.numel()
        self.tiles, self.offsets = (torch.tensor(x, dtype=torch.int64, device=device) for x in (tiles, offsets))
        self.grams, self.polynomials, self.products = (
            torch.tensor(x, dtype=torch.int32, device=device) for x in (grams, polynomials, products)
        )
        self.sizes = torch.tensor(sizes, device=device)
        self.sums = torch.empty(4 * len(tiles), device=device)
        self.bad = torch.empty(len(tiles), dtype=torch.int32, device=device)
        self.control = torch.empty(2, device=device)
        # Between matrices and tiles lies padding, which stays zero.
        self.x, self.following = (torch.zeros(place, dtype=torch.float16, device=device) for _ in range(2))
        self.gram, self.polynomial = (torch.zeros(square, dtype=torch.float16, device=device) for _ in range(2))

    def fits(self, params: Sequence[Tensor], momenta: Sequence[Tensor]) -> bool:
        """Whether the parameters and their momenta still lie where the tables say."""
        return self.pointers == _pointers(params) + _pointers(momenta)

    def step(
        self, grads: Sequence[Tensor], lr: Tensor, mu: float, max_norm: float, keep: Tensor | None,
        grad_norm: Tensor, skipped: Tensor, first_bad: Tensor,
    ) -> None:  # fmt: skip
        """One step of `Muon` in place. `lr` is a 0-d float32 tensor."""
        n_tiles = self.tiles.shape[0]
        flat = [g if g.ndim == 2 and g.stride(1) == 1 else g.contiguous() for g in grads]
        given = tuple(flat), tuple(g.stride(0) if g.ndim == 2 else TILE for g in flat)
        options = {"TILE": TILE, "num_warps": 8}
        _sums_kernel[(n_tiles,)](*given, self.tiles, self.sums, self.bad, **options)
        _momentum_kernel[(n_tiles,)](
            *given, self.tiles, self.sums, self.bad, keep, self.control, grad_norm, skipped, first_bad, self.x,
            self.offsets, min(max_norm, torch.finfo(torch.float32).max), mu,
            HAS_KEEP=keep is not None, KEEP_FINITE=keep is not None and keep.is_floating_point(),
            TILES=min(1024, triton.next_power_of_2(n_tiles)), **options,
        )  # fmt: skip
        x, following = self.x, self.following
        for a, b, c in self.coefficients if x.numel() else ():
            gemm = {"BLOCK": TILE, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4}
            n = self.grams.shape[0]
            _gram_kernel[(n,)](x, self.gram, self.grams, 0.0, 1.0, POLYNOMIAL=False, **gemm)
            _gram_kernel[(n,)](self.gram, self.polynomial, self.polynomials, b, c, POLYNOMIAL=True, **gemm)
            _product_kernel[(self.products.shape[0],)](x, self.polynomial, following, self.products, a, **gemm)
            x, following = following, x
        _apply_kernel[(n_tiles,)](*given, self.tiles, self.sizes, self.control, lr, x, mu, **options)


def _pointers(params: Sequence[Tensor]) -> list[int]:
    return [p.data_ptr() for p in params]


def usable(params: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether the kernels serve these parameters with Newton-Schulz steps in `dtype`."""
    fits_32_bits = max(p.numel() for p in params) < 2**30
    return (
        dtype == torch.float16
        and fits_32_bits
        and all(p.dtype == torch.float32 and p.is_contiguous() and math.prod(p.shape) > 0 for p in params)
    )
