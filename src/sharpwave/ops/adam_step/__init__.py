"""One step of Adam on a flat vector, its gradient clipped, and left out where anything is not finite."""

from torch import Tensor

from sharpwave.ops import _backends
from sharpwave.ops._library import register

__all__ = ["REPORT", "adam_step"]

REPORT = ("grad_norm", "kept", "first_bad")
"""What `report` holds."""


def _kernel(
    param, grad, exp_avg, exp_avg_sq, count, lr, keep, report, beta1, beta2, eps, max_grad_norm, backend
) -> None:
    impl = _backends.load("adam_step", param.device, backend)
    impl.adam_step(
        param, grad, exp_avg, exp_avg_sq, count, lr, keep, report, beta1, beta2, eps, max_grad_norm
    )  # fmt: skip


_op = register(
    "adam_step(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!) count, Tensor lr, "
    "Tensor keep, Tensor(e!) report, float beta1, float beta2, float eps, float max_grad_norm, str backend) -> ()",
    _kernel,
    lambda *_args: None,
)


def adam_step(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    count: Tensor,
    lr: Tensor,
    keep: Tensor,
    report: Tensor,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    max_grad_norm: float = float("inf"),
    backend: _backends.Backend = "auto",
) -> None:
    """Adam, in place, without waiting for the device.

        g <- g min(1, max_grad_norm / (|g| + 1e-6));   t <- t + 1
        m <- beta1 m + (1 - beta1) g;   v <- beta2 v + (1 - beta2) g^2
        w <- w - lr / (1 - beta1^t)  m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    Where `keep` is false or not finite, or |g| is not finite, nothing changes but `report`.

    Args:
        param, grad, exp_avg, exp_avg_sq: (n,) contiguous float32; w, g, m, v. float64 on `reference`.
        count: 0-d float32, t: steps taken.
        lr: 0-d float32. keep: 0-d bool, or float32, such as the loss, which says no by not being finite.
        report: (3,) float32, written: |g| before clipping; 1 where the step was taken, else 0; and, where |g| is not
            finite, the place of the first entry of g that is not (exact below 2^24).
        beta1, beta2: in [0, 1). eps: > 0. max_grad_norm: > 0.

    |g| is summed in a fixed order, on a CPU in float64: deterministic.

    Raises:
        ValueError: a shape does not fit.

    Source: Kingma and Ba 2015 (arXiv 1412.6980).
    """
    n = param.shape
    if param.ndim != 1 or any(x.shape != n or not x.is_contiguous() for x in (grad, exp_avg, exp_avg_sq)):
        shapes = [tuple(x.shape) for x in (param, grad, exp_avg, exp_avg_sq)]
        raise ValueError(f"param, grad, exp_avg and exp_avg_sq must be contiguous and (n,), of one n; got {shapes}")
    if report.shape != (len(REPORT),) or any(x.numel() != 1 for x in (count, lr, keep)):
        raise ValueError("report must be (3,), and count, lr and keep 0-d")
    _op(param, grad, exp_avg, exp_avg_sq, count, lr, keep, report, beta1, beta2, eps, max_grad_norm, backend)
