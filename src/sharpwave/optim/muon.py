"""Muon: momentum whose matrix updates are orthogonalised by Newton-Schulz steps.

torch.optim.Muon (2.9 to 2.13) repeats one coefficient triple, takes matrices one by one, reads its learning rate on the
host and takes no vectors, so it cannot be captured with a schedule; hence this one.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

# (a, b, c) of each step: x -> a x + b x^3 + c x^5 on singular values. All five map [1e-2, 1] into [0.978, 1.032].
NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Nearest semi-orthogonal matrix, approximately: singular values are driven to about 1.

        X_0 = M / max(|M|_F, 1e-7);   X_{i+1} = a_i X_i + b_i (X_i X_i^T) X_i + c_i (X_i X_i^T)^2 X_i

    Args:
        matrix: (..., rows, cols), any floating dtype; batches are orthogonalised matrix by matrix, in one set of GEMMs.

    Returns:
        Like `matrix`. Singular values of at least 1e-2 |M|_F end in [0.978, 1.032] (float32; bf16 adds about 1e-2).
        A zero matrix stays zero. NaN in a matrix gives NaN in that matrix.

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
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32).clamp(min=1e-7)
    x = (x / norm).to(matrix.dtype)
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return (x.mT if tall else x).reshape(matrix.shape)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with orthogonalised matrix updates; vectors take the plain momentum step.

        m <- mu m + g;   u = g + mu m
        two dimensions:  w <- w - lr sqrt(max(1, rows / cols)) orthogonalize(u)
        otherwise:       w <- w - lr u

    Matrices of one shape are orthogonalised in one batch.

    Args:
        params: parameters, or groups as torch.optim takes them; float32 (masters of a lower-precision copy, if any).
        lr: learning rate > 0; a 0-d tensor on the parameters' device lets a captured graph follow a schedule.
        momentum: mu, in [0, 1).
        dtype: of the Newton-Schulz steps; None is bf16 on CUDA and float32 elsewhere. Momentum is float32 always.
        vectors: parameters to take the plain step although they have two dimensions (a log-std, an embedding row).

    Raises:
        ValueError: a value out of range.

    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers".
    """

    def __init__(
        self,
        params: Iterable,
        lr: float | Tensor = 0.015,
        momentum: float = 0.95,
        dtype: torch.dtype | None = None,
        vectors: Iterable[Tensor] = (),
    ):
        if not torch.is_tensor(lr) and not lr > 0:
            raise ValueError(f"lr must be > 0; got {lr}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1); got {momentum}")
        super().__init__(params, dict(lr=lr, momentum=momentum))
        self._dtype = dtype
        self._vectors = {id(p) for p in vectors}
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum"] = torch.zeros_like(p, dtype=torch.float32)

    @torch.no_grad()
    def step(self, closure=None, *, keep: Tensor | None = None):
        """One step; none, without a host wait, where the 0-d bool tensor `keep` is false."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            momenta: list[Tensor] = [self.state[p]["momentum"] for p in params]
            grads = [p.grad.float() for p in params]
            if keep is not None:
                new = torch._foreach_mul(momenta, group["momentum"])
                torch._foreach_add_(new, grads)
                new = [torch.where(keep, n, m) for n, m in zip(new, momenta, strict=True)]
                torch._foreach_copy_(momenta, new)
            else:
                torch._foreach_mul_(momenta, group["momentum"])
                torch._foreach_add_(momenta, grads)
            updates = list(torch._foreach_mul(momenta, group["momentum"]))
            torch._foreach_add_(updates, grads)
            directions = self._directions(params, updates)
            torch._foreach_mul_(directions, group["lr"])
            if keep is not None:
                directions = [torch.where(keep, d, 0) for d in directions]
            torch._foreach_sub_(params, directions)
        return loss

    def _directions(self, params: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
        """The step of each parameter at learning rate 1."""
        batches: dict[torch.Size, list[int]] = defaultdict(list)
        directions = list(updates)
        for i, p in enumerate(params):
            if p.ndim == 2 and id(p) not in self._vectors:
                batches[p.shape].append(i)
        for shape, members in batches.items():
            batch = torch.stack([updates[i] for i in members])
            dtype = self._dtype or (torch.bfloat16 if batch.is_cuda else torch.float32)
            scale = max(1.0, shape[0] / shape[1]) ** 0.5
            batch = orthogonalize(batch.to(dtype)).float() * scale
            for i, direction in zip(members, batch.unbind(), strict=True):
                directions[i] = direction
        return directions
