"""Adam with a clipped gradient that skips what is not finite, without waiting for the device."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


class ClippedAdam(torch.optim.Adam):
    """`torch.optim.Adam`, fused, with the gradient's global norm clipped before.

        g <- g min(1, max_grad_norm / (|g| + 1e-6)), |g| over all parameters;   then Adam's step

    Where |g| is not finite, nothing changes but `skipped`, which counts such steps: no host wait. The interface is that
    of `sharpwave.optim.Muon`.

    Args:
        params: parameters, float32.
        lr: a 0-d tensor on the parameters' device, so that a captured graph follows a schedule.
        eps: added to the root of the second moment.
        max_grad_norm: > 0; infinity leaves the gradient as it is.

    Attributes:
        grad_norm: 0-d, |g| before clipping at the last step.
        skipped: 0-d int64.
        first_bad: 0-d int64, the place of the first entry that was not finite at the last step skipped for it, in the
            gradients flattened one after the other.

    Source: Kingma and Ba 2015 (arXiv 1412.6980).
    """

    def __init__(self, params: Iterable, lr: Tensor, eps: float = 1e-8, max_grad_norm: float = math.inf):
        params = list(params)
        device = params[0].device
        fused = device.type in ("cpu", "cuda", "xpu", "mps")
        # On a CPU the learning rate is read where the step is taken; elsewhere the kernel reads it.
        super().__init__(params, lr=lr, eps=eps, fused=fused, capturable=device.type != "cpu")
        self.max_grad_norm = max_grad_norm
        self.grad_norm = torch.zeros((), device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.first_bad = torch.zeros((), dtype=torch.int64, device=device)
        for p in params:
            self.state[p] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    @torch.no_grad()
    def step(self, closure=None, *, keep: Tensor | None = None):
        """One step, or none (without a host wait) where the 0-d bool tensor `keep` is false."""
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        flat = torch.cat([p.grad.reshape(-1) for p in params if p.grad is not None])
        norm = torch.linalg.vector_norm(flat)
        self.grad_norm.copy_(norm)
        finite = norm.isfinite()
        keep = finite if keep is None else finite & keep
        self.skipped += ~keep
        bad = flat.isfinite().logical_not_().view(torch.uint8).argmax()
        self.first_bad.copy_(torch.where(finite, self.first_bad, bad))
        # What a GradScaler would set: the kernel divides by the one, and does nothing where the other is 1.
        self.found_inf = (~keep).float()
        self.grad_scale = ((norm + 1e-6) / self.max_grad_norm).clamp(min=1).float()
        return super().step(closure)
