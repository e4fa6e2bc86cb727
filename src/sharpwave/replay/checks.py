"""What a buffer's arguments must be, and the errors that say so."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sharpwave.replay.nest import as_tensor, flatten
from sharpwave.replay.storage import FIXED_DTYPES, Field, check_directory

WeightNorm = Literal["batch", "buffer"]
MaxPriorityOver = Literal["all_time", "buffer"]
Beta = float | tuple[float, float, int]


def storage_place(storage: Any, device: torch.device) -> torch.device | str | os.PathLike:
    if storage is None:
        return device
    if isinstance(storage, os.PathLike):
        check_directory(Path(storage))
        return storage
    if isinstance(storage, torch.device) or storage == "pinned":
        return storage
    if isinstance(storage, str) and (storage in ("cpu", "mps", "xpu") or storage.startswith("cuda")):
        return torch.device(storage)
    raise ValueError(
        f"storage must be None (with the priorities), a device, 'pinned', or a pathlib.Path for files; got {storage!r}"
    )


def declared(fields: Mapping[str, Any]) -> dict[str, Field]:
    if not isinstance(fields, Mapping) or not fields:
        raise ValueError(f"fields must be {{name: (shape of one item, torch dtype), ...}} or None; got {fields!r}")
    out = {}
    for path, spec in flatten(fields).items():
        try:
            shape, dtype = (spec.shape, spec.dtype) if isinstance(spec, Field) else spec
            field = Field(tuple(int(x) for x in shape), dtype)
            if not isinstance(dtype, torch.dtype):
                raise TypeError(dtype)
        except (TypeError, ValueError):
            raise ValueError(f"fields[{path!r}] must be (shape of one item, torch dtype); got {spec!r}") from None
        want = FIXED_DTYPES.get(path, dtype)
        if path in FIXED_DTYPES and (dtype != want or field.shape):
            raise ValueError(f"field {path!r} is always one {want} an item: declare ((), {want}), not {spec!r}")
        out[path] = field
    return out


def check_declared_steps(fields: Mapping[str, Field]) -> None:
    """Raise unless steps in time order can be kept in these fields."""
    parts = {path.split(".")[0] for path in fields}
    missing = {"obs", "reward", "terminated", "truncated"} - parts
    if missing or "next_obs" in parts:
        raise ValueError(
            f"with num_envs, fields must hold obs, reward, terminated and truncated (missing: {sorted(missing)}), and "
            f"not next_obs, which is found among the observations; got {sorted(fields)}"
        )


def check_tensors(state: Mapping[str, Any], wanted: Mapping[str, tuple[Tensor, float]]) -> None:
    """Raise unless a saved state's tensors are like the given ones, with values from 0 to the given largest."""
    for name, (like, largest) in wanted.items():
        x = state[name]
        if not isinstance(x, Tensor) or x.shape != like.shape or x.dtype != like.dtype:
            raise ValueError(f"state's {name!r} must be {tuple(like.shape)} {like.dtype}: it is damaged")
        good = (x >= 0) & (x <= largest)
        if not good.all():
            raise ValueError(f"state's {name!r} must be in [0, {largest:.9g}]; got {x[~good][0].item()}: it is damaged")


def check_kinds(state: Mapping[str, Any], kinds: Mapping[str, type | tuple[type, ...]]) -> None:
    """Raise unless a saved state's entries are there, and of these kinds."""
    for name, kind in kinds.items():
        if not isinstance(state.get(name), kind) or isinstance(state[name], bool):
            want = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise ValueError(f"state's {name!r} must be of type {want}; got {state.get(name)!r:.60}: it is damaged")


def beta_numbers(beta: Beta) -> tuple[float, float, float]:
    numbers = tuple(beta) if isinstance(beta, (tuple, list)) else (beta, beta, 0)
    try:
        first, last, draws = map(float, numbers)
        usable = 0 <= first < float("inf") and 0 <= last < float("inf") and draws >= 0
    except (TypeError, ValueError):
        usable = False
    if not usable:
        raise ValueError(f"beta must be a number >= 0, or (first, last, items drawn in between); got {beta!r}")
    return first, last, draws


def draw_beta(beta: Any, device: torch.device) -> float | Tensor | None:
    """The beta of one draw; a tensor's value is looked at on a CPU alone, where that waits for nothing."""
    if beta is None:
        return None
    if not isinstance(beta, Tensor):
        return beta_numbers(beta)[0]
    if beta.numel() != 1 or not beta.dtype.is_floating_point or beta.device != device:
        raise ValueError(
            f"beta must be a number, or a float32 tensor of one element on {device}; got {tuple(beta.shape)} "
            f"{beta.dtype} on {beta.device}"
        )
    if beta.is_cpu and not 0 <= beta.item() < float("inf"):
        raise ValueError(f"beta must be a number >= 0; got {beta.item()}")
    return beta.detach()


def check_step_fields(flat: Mapping[str, Any]) -> None:
    obs = {k for k in flat if k == "obs" or k.startswith("obs.")}
    following = {k for k in flat if k == "next_obs" or k.startswith("next_obs.")}
    missing = {"reward", "terminated", "truncated"} - flat.keys()
    if missing or not obs or {f"next_{k}" for k in obs} != following:
        raise KeyError(
            "with num_envs, add() must get obs, next_obs (of the same fields), reward, terminated and truncated; got "
            f"{sorted(flat)}"
        )


def check_valid(valid: Any, flat: Mapping[str, Any], envs: int) -> Tensor | None:
    if valid is None:
        return None
    valid = as_tensor(valid, "valid")
    want = tuple(np.shape(flat["reward"])) if "reward" in flat else (envs,)
    if valid.dtype != torch.bool or tuple(valid.shape) != want:
        raise ValueError(f"valid must be {want} bool, as reward; got {tuple(valid.shape)} {valid.dtype}")
    return valid


def check_update(indices: Tensor, td_error: Tensor, generation: Tensor | None) -> None:
    if indices.ndim != 1 or td_error.shape != indices.shape:
        raise ValueError(
            f"indices and td_error must both be (n,); got {tuple(indices.shape)} and {tuple(td_error.shape)}"
        )
    if indices.dtype != torch.int64:
        raise TypeError(f"indices must be int64; got {indices.dtype}: pass batch.indices as it is")
    if not td_error.dtype.is_floating_point:
        raise TypeError(f"td_error must be floating; got {td_error.dtype}")
    if generation is not None and (generation.shape != indices.shape or generation.dtype != torch.int64):
        raise ValueError(
            f"generation must be {tuple(indices.shape)} int64, as batch.generations; got {tuple(generation.shape)} "
            f"{generation.dtype}"
        )
