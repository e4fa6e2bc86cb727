"""Adam on one flat vector for GPUs in two launches: partial sums of g^2, and the step, whose programs all add these up.

The count of steps, which the second launch moves on, is read by all its programs: from a copy that the first one made.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

PARTS = 512  # programs of the first launch, at most
BLOCK = 1024
_NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["n"])
def _norm_kernel(grad_ptr, count_ptr, sums_ptr, places_ptr, steps_ptr, n, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """Each program's sum of squares, and the first place that is not finite in it."""
    pid = tl.program_id(0)
    if pid == 0:
        tl.store(steps_ptr, tl.load(count_ptr))
    total = tl.zeros([BLOCK], tl.float32)
    place = tl.full([BLOCK], _NOWHERE, tl.int32)
    for start in range(pid * BLOCK, n, PROGRAMS * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        g = tl.load(grad_ptr + offs, mask=offs < n, other=0.0)
        total += g * g
        place = tl.minimum(place, tl.where(tl.abs(g) < float("inf"), _NOWHERE, offs))
    tl.store(sums_ptr + pid, tl.sum(total, 0))
    tl.store(places_ptr + pid, tl.min(place, 0))


@triton.jit(do_not_specialize=["n"])
def _step_kernel(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    count_ptr,
    steps_ptr,
    lr_ptr,
    keep_ptr,
    report_ptr,
    sums_ptr,
    places_ptr,
    rise1,
    rise2,
    log_beta1,
    log_beta2,
    eps,
    max_grad_norm,
    n,
    KEEP_IS_FLOAT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    norm = tl.sqrt(tl.sum(tl.load(sums_ptr + tl.arange(0, PROGRAMS)), 0))
    keep = tl.load(keep_ptr)
    if KEEP_IS_FLOAT:
        keep = tl.abs(keep) < float("inf")
    kept = tl.where(norm < float("inf"), keep.to(tl.int32), 0)
    steps = tl.load(steps_ptr)
    if pid == 0:
        tl.store(report_ptr, norm)
        tl.store(report_ptr + 1, kept.to(tl.float32))
        place = tl.min(tl.load(places_ptr + tl.arange(0, PROGRAMS)), 0)
        place = tl.where(place == _NOWHERE, 0, place)  # squares that overflow
        tl.store(report_ptr + 2, place.to(tl.float32), mask=(norm < float("inf")) == 0)
        tl.store(count_ptr, steps + kept.to(tl.float32))
    t = (steps + 1.0).to(tl.float64)
    # In doubles, for the same reason.
    rate = (tl.load(lr_ptr).to(tl.float64) / (1.0 - tl.exp(t * log_beta1))).to(tl.float32)
    root = (1.0 / tl.sqrt(1.0 - tl.exp(t * log_beta2))).to(tl.float32)
    scale = tl.minimum(max_grad_norm / (norm + 1e-6), 1.0)
    offs = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = tl.where(kept != 0, offs, n) < n
    g = tl.load(grad_ptr + offs, mask=mask, other=0.0) * scale
    m = tl.load(exp_avg_ptr + offs, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq_ptr + offs, mask=mask, other=0.0)
    w = tl.load(param_ptr + offs, mask=mask, other=0.0)
    m += rise1 * (g - m)
    v += rise2 * (g * g - v)
    tl.store(exp_avg_ptr + offs, m, mask=mask)
    tl.store(exp_avg_sq_ptr + offs, v, mask=mask)
    tl.store(param_ptr + offs, w - rate * m / (tl.sqrt(v) * root + eps), mask=mask)


def adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    count: Tensor,
    lr: Tensor,
    keep: Tensor,
    report: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    max_grad_norm: float,
) -> None:
    """As the reference, float32."""
    n = param.numel()
    programs = min(PARTS, triton.next_power_of_2(triton.cdiv(n, BLOCK)))
    sums = torch.empty(programs, device=param.device)
    places = torch.empty(programs, dtype=torch.int32, device=param.device)
    steps = torch.empty_like(count)
    _norm_kernel[(programs,)](grad, count, sums, places, steps, n, PROGRAMS=programs, BLOCK=BLOCK)
    _step_kernel[(triton.cdiv(n, BLOCK),)](
        param,
        grad,
        exp_avg,
        exp_avg_sq,
        count,
        steps,
        lr,
        keep if keep.is_floating_point() else keep.view(torch.uint8),
        report,
        sums,
        places,
        1 - beta1,  # not in the kernel, where 1 - 0.999 would be off by 5e-5 of itself
        1 - beta2,
        math.log(beta1) if beta1 else -math.inf,
        math.log(beta2) if beta2 else -math.inf,
        eps,
        max_grad_norm,
        n,
        KEEP_IS_FLOAT=keep.is_floating_point(),
        PROGRAMS=programs,
        BLOCK=BLOCK,
    )
