"""Registration of ops with torch.library, so that torch.compile, export, autograd and opcheck know them."""

import functools
from collections.abc import Callable

import torch
from torch.autograd import forward_ad

LIBRARY = torch.library.Library("sharpwave", "FRAGMENT")


def register(
    schema: str,
    kernel: Callable,
    fake: Callable,
    backward: Callable | None = None,
    setup_context: Callable | None = None,
) -> Callable:
    """Register one op in the `sharpwave` namespace and return it.

    Args:
        schema: e.g. `"build_cdf(Tensor weights, *, str backend='auto') -> Tensor"`; declares mutated arguments.
        kernel: runs on real tensors of any device; picks its backend by `_backends.load`.
        fake: returns empty tensors of the right shape, dtype and device.
        backward, setup_context: as `torch.library.register_autograd` takes them; see `first_order`. Without it a
            functional op raises where its gradient is asked for; without either, autograd would pass zeros on.
            Forward-mode derivatives raise too, of every op, for the same reason.
    """
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema)
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sharpwave::{name}", fake, lib=LIBRARY)
    if backward is None and "!" not in schema:
        backward = _no_gradient(name)
    if backward is not None:
        backward = first_order(f"sharpwave::{name}", backward)
        torch.library.register_autograd(f"sharpwave::{name}", backward, setup_context=setup_context, lib=LIBRARY)
    op = getattr(torch.ops.sharpwave, name).default

    def call(*args, **kwargs):
        if forward_ad._current_level >= 0:
            _refuse_tangents(name, (*args, *kwargs.values()))
        return op(*args, **kwargs)

    return call


def first_order(name: str, backward: Callable) -> Callable:
    """`backward` of the op called `name`, which raises where its own result is to be differentiated.

    `torch.autograd.function.once_differentiable` lets a graph through whose incoming gradient is a constant, as that of
    a sum is: the result depends on the inputs all the same, and would be taken for a constant.
    """

    @functools.wraps(backward)
    def checked(ctx, *grads):
        # A compiler may trace a backward pass in either mode, and refuses second derivatives by itself.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{name} has first-order gradients only: leave create_graph=True out, or write it in PyTorch's own "
                "operations"
            )
        return backward(ctx, *grads)

    return checked


def _refuse_tangents(name: str, args: tuple) -> None:
    for x in args:
        if isinstance(x, torch.Tensor) and x.is_floating_point() and forward_ad.unpack_dual(x).tangent is not None:
            raise RuntimeError(
                f"sharpwave::{name} has no forward-mode derivative (torch.func.jvp, jacfwd, forward_ad): take "
                "torch.autograd.grad, or write it in PyTorch's own operations"
            )


def _no_gradient(name: str) -> Callable:
    def backward(_ctx, *_grads):
        raise RuntimeError(
            f"sharpwave::{name} has no gradient: detach() its inputs, or write it in PyTorch's own operations"
        )

    return backward
