"""Words through which the tiles of one look-back launch talk to each other, kept between launches and never cleared.

A launch leaves each of its words tagged with its epoch and the next launch takes the next epoch, so stale words show
by their tag. That holds as long as every launch on a slab writes all of it, so a slab serves one size class, and as
long as no two launches on it run at once, so a slab belongs to one stream, or to one captured call.
"""

import torch
from torch import Tensor

# Zeroed words set aside at a device's first eager call for calls captured later: a slab zeroed inside a capture would
# be zeroed again, by one more graph node, at each replay.
_RESERVE = 1 << 17

_slabs: dict[tuple[torch.device, int, int], Tensor] = {}
_reserves: dict[torch.device, Tensor] = {}


def slab(size: int, device: torch.device) -> Tensor:
    """int64 words, `size` of them, zero before their first launch."""
    if device.type != "cuda":
        return _slabs.setdefault((device, 0, size), torch.zeros(size, dtype=torch.int64, device=device))
    if torch.cuda.is_current_stream_capturing():
        reserve = _reserves.get(device)
        if reserve is None or reserve.numel() < size:
            return torch.zeros(size, dtype=torch.int64, device=device)
        _reserves[device] = reserve[size:]
        return reserve[:size]
    if device not in _reserves:
        _reserves[device] = torch.zeros(_RESERVE, dtype=torch.int64, device=device)
        # Once a process and device: a capture on another stream must find the reserve zeroed.
        torch.cuda.current_stream(device).synchronize()
    key = (device, torch.cuda.current_stream(device).cuda_stream, size)
    if key not in _slabs:
        _slabs[key] = torch.zeros(size, dtype=torch.int64, device=device)
    return _slabs[key]
