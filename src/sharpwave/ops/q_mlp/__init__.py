"""A narrow Q network of two hidden layers, in one launch forward and two backward."""

from torch import Tensor

from sharpwave.ops import _backends
from sharpwave.ops._library import register

__all__ = ["WIDEST", "q_mlp"]

WIDEST = 128
"""Largest width of observations, of a hidden layer (of each stream) and of actions that the GPU's kernels take."""


def _forward(x, w1, b1, w2, b2, wa, ba, wv, bv, backend):
    impl = _backends.load("q_mlp", x.device, backend)
    return impl.q_mlp(x, w1, b1, w2, b2, wa, ba, wv, bv)


def _backward(dq, x, h1, h2, w2, wa, wv, backend):
    impl = _backends.load("q_mlp", x.device, backend)
    return impl.q_mlp_backward(dq.contiguous(), x, h1, h2, w2, wa, wv)


def _fake(x, w1, b1, w2, b2, wa, ba, wv, bv, backend):
    n = x.shape[0]
    return x.new_empty(n, wa.shape[0]), x.new_empty(n, w1.shape[0]), x.new_empty(n, w2.shape[0])


def _backward_fake(dq, x, h1, h2, w2, wa, wv, backend):
    shapes = [(h1.shape[1], x.shape[1]), (h1.shape[1],), w2.shape, (w2.shape[0],), wa.shape, (wa.shape[0],)]
    shapes += [(0,), (0,)] if wv is None else [wv.shape, (1,)]
    return tuple(x.new_empty(shape) for shape in shapes)


def _save(ctx, inputs, output):
    x, _, _, w2, _, wa, _, wv, _, backend = inputs
    _, h1, h2 = output
    ctx.save_for_backward(x, h1, h2, w2, wa, wv)
    ctx.backend = backend
    ctx.mark_non_differentiable(h1, h2)


def _autograd(ctx, dq, *_grads):
    x, h1, h2, w2, wa, wv = ctx.saved_tensors
    grads = _backward_op(dq, x, h1, h2, w2, wa, wv, ctx.backend)
    return None, *grads[:6], *(grads[6:] if wv is not None else (None, None)), None


_op = register(
    "q_mlp(Tensor x, Tensor w1, Tensor b1, Tensor w2, Tensor b2, Tensor wa, Tensor ba, Tensor? wv, Tensor? bv, "
    "str backend) -> (Tensor, Tensor, Tensor)",
    _forward,
    _fake,
    _autograd,
    _save,
)
_backward_op = register(
    "q_mlp_backward(Tensor dq, Tensor x, Tensor h1, Tensor h2, Tensor w2, Tensor wa, Tensor? wv, str backend) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)


def q_mlp(
    x: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    wa: Tensor,
    ba: Tensor,
    wv: Tensor | None = None,
    bv: Tensor | None = None,
    *,
    backend: _backends.Backend = "auto",
) -> Tensor:
    """Values of actions, with a value stream where `wv` is given.

        h1 = relu(w1 x + b1);   h2 = relu(w2 h1 + b2)
        Q  = wa h2 + ba
        or, h2 being (hv, ha) side by side:   A = wa ha + ba,  V = wv hv + bv,  Q = V + A - mean_a A

    Args:
        x: (n, D) float32; no gradient flows to it.
        w1, b1: (H, D), (H,). w2, b2: (H', H), (H',); with a value stream H' is 2 K, else K.
        wa, ba: (A, K), (A,). wv, bv: (1, K), (1,), or both None.
        backend: "triton" wants D, H, K and A of at most WIDEST.

    Returns:
        (n, A) float32, differentiable with respect to weights and biases. Products on a GPU are sums of three
        tensor-core products of the operands' parts, within float32's rounding. Deterministic.

    Raises:
        ValueError: shapes do not fit, or are too wide for the backend.

    Source: Wang et al. 2016 (arXiv 1511.06581), eq. 9.
    """
    k = wa.shape[1]
    if (wv is None) != (bv is None):
        raise ValueError("wv and bv must both be given, or neither")
    wide = k if wv is None else 2 * k
    wanted = {"w1": (w1.shape[0], x.shape[1]), "b1": (w1.shape[0],), "w2": (wide, w1.shape[0]), "b2": (wide,)}
    wanted["ba"] = (wa.shape[0],)
    if wv is not None:
        wanted |= {"wv": (1, k), "bv": (1,)}
    given = {"w1": w1, "b1": b1, "w2": w2, "b2": b2, "ba": ba, "wv": wv, "bv": bv}
    for name, shape in wanted.items():
        tensor = given[name]
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} must be {shape} beside the other weights; got {tuple(tensor.shape)}")
    chosen = _backends.choose("q_mlp", x.device.type, backend)
    widest = max(x.shape[1], w1.shape[0], k, wa.shape[0])
    if chosen == "triton" and widest > WIDEST:
        raise ValueError(f"backend='triton' takes widths of at most {WIDEST}; got {widest}: use backend='reference'")
    return _op(x, w1, b1, w2, b2, wa, ba, wv, bv, backend)[0]
