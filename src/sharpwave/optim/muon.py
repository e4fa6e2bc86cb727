"""Muon: momentum whose matrix updates are orthogonalised by Newton-Schulz steps.

torch.optim.Muon (2.9 to 2.13) repeats one coefficient triple, takes matrices one by one, reads its learning rate on the
host and takes no vectors, so it cannot be captured with a schedule; hence this one.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from sharpwave.ops._backends import installed, triton_interpreted
from sharpwave.optim._groups import add_param_group

# (a, b, c) of each step: x -> a x + b x^3 + c x^5 on singular values. All five map [1e-2, 1] into [0.978, 1.032].
NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonalize(matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Nearest semi-orthogonal matrix, approximately: singular values are driven to about 1.

        X_0 = M / max(|M|_F, 1e-7);   X_{i+1} = a_i X_i + b_i (X_i X_i^T) X_i + c_i (X_i X_i^T)^2 X_i

    Args:
        matrix: (..., rows, cols), any floating dtype; batches are orthogonalised matrix by matrix, in one set of GEMMs.
        dtype: of the steps and the result, `matrix`'s by default. X_0 is rounded to it once its length is 1, so that
            float16, an eighth of bfloat16's rounding errors, has range enough.

    Returns:
        Like `matrix`. Singular values of at least 1e-2 |M|_F end in [0.978, 1.032] (float32; float16 adds about 2e-3,
        bfloat16 1e-2), where |M|_F is at least 1e-7: below, X_0 is shorter than 1. A zero matrix stays zero. NaN in a
        matrix gives NaN in that matrix.

    Raises:
        ValueError: fewer than two dimensions.

    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers"; Higham 2008, "Functions of matrices", ch. 8.
    """
    if matrix.ndim < 2:
        raise ValueError(f"matrix must have at least two dimensions; got shape {tuple(matrix.shape)}")
    x = matrix.flatten(0, -3) if matrix.ndim > 3 else matrix
    x = x if x.ndim == 3 else x[None]
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    if x.is_cuda:
        # Rows and columns of zeros stay zero and change no singular value; other widths make GEMMs a few times slower.
        rows, columns = x.shape[-2:]
        x = F.pad(x, (0, -columns % 8, 0, -rows % 8))
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    # By a power of two near the largest entry first, which rounds nothing, so that no square is out of range.
    largest = x.abs().amax((-2, -1), keepdim=True)
    scale = torch.where(largest > 0, largest.log2().floor().exp2(), 1)
    x = x / scale
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = (x / torch.maximum(norm, 1e-7 / scale)).to(dtype or matrix.dtype)
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    x = x.mT if tall else x
    return x[..., : matrix.shape[-2], : matrix.shape[-1]].reshape(matrix.shape)


_OWN = ("_dtype", "_vectors", "_copies", "_backend", "grad_norm", "skipped", "first_bad")


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with orthogonalised matrix updates; vectors take the plain momentum step.

        g <- g min(1, max_grad_norm / (|g| + 1e-6)), |g| over all parameters
        m <- mu m + g;   u = g + mu m
        two dimensions:  w <- w - lr sqrt(max(1, rows / cols)) orthogonalize(u)
        otherwise:       w <- w - lr u

    Where |g| is not finite, nothing changes but `skipped`, which counts such steps: no host wait. Matrices of one shape
    are orthogonalised in one batch.

    Args:
        params: parameters, or groups as torch.optim takes them; float32 (masters of a lower-precision copy, if any).
        lr: learning rate > 0; a 0-d tensor on the parameters' device lets a captured graph follow a schedule.
        momentum: mu, in [0, 1).
        max_grad_norm: largest global norm of a group's gradient, > 0; infinity, the default, leaves it as it is.
        dtype: of the Newton-Schulz steps; None is float16 on CUDA and float32 elsewhere. Momentum is float32 always.
        vectors: parameters to take the plain step although they have two dimensions (a log-std, an embedding row).
        copies: of some parameters with two dimensions, a bf16 matrix of at least their rows and columns: each step ends
            with copy[:rows, :cols] = w rounded, so that a network computes without casting its weights.
        backend: "triton" is eighteen launches however many the parameters, float32 ones with float16 steps, or a single
            one on a Hopper GPU for a group with few matrices whose smaller sides are at most 256; "reference" is
            PyTorch on any device; "auto" takes the first on CUDA where it serves. They agree to rounding.

    Attributes:
        grad_norm: 0-d, |g| before clipping at the last step (of the last group).
        skipped: 0-d int64.
        first_bad: 0-d int64, the place of the first entry that was not finite at the last step skipped for it, in the
            group's gradients flattened one after the other; 0 where all are finite and |g|, in float32, is not.

    Raises:
        ValueError: a value out of range.

    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers".
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 0.015,
        momentum: float = 0.95,
        max_grad_norm: float = math.inf,
        dtype: torch.dtype | None = None,
        vectors: Iterable[Tensor] = (),
        copies: Mapping[Tensor, Tensor] | None = None,
        backend: Literal["auto", "reference", "triton"] = "auto",
    ):
        if backend not in ("auto", "reference", "triton"):
            raise ValueError(f"backend must be 'auto', 'reference' or 'triton'; got {backend!r}")
        super().__init__(params, dict(lr=lr, momentum=momentum, max_grad_norm=max_grad_norm))
        self._dtype = dtype
        self._vectors = set(vectors)
        for p, copy in (copies or {}).items():
            if p.ndim != 2 or copy.ndim != 2 or copy.shape[0] < p.shape[0] or copy.shape[1] < p.shape[1]:
                raise ValueError(
                    f"a copy must be a matrix of at least its parameter's rows and columns, {tuple(p.shape)}; got "
                    f"{tuple(copy.shape)}"
                )
        self._copies = dict(copies or {})
        self._backend = backend
        self._plans: dict[tuple[int, ...], Any] = {}
        device = next(p.device for group in self.param_groups for p in group["params"])
        self.grad_norm = torch.zeros((), device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.first_bad = torch.zeros((), dtype=torch.int64, device=device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim's. Raises ValueError for a setting out of range."""
        group = self.defaults | param_group
        lr = group["lr"]
        if not torch.is_tensor(lr) and not 0 < lr < math.inf:
            raise ValueError(f"lr must be > 0 and finite; got {lr}")
        if torch.is_tensor(lr) and lr.ndim:
            raise ValueError(f"lr must be a number or a 0-d tensor; got shape {tuple(lr.shape)}")
        if torch.is_tensor(lr) and lr.device.type == "cpu" and not 0 <= lr < math.inf:  # a schedule may begin at 0
            raise ValueError(f"lr must be >= 0 and finite; got {lr}")
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"momentum must be in [0, 1); got {group['momentum']}")
        if not group["max_grad_norm"] > 0:
            raise ValueError(f"max_grad_norm must be > 0; got {group['max_grad_norm']}")
        add_param_group(self, param_group)
        for p in self.param_groups[-1]["params"]:
            self.state[p]["momentum"] = torch.zeros_like(p, dtype=torch.float32)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy: torch.optim's leave out what a subclass adds. Plans are of these very parameters."""
        own = {name: vars(self)[name] for name in _OWN}
        return super().__getstate__() | own | {"_plans": {}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch.optim's, but momenta, which stay float32, and a learning rate that is a tensor stay where they are,
        so that a captured step goes on from them.

        Raises:
            ValueError: not of these groups and parameters. Nothing has changed then.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        momenta = [self.state[p]["momentum"] for p in params]
        rates = [group["lr"] for group in self.param_groups]
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        if len(saved) == len(params):  # else torch.optim says what is wrong
            for p, i in zip(params, saved, strict=True):
                given = state_dict["state"].get(i, {}).get("momentum")
                if given is None or given.shape != p.shape:
                    what = "none" if given is None else f"shape {tuple(given.shape)}"
                    raise ValueError(f"the momentum of parameter {i} must have its shape {tuple(p.shape)}; got {what}")
        super().load_state_dict(state_dict)
        for group, rate in zip(self.param_groups, rates, strict=True):
            if torch.is_tensor(rate):
                group["lr"] = rate.copy_(torch.as_tensor(group["lr"]))
        for p, momentum, i in zip(params, momenta, saved, strict=True):
            momentum.copy_(state_dict["state"][i]["momentum"])
            self.state[p]["momentum"] = momentum

    @torch.no_grad()
    def step(self, closure=None, *, keep: Tensor | None = None):
        """One step, or none (without a host wait) where `keep` forbids it; returns the closure's loss.

        `keep` is a 0-d tensor: a bool, or a number (the loss) that must be finite.
        """
        if keep is not None and not torch.is_tensor(keep):
            raise TypeError(f"keep must be a 0-d tensor; got {keep!r}")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            plan = self._plan(params)
            if plan is not None:
                lr = group["lr"]
                lr = lr if torch.is_tensor(lr) else torch.full((), lr, device=params[0].device)
                grads = [p.grad.float() for p in params]
                bounds = group["momentum"], group["max_grad_norm"]
                plan.step(grads, lr, *bounds, keep, self.grad_norm, self.skipped, self.first_bad)
            elif params:
                if keep is not None and keep.is_floating_point():
                    keep = keep.isfinite()
                self._step(group, params, keep)
                for p in params:
                    if p in self._copies:
                        self._copies[p][: p.shape[0], : p.shape[1]].copy_(p)
        return loss

    def _plan(self, params: list[Tensor]) -> Any:
        """The Triton kernels' tables for these parameters, or None where PyTorch takes the step."""
        if not params or self._backend == "reference" or (self._backend == "auto" and not params[0].is_cuda):
            return None
        if self._backend == "auto" and not installed("triton"):
            return None
        if not params[0].is_cuda and not triton_interpreted():
            raise ValueError("backend='triton' takes parameters on a CUDA device: use 'auto'")
        from sharpwave.optim import _muon_triton, _muon_whole_triton

        if not _muon_triton.usable(params, self._dtype or torch.float16):
            if self._backend == "triton":
                raise TypeError("backend='triton' takes contiguous float32 parameters and float16 steps: use 'auto'")
            return None
        key = tuple(id(p) for p in params)
        plan = self._plans.get(key)
        if plan is None or not plan.fits(params, [self.state[p]["momentum"] for p in params]):
            matrices = [self._orthogonal(p) for p in params]
            kernels = _muon_whole_triton if _muon_whole_triton.serves(params, matrices) else _muon_triton
            plan = self._plans[key] = kernels.Plan(
                params,
                [self.state[p]["momentum"] for p in params],
                matrices,
                [self._copies.get(p) for p in params],
                NEWTON_SCHULZ,
            )
        return plan

    def _orthogonal(self, p: Tensor) -> bool:
        return p.ndim == 2 and p not in self._vectors

    def _step(self, group: dict[str, Any], params: list[Tensor], keep: Tensor | None) -> None:
        """One flat vector for what is done entry by entry: a network has many small tensors, and each launch costs."""
        momenta: list[Tensor] = [self.state[p]["momentum"] for p in params]
        sizes = [p.numel() for p in params]
        mu = group["momentum"]
        g = torch.cat([p.grad.reshape(-1).float() for p in params if p.grad is not None])
        norm = torch.linalg.vector_norm(g)
        self.grad_norm.copy_(norm)
        finite = norm.isfinite()
        keep = finite if keep is None else finite & keep
        self.skipped += ~keep
        bad = g.isfinite().logical_not_().view(torch.uint8).argmax()
        self.first_bad.copy_(torch.where(finite, self.first_bad, bad))
        if math.isfinite(group["max_grad_norm"]):
            g *= (group["max_grad_norm"] / (norm + 1e-6)).clamp(max=1)
        old = torch.cat([m.reshape(-1) for m in momenta])
        new = torch.add(g, old, alpha=mu)
        update = torch.add(g, new, alpha=mu)
        torch._foreach_copy_(momenta, _shaped(torch.where(keep, new, old), sizes, params))

        directions = self._directions(params, _shaped(update, sizes, params))
        step = torch.cat([d.reshape(-1) for d in directions])
        step = torch.where(keep, step * group["lr"], 0)
        torch._foreach_sub_(params, _shaped(step, sizes, params))

    def _directions(self, params: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
        """The step of each parameter at learning rate 1."""
        batches: dict[torch.Size, list[int]] = defaultdict(list)
        directions = list(updates)
        for i, p in enumerate(params):
            if self._orthogonal(p):
                batches[p.shape].append(i)
        for shape, members in batches.items():
            batch = torch.stack([updates[i] for i in members])
            dtype = self._dtype or (torch.float16 if batch.is_cuda else torch.float32)
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            batch = orthogonalize(batch, dtype).float() * scale
            for i, direction in zip(members, batch.unbind(), strict=True):
                directions[i] = direction
        return directions


def _shaped(flat: Tensor, sizes: list[int], like: list[Tensor]) -> list[Tensor]:
    """Views of `flat` in the shapes of `like`."""
    return [x.view(t.shape) for x, t in zip(flat.split(sizes), like, strict=True)]
