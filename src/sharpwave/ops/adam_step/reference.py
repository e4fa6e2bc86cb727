"""Adam on one flat vector in plain PyTorch."""

import torch
from torch import Tensor


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
    """See `sharpwave.ops.adam_step.adam_step`."""
    norm = torch.linalg.vector_norm(grad)
    kept = (keep.isfinite() if keep.is_floating_point() else keep) & norm.isfinite()
    g = grad * (max_grad_norm / (norm + 1e-6)).clamp(max=1)
    step = count + 1
    m = torch.lerp(exp_avg, g, 1 - beta1)
    v = torch.lerp(exp_avg_sq, g * g, 1 - beta2)
    first, second = (1 - torch.pow(beta, step.double()) for beta in (beta1, beta2))
    root = v.sqrt() / second.sqrt().to(v.dtype) + eps
    moved = param - (lr.double() / first).to(m.dtype) * m / root
    bad = grad.isfinite().logical_not_().view(torch.uint8).argmax()
    report.copy_(torch.stack([norm.float(), kept.float(), torch.where(norm.isfinite(), report[2], bad.float())]))
    for tensor, new in ((param, moved), (exp_avg, m), (exp_avg_sq, v), (count, step)):
        tensor.copy_(torch.where(kept, new, tensor))
