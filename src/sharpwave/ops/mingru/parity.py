"""Parity cases of the MinGRU scan: kernels against float64, and the tiled backward bit for bit against the serial."""

from collections.abc import Iterator

import torch
from torch import Tensor

from sharpwave.ops.mingru import mingru_scan
from sharpwave.run.parity import Outcome, backends_on

# Largest error over the reference's largest magnitude: reassociated sums in 24 bits, and two units of 8 bits.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}
WIDTHS = (1, 33, 256)


def cases(device: str) -> Iterator[Outcome]:
    gpu = torch.device(device).type == "cuda"
    for backend in backends_on("mingru", device):
        interpreted = backend == "triton" and not gpu
        # The interpreter cuts float32 to bfloat16 where hardware rounds, so there only bits are compared in it.
        for dtype in (torch.float32,) if interpreted else LIMITS:
            for b, t, h in ((1, 20, 5),) if interpreted else ((3, 63, 64), (2, 1000, 1), (4, 128, 256)):
                yield _against_float64(backend, device, b, t, h, dtype)
        if backend == "triton":
            for dtype in LIMITS:
                for h in WIDTHS[:1] if interpreted else WIDTHS:
                    yield tiled_is_serial(device, h, dtype, n=2 if interpreted else 40)


def random_case(seed: int, h: int, dtype: torch.dtype, device: str) -> list[Tensor | None]:
    """combined, state, x, reset, dout and dnext_state: any B below 8, T below 200, resets from none to all.

    A third of the cases hold gates of +-80, zeros of both signs and tiny numbers.
    """
    g = torch.Generator().manual_seed(seed)
    b, t, rate = (int(torch.randint(1, high, (), generator=g)) for high in (8, 200, 5))
    tensors = [torch.randn(b, t, 3 * h, generator=g) * 2, torch.randn(b, h, generator=g)]
    tensors += [torch.randn(b, t, h, generator=g) for _ in range(2)]
    tensors += [torch.randn(b, h, generator=g), torch.rand(b, t, generator=g) < (0, 0.02, 0.5, 1)[rate - 1]]
    combined, state, x, dout, dnext, reset = tensors
    if seed % 3 == 0:
        hard = torch.tensor([-80.0, 80.0, -0.0, 0.0, 1e-30, 1.0])
        combined, dout = (hard[torch.randint(6, v.shape, generator=g)] for v in (combined, dout))
    combined, x, dout = (v.to(dtype) for v in (combined, x, dout))
    ordered = (combined, state, x, reset if rate > 1 else None, dout, dnext)
    return [None if v is None else v.to(device) for v in ordered]


def tiled_is_serial(device: str, h: int, dtype: torch.dtype, n: int = 40) -> Outcome:
    """`n` random cases; the error is the count of values whose bits differ, or that are not finite."""
    differ, repeats = 0, True
    for seed in range(n):
        tensors = random_case(seed, h, dtype, device)
        tiled, again, serial = (_run(tensors, "triton", order) for order in ("tiled", "tiled", "serial"))
        differ += sum(_differences(a, b) + int((~a.isfinite()).sum()) for a, b in zip(tiled, serial, strict=True))
        repeats &= not sum(_differences(a, b) for a, b in zip(tiled, again, strict=True))
    case = f"tiled = serial, {n} random shapes, H={h} {str(dtype).removeprefix('torch.')}"
    return Outcome(case, float(differ), 0.0, repeats)


def _against_float64(backend: str, device: str, b: int, t: int, h: int, dtype: torch.dtype) -> Outcome:
    g = torch.Generator().manual_seed(t)
    shapes = (b, t, 3 * h), (b, h), (b, t, h), (b, t, h), (b, h)
    combined, state, x, dout, dnext = (torch.randn(s, generator=g) for s in shapes)
    combined, x, dout = (v.to(dtype) for v in (combined, x, dout))
    tensors = [combined, state, x, torch.rand(b, t, generator=g) < 0.05, dout, dnext]
    wanted = _run([v if v.dtype == torch.bool else v.double() for v in tensors], "reference")
    on_device = [v.to(device) for v in tensors]
    runs = [_run(on_device, backend) for _ in range(2)]
    error = max(
        ((got.double().cpu() - want).abs().amax() / want.abs().amax()).item()
        for got, want in zip(runs[0], wanted, strict=True)
    )
    repeats = not sum(_differences(a, b) for a, b in zip(*runs, strict=True))
    case = f"forward and backward {backend} B={b} T={t} H={h} {str(dtype).removeprefix('torch.')}"
    return Outcome(case, error, LIMITS[dtype], repeats)


def _run(tensors: list[Tensor] | list[Tensor | None], backend: str, order: str = "tiled") -> list[Tensor]:
    """out, next_state and the three gradients."""
    combined, state, x, reset, dout, dnext = tensors
    leaves = [v.detach().clone().requires_grad_() for v in (combined, state, x) if v is not None]
    outs = mingru_scan(*leaves, reset, backward=order, backend=backend)  # ty: ignore[invalid-argument-type]
    return [*(o.detach() for o in outs), *torch.autograd.grad(outs, leaves, (dout, dnext))]


def _differences(a: Tensor, b: Tensor) -> int:
    bits = torch.int16 if a.element_size() == 2 else torch.int32
    return int((a.view(bits) != b.view(bits)).sum())
