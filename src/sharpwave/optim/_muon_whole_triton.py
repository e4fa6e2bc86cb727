"""Muon's step in one launch, where every program has a multiprocessor of its own and all of a Gram matrix fits on it.

A program keeps some columns of one matrix, which lies wide, from the gradient to the weights. With G = X X^T, a
Newton-Schulz step is

    X <- a X + G (b X + c G X)

so that it takes its columns through the step by itself once G is there; tiles of G, which is symmetric, are computed
once and written twice. All programs wait for each other once, for the gradient's norm, and those of a matrix twice a
step.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from sharpwave.ops._backends import triton_interpreted

TILE, HALF = 64, 32  # rows and columns of a tile of G
COLS = 32  # of a program
LARGEST_SIDE = 256
# A line of the table for each program. Its parameter, and that one's addresses of weight, momentum and bf16 copy (0:
# none) with the copy's row length; its entries, rows and columns; whether it is orthogonalised, and whether it lies
# turned in its wide form; the first row and column of the program; where in `x` the wide form begins, and its row
# length; where in `gram` its G begins, and its side, in whole tiles; how many programs it has, and the counter on which
# those of a matrix wait for each other; where in all gradients flattened its own begins.
_PARAM, _WEIGHT, _MOMENTUM, _COPY, _COPY_WIDTH = (tl.constexpr(i) for i in range(5))
_SIZE, _ROWS, _COLS, _MATRIX, _TALL, _ROW, _COL = (tl.constexpr(i) for i in range(5, 12))
_PLACE, _WIDTH, _SQUARE, _SIDE, _MEMBERS, _COUNTER, _OFFSET = (tl.constexpr(i) for i in range(12, 19))
_FIELDS = tl.constexpr(19)


@triton.jit
def _load(ptr, stride, rows, cols, size, tall, above, first, SIDE: tl.constexpr, COLS: tl.constexpr):
    """The program's entries of its parameter's wide form, [SIDE, COLS]; zeros beside it."""
    if tall != 0:
        r, c = first + tl.arange(0, COLS)[:, None], tl.arange(0, SIDE)[None, :]
        out = tl.trans(tl.load(ptr + r * stride + c, mask=(r < rows) & (c < cols), other=0.0))
    else:
        row, col = above + tl.arange(0, SIDE)[:, None], first + tl.arange(0, COLS)[None, :]
        mask = (row < rows) & (col < cols) & (row * cols + col < size)
        out = tl.load(ptr + row * stride + col, mask=mask, other=0.0)
    return out


@triton.jit
def _store(ptr, stride, rows, cols, size, tall, above, first, value, SIDE: tl.constexpr, COLS: tl.constexpr):
    if tall != 0:
        r, c = first + tl.arange(0, COLS)[:, None], tl.arange(0, SIDE)[None, :]
        tl.store(ptr + r * stride + c, tl.trans(value), mask=(r < rows) & (c < cols))
    else:
        row, col = above + tl.arange(0, SIDE)[:, None], first + tl.arange(0, COLS)[None, :]
        mask = (row < rows) & (col < cols) & (row * cols + col < size)
        tl.store(ptr + row * stride + col, value, mask=mask)


@triton.jit
def _round(counter_ptr, members):
    """What the counter, int64, which only grows, stood at before this launch; no round of `members` is done before all
    have asked."""
    seen = tl.load(counter_ptr, volatile=True)
    return seen - seen % members


@triton.jit
def _arrive_and_wait(counter_ptr, target, ALONE: tl.constexpr):
    """Add one, and wait until the counter is at `target`; what other programs wrote before they came is seen then."""
    if not ALONE:
        tl.debug_barrier()
        # The first thread for all of them.
        tl.inline_asm_elementwise(
            """{
                .reg .pred other, early;
                .reg .u32 thread;
                .reg .u64 seen;
                mov.u32 thread, %tid.x;
                setp.ne.u32 other, thread, 0;
                @other bra done;
                red.release.gpu.global.add.u64 [$1], 1;
            again:
                ld.acquire.gpu.global.u64 seen, [$1];
                setp.lt.u64 early, seen, $2;
                @early bra again;
            done:
                mov.u32 $0, 0;
            }""",
            "=r,l,l",
            [counter_ptr.to(tl.int64), target],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.debug_barrier()


@triton.jit
def _gram_tile(
    x_ptr, gram_ptr, width, tile,
    SIDE: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tile number `tile` of X X^T, counted row by row as far as the diagonal's square, and its mirror image."""
    parts: tl.constexpr = TILE // HALF
    up = ((tl.sqrt(8.0 * (tile // parts) + 1.0) - 1.0) * 0.5 + 1e-3).to(tl.int32)
    along = tile - parts * (up * (up + 1) // 2)
    offs_i = up * TILE + tl.arange(0, TILE)
    offs_j = along * HALF + tl.arange(0, HALF)
    acc = tl.zeros([TILE, HALF], tl.float32)
    for start in tl.range(0, width, BLOCK_K, num_stages=STAGES):
        offs_k = start + tl.arange(0, BLOCK_K)
        left = tl.load(x_ptr + offs_i[:, None] * width + offs_k[None, :])
        right = tl.load(x_ptr + offs_j[:, None] * width + offs_k[None, :])
        acc = tl.dot(left, tl.trans(right), acc)
    out = acc.to(gram_ptr.dtype.element_ty)
    tl.store(gram_ptr + offs_i[:, None] * SIDE + offs_j[None, :], out)
    if along // parts != up:
        tl.store(gram_ptr + offs_j[:, None] * SIDE + offs_i[None, :], tl.trans(out))


@triton.jit
def _columns(x, gram_ptr, a, b, c, SIDE: tl.constexpr):
    """A step of some columns: a X + G (b X + c G X)."""
    rows = tl.arange(0, SIDE)
    gram = tl.load(gram_ptr + rows[:, None] * SIDE + rows[None, :])
    y = (b * x.to(tl.float32) + c * tl.dot(gram, x)).to(x.dtype)
    return (a * x.to(tl.float32) + tl.dot(gram, y)).to(x.dtype)


@triton.jit
def _step_kernel(
    grads, strides, table_ptr, sums_ptr, bad_ptr, keep_ptr, norm_ptr, skipped_ptr, first_bad_ptr, x_ptr, gram_ptr,
    coefficients_ptr, counters_ptr, lr_ptr, max_norm, mu,
    HAS_KEEP: tl.constexpr, KEEP_FINITE: tl.constexpr, PROGRAMS: tl.constexpr, STEPS: tl.constexpr,
    SIDE: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr, COLS: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """All of `Muon.step`. grads, strides: of each parameter; a gradient may be a slice of a wider matrix."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    # All of the table at once: after a branch or a store it would be waited for piece by piece.
    at = table_ptr + pid * _FIELDS
    param = tl.load(at + _PARAM)
    weight_ptr = tl.load(at + _WEIGHT).to(tl.pointer_type(tl.float32))
    momentum_ptr = tl.load(at + _MOMENTUM).to(tl.pointer_type(tl.float32))
    copy, copy_width = tl.load(at + _COPY), tl.load(at + _COPY_WIDTH).to(tl.int32)
    size = tl.load(at + _SIZE).to(tl.int32)
    rows, cols = tl.load(at + _ROWS).to(tl.int32), tl.load(at + _COLS).to(tl.int32)
    matrix, tall = tl.load(at + _MATRIX), tl.load(at + _TALL)
    above, first = tl.load(at + _ROW).to(tl.int32), tl.load(at + _COL).to(tl.int32)
    x_ptr += tl.multiple_of(tl.load(at + _PLACE), 64)
    width = tl.multiple_of(tl.load(at + _WIDTH).to(tl.int32), 64)
    gram_ptr += tl.multiple_of(tl.load(at + _SQUARE), 64)
    side = tl.multiple_of(tl.load(at + _SIDE).to(tl.int32), 64)
    members = tl.load(at + _MEMBERS).to(tl.int32)
    counter_ptr = counters_ptr + tl.load(at + _COUNTER)
    everyone = _round(counters_ptr, programs) + programs
    goal = _round(counter_ptr, members)
    # So is what nobody writes meanwhile: whose sums are whose, the learning rate, and whether to step.
    offs = tl.arange(0, PROGRAMS)
    some = offs < programs
    owner = tl.load(table_ptr + offs * _FIELDS + _PARAM, mask=some, other=-1)
    lr = tl.load(lr_ptr)
    allowed = 1
    if HAS_KEEP:
        if KEEP_FINITE:
            allowed = tl.where(tl.abs(tl.load(keep_ptr).to(tl.float32)) < float("inf"), 1, 0)
        else:
            allowed = tl.where(tl.load(keep_ptr) != 0, 1, 0)

    address, stride = grads[0].to(tl.int64), strides[0]
    for i in tl.static_range(1, len(grads)):
        address = tl.where(param == i, grads[i].to(tl.int64), address)
        stride = tl.where(param == i, strides[i], stride)
    g = _load(address.to(tl.pointer_type(tl.float32)), stride, rows, cols, size, tall, above, first, SIDE, COLS)
    m = _load(momentum_ptr, cols, rows, cols, size, tall, above, first, SIDE, COLS)
    squares = tl.sum(tl.sum(g * g, 0), 0)
    tl.store(sums_ptr + pid, squares)
    tl.store(sums_ptr + programs + pid, tl.sum(tl.sum(g * m, 0), 0))
    tl.store(sums_ptr + 2 * programs + pid, tl.sum(tl.sum(m * m, 0), 0))
    place = 2147483647
    if (squares < float("inf")) == 0:
        r, c = above + tl.arange(0, SIDE)[:, None], first + tl.arange(0, COLS)[None, :]
        inside = tl.where(tall != 0, c * cols + r, r * cols + c)
        place = tl.min(tl.min(tl.where(tl.abs(g) < float("inf"), 2147483647, inside), 1), 0)
    tl.store(bad_ptr + pid, place)
    _arrive_and_wait(counters_ptr, everyone, ALONE)

    # Every program adds the same sums in the same order.
    gg = tl.load(sums_ptr + offs, mask=some, other=0.0).to(tl.float64)
    gm = tl.load(sums_ptr + programs + offs, mask=some, other=0.0).to(tl.float64)
    mm = tl.load(sums_ptr + 2 * programs + offs, mask=some, other=0.0).to(tl.float64)
    norm = tl.sqrt(tl.sum(gg, 0)).to(tl.float32)
    finite = tl.where(tl.abs(norm) < float("inf"), 1, 0)
    keep = finite * allowed
    scale = tl.minimum(max_norm / (norm + 1e-6), 1.0)
    if pid == 0:
        tl.store(norm_ptr, norm)
        tl.store(skipped_ptr, tl.load(skipped_ptr) + (1 - keep))
        if finite == 0:
            bad = tl.load(bad_ptr + offs, mask=some, other=2147483647)
            flat = bad + tl.load(table_ptr + offs * _FIELDS + _OFFSET, mask=some, other=0)
            tl.store(first_bad_ptr, tl.min(tl.where(bad < 2147483647, flat, 9223372036854775807), 0))

    g *= scale
    new = tl.fma(mu, m, g)
    if keep != 0:
        _store(momentum_ptr, cols, rows, cols, size, tall, above, first, new, SIDE, COLS)
    direction = tl.fma(mu, new, g)
    if matrix != 0:
        # |u|^2 of u = (1 + mu) s g + mu^2 m, out of the three sums.
        a, b = (1.0 + mu) * scale, mu * mu
        own = owner == param
        square = tl.sum(tl.where(own, gg * a * a + 2.0 * gm * a * b + mm * b * b, 0.0), 0)
        length = tl.maximum(tl.sqrt(tl.maximum(square, 0.0)).to(tl.float32), 1e-7)
        x = (direction * (1.0 / length)).to(x_ptr.dtype.element_ty)
        high = tl.arange(0, SIDE)[:, None]
        here = high * width + first + tl.arange(0, COLS)[None, :]
        tl.store(x_ptr + here, x, mask=high < side)
        goal += members
        _arrive_and_wait(counter_ptr, goal, ALONE)
        tiles = TILE // HALF * (side // TILE * (side // TILE + 1) // 2)
        # Neither loop may be pipelined: what it loads, other programs write before its waits.
        for step in tl.range(0, STEPS, num_stages=1):
            for tile in tl.range(first // COLS, tiles, members, num_stages=1):
                _gram_tile(x_ptr, gram_ptr, width, tile, SIDE, TILE, HALF, BLOCK_K, STAGES)
            goal += members
            _arrive_and_wait(counter_ptr, goal, ALONE)
            factors_ptr = coefficients_ptr + step * 3
            x = _columns(x, gram_ptr, tl.load(factors_ptr), tl.load(factors_ptr + 1), tl.load(factors_ptr + 2), SIDE)
            if step < STEPS - 1:
                tl.store(x_ptr + here, x, mask=high < side)
                goal += members
                _arrive_and_wait(counter_ptr, goal, ALONE)
        ratio = rows.to(tl.float32) / cols.to(tl.float32)
        direction = x.to(tl.float32) * tl.sqrt_rn(tl.maximum(ratio, 1.0))
    if keep != 0:
        weight = _load(weight_ptr, cols, rows, cols, size, tall, above, first, SIDE, COLS)
        weight -= lr * direction
        _store(weight_ptr, cols, rows, cols, size, tall, above, first, weight, SIDE, COLS)
        if copy != 0:
            copy_ptr = copy.to(tl.pointer_type(tl.bfloat16))
            _store(copy_ptr, copy_width, rows, cols, size, tall, above, first, weight.to(tl.bfloat16), SIDE, COLS)


def _wide(p: Tensor) -> tuple[int, int]:
    """Rows and columns of a matrix's wide form, in whole tiles."""
    short, long = sorted(p.shape)
    return triton.cdiv(short, TILE) * TILE, triton.cdiv(long, TILE) * TILE


def _side(params: Sequence[Tensor], matrices: Sequence[bool]) -> int:
    """Rows of what a program keeps."""
    return triton.next_power_of_2(max([TILE, *(_wide(p)[0] for p, m in zip(params, matrices, strict=True) if m)]))


def _blocks(p: Tensor, matrix: bool, side: int) -> tuple[int, int, list[tuple[int, int]]]:
    """Rows and columns of the parameter, and where the programs begin in its wide form."""
    # A vector is read as rows of COLS entries, the last of them short.
    rows, cols = (p.shape[0], p.shape[1]) if p.ndim == 2 else (triton.cdiv(p.numel(), COLS), COLS)
    if matrix:
        return rows, cols, [(0, col) for col in range(0, max(rows, cols), COLS)]
    return rows, cols, [(row, col) for row in range(0, rows, side) for col in range(0, cols, COLS)]


def serves(params: Sequence[Tensor], matrices: Sequence[bool]) -> bool:
    """Whether all programs run at once, so that they may wait for each other, each with room for its matrix's G."""
    device, side = params[0].device, _side(params, matrices)
    if side > LARGEST_SIDE:
        return False
    programs = sum(len(_blocks(p, m, side)[2]) for p, m in zip(params, matrices, strict=True))
    if device.type != "cuda":
        return programs == 1  # The interpreter runs them one after the other.
    if torch.version.hip is not None:
        return False
    properties = torch.cuda.get_device_properties(device)
    return properties.major == 9 and programs <= properties.multi_processor_count


class Plan:
    """As `_muon_triton.Plan`, for what `serves`."""

    def __init__(
        self,
        params: Sequence[Tensor],
        momenta: Sequence[Tensor],
        matrices: Sequence[bool],
        copies: Sequence[Tensor | None],
        coefficients: Sequence[tuple[float, float, float]],
    ):
        device = params[0].device
        self.pointers = [p.data_ptr() for p in (*params, *momenta)]
        self.side = _side(params, matrices)
        table = []
        offset = place = square = 0
        counter = 1  # The first is that of all programs.
        for i, (p, m, matrix, copy) in enumerate(zip(params, momenta, matrices, copies, strict=True)):
            rows, cols, begins = _blocks(p, matrix, self.side)
            side, width = _wide(p) if matrix else (0, 0)
            copied = (0, 0) if copy is None else (copy.data_ptr(), copy.stride(0))
            fields = (i, p.data_ptr(), m.data_ptr(), *copied, p.numel(), rows, cols, matrix, matrix and rows > cols)
            own = counter if matrix else 0
            table += [(*fields, *begin, place, width, square, side, len(begins), own, offset) for begin in begins]
            if matrix:
                place += side * width
                square += self.side * self.side
                counter += 1
            offset += p.numel()
        self.table = torch.tensor(table, dtype=torch.int64, device=device)
        self.sums = torch.empty(3 * len(table), device=device)
        self.bad = torch.empty(len(table), dtype=torch.int32, device=device)
        # Between matrices and whole tiles or squares lies padding, which stays zero.
        self.x = torch.zeros(place, dtype=torch.float16, device=device)
        self.gram = torch.zeros(square, dtype=torch.float16, device=device)
        self.coefficients = torch.tensor(coefficients, device=device)
        self.counters = torch.zeros(counter, dtype=torch.int64, device=device)

    def fits(self, params: Sequence[Tensor], momenta: Sequence[Tensor]) -> bool:
        """Whether the parameters and their momenta still lie where the table says."""
        return self.pointers == [p.data_ptr() for p in (*params, *momenta)]

    def step(
        self, grads: Sequence[Tensor], lr: Tensor, mu: float, max_norm: float, keep: Tensor | None,
        grad_norm: Tensor, skipped: Tensor, first_bad: Tensor,
    ) -> None:  # fmt: skip
        """One step of `Muon` in place. `lr` is a 0-d float32 tensor."""
        flat = [g if g.ndim == 2 and g.stride(1) == 1 else g.contiguous() for g in grads]
        n = self.table.shape[0]
        _step_kernel[(n,)](
            tuple(flat), tuple(g.stride(0) if g.ndim == 2 else COLS for g in flat), self.table, self.sums, self.bad,
            keep, grad_norm, skipped, first_bad, self.x, self.gram, self.coefficients, self.counters, lr,
            min(max_norm, torch.finfo(torch.float32).max), mu,
            HAS_KEEP=keep is not None, KEEP_FINITE=keep is not None and keep.is_floating_point(),
            PROGRAMS=triton.next_power_of_2(n), STEPS=self.coefficients.shape[0], SIDE=self.side, TILE=TILE, HALF=HALF,
            COLS=COLS, BLOCK_K=TILE, STAGES=4, ALONE=triton_interpreted(), num_warps=8, num_stages=1,
            launch_cooperative_grid=True,
        )  # fmt: skip
