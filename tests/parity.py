"""One way to compare a backend with its reference, and the one table of tolerances."""

import torch
from torch import Tensor

# (rms ratio, largest error over the reference's largest magnitude), by the dtype of the output.
TOLERANCE = {
    torch.float64: (1e-12, 1e-11),  # 53 bits, a few hundred operations
    torch.float32: (2e-6, 1e-5),  # 24 bits, reassociated sums of up to a few thousand terms
    torch.bfloat16: (4e-3, 1.6e-2),  # 8 bits: rounding once is 2e-3 rms; the largest error is two of its ulps
    torch.float16: (5e-4, 2e-3),  # 11 bits
}


def assert_parity(got: Tensor, want: Tensor, name: str = "output", scale: float = 1.0) -> None:
    """`got` is finite, and has `want`'s shape and values within TOLERANCE[got.dtype] * scale.

    `want` may be of higher precision. `scale` other than 1 needs a reason beside the call.
    """
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if not got.dtype.is_floating_point:
        assert torch.equal(got.cpu(), want.cpu()), f"{name}: differs"
        return
    rms_tol, max_tol = (x * scale for x in TOLERANCE[got.dtype])
    g, w = got.detach().double().cpu(), want.detach().double().cpu()
    assert torch.isfinite(g).all(), f"{name}: {int((~torch.isfinite(g)).sum())} of {g.numel()} values are not finite"
    if g.numel() == 0:
        return
    error = g - w
    rms = error.square().mean().sqrt() / w.square().mean().sqrt().clamp(min=1e-30)
    largest = error.abs().max() / w.abs().max().clamp(min=1e-30)
    assert rms <= rms_tol, f"{name}: rms error {rms:.2e} of the reference's rms, allowed {rms_tol:.0e}"
    assert largest <= max_tol, f"{name}: largest error {largest:.2e}, allowed {max_tol:.0e}"


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """A tensor of NaN: what a kernel does not write shows."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)
