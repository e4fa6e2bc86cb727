"""The MinGRU scan beside the memory's own time and its peers: python -m benchmarks.mingru

T = 128 and H = 256 on a GPU, where a call is timed as replays of a captured graph; T = 64 and H = 128 on a CPU. Floor:
a copy that reads and writes as many bytes as forward (5 tensors of (B, T, H)) and backward (9) must. Peers: the
log-space form of Feng et al. 2024, appendix B, in PyTorch, and cuDNN's GRU; with --slow-peers also those that compile
or tune for minutes: the log-space form under torch.compile, and flash-linear-attention's HGRN, whose scan moves 3
tensors where ours moves 5, as its gates come ready. Writes benchmarks/results/mingru-DEVICE.json.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import _timing
from sharpwave.ops import _backends
from sharpwave.ops.mingru import mingru_layer, mingru_scan, mingru_step

Calls = dict[str, Callable[[], object]]


def log_space(combined: Tensor, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The same mathematics by cumulated log coefficients and logcumsumexp; needs state > 0."""
    hidden, gate, proj = combined.float().chunk(3, dim=-1)
    log_c = torch.where(hidden >= 0, (F.relu(hidden) + 0.5).log(), -F.softplus(-hidden))
    log_values = torch.cat([state.log()[:, None], log_c - F.softplus(-gate)], dim=1)
    log_decay = F.pad(-F.softplus(gate).cumsum(dim=1), (0, 0, 1, 0))
    h = (log_decay + torch.logcumsumexp(log_values - log_decay, dim=1)).exp()[:, 1:]
    p = proj.sigmoid()
    return (p * h + (1 - p) * x).to(x.dtype), h[:, -1]


def gate(device: str) -> None:
    """Ours and the peer of equal mathematics against float64."""
    torch.manual_seed(0)
    tensors = [torch.randn(3, 70, 120), torch.rand(3, 40) + 0.1, torch.randn(3, 70, 40)]
    want = mingru_scan(*(v.double() for v in tensors), backend="reference")
    got = mingru_scan(*(v.to(device) for v in tensors))
    for name, values, tolerance in (("mingru_scan", got, 1e-6), ("log-space", log_space(*tensors), 1e-4)):
        for a, w in zip(values, want, strict=True):
            error = ((a.cpu().double() - w).norm() / w.norm()).item()
            if not error <= tolerance:
                raise AssertionError(f"{name} is off by {error:.1e}")


def kernels(tensors: list[Tensor], dout: Tensor) -> Calls:
    """Our kernels alone: the forward that keeps checkpoints, the backwards, and both with resets."""
    combined, state, x = tensors
    impl = _backends.load("mingru", x.device)
    reset = torch.rand(x.shape[:2], device=x.device) < 0.02
    _, _, kept = impl.mingru_scan(combined, state, x, None, True)
    step = combined[:, 0].contiguous(), state, x[:, 0].contiguous()

    def backward(order: str, flags: Tensor | None = None) -> Callable[[], object]:
        return lambda: impl.mingru_scan_backward(dout, None, combined, x, flags, kept, order)

    calls: Calls = {
        "forward": lambda: impl.mingru_scan(combined, state, x, None, True),
        "backward": backward("tiled"),
        "forward, resets": lambda: impl.mingru_scan(combined, state, x, reset, True),
        "backward, resets": backward("tiled", reset),
        "step": lambda: mingru_step(*step),
    }
    if x.is_cuda:
        calls |= {"backward serial": backward("serial"), "backward fast": backward("fast")}
    return calls


def both_ways(name: str, f: Callable[..., tuple], tensors: list[Tensor], dout: Tensor, *weights: Tensor) -> Calls:
    """A function of (combined, state, x), without gradients, and with all of them."""
    leaves = [v.clone().requires_grad_() for v in tensors]

    def forward() -> object:
        with torch.no_grad():
            return f(*tensors)

    def gradients() -> object:
        return torch.autograd.grad(f(*leaves)[0], [*leaves, *weights], dout, allow_unused=True)

    return {f"{name} forward": forward, f"{name} forward + backward": gradients}


def columns(b: int, t: int, h: int, dtype: torch.dtype, device: str, slow: bool) -> Calls:
    torch.manual_seed(0)
    combined, x, dout = (torch.randn(b, t, n, device=device).to(dtype) for n in (3 * h, h, h))
    tensors = [combined, torch.rand(b, h, device=device) + 0.1, x]
    weight = (torch.randn(3 * h, h, device=device) / h**0.5).to(dtype).requires_grad_()
    calls: Calls = {}
    for name, moved in (("floor, forward", 5), ("floor, backward", 9)):
        target = torch.empty(b * t * h * moved * x.element_size() // 2, dtype=torch.uint8, device=device)
        source = torch.randint_like(target, 256)
        calls[name] = lambda a=target, s=source: a.copy_(s)
    calls |= kernels(tensors, dout)
    calls |= both_ways("mingru_scan", mingru_scan, tensors, dout)
    calls |= both_ways("mingru_layer", lambda c, s, x: mingru_layer(x, weight, s), tensors, dout, weight)
    calls |= both_ways("log-space", log_space, tensors, dout)
    if device == "cuda":
        gru = torch.nn.GRU(h, h, batch_first=True, device=device, dtype=dtype)
        layer = lambda c, s, x: gru(x, s[None].to(x.dtype))  # noqa: E731
        calls |= both_ways("torch.nn.GRU, projection included,", layer, tensors, dout, *gru.parameters())
    if slow:
        from fla.ops.hgrn import chunk_hgrn, fused_recurrent_hgrn

        for name, hgrn in (("HGRN fused_recurrent", fused_recurrent_hgrn), ("HGRN chunk", chunk_hgrn)):
            calls |= both_ways(name, lambda c, s, x, f=hgrn: f(x, -x.abs()), tensors, dout)
        calls |= both_ways("log-space compiled", torch.compile(log_space), tensors, dout)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--slow-peers", action="store_true", help="also peers that compile or tune for minutes")
    args = parser.parse_args()
    gate(args.device)
    sizes = [(64, 64, 128, torch.float32)]
    if args.device == "cuda":
        sizes = [(b, 128, 256, dtype) for dtype in (torch.bfloat16, torch.float32) for b in (64, 256)]
    rows = []
    for b, t, h, dtype in sizes:
        calls = columns(b, t, h, dtype, args.device, args.slow_peers)
        size = {"B": b, "T": t, "H": h, "dtype": str(dtype).removeprefix("torch.")}
        print(*(f"{key} {value}" for key, value in size.items()), flush=True)
        if args.device == "cuda":
            times = {}
            for name, call in calls.items():  # as they come: some peers take minutes
                times[name] = _timing.graph_us(call)
                print(f"  {name:<45} {times[name]['median']:9.1f} us", flush=True)
        else:
            times = _timing.interleaved_us(calls, 20)
        rows.append(size | times)
        _timing.write("mingru", args.device, rows)


if __name__ == "__main__":
    main()
