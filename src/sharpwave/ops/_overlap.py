"""Launches set up while the kernel before them still runs: programmatic dependent launch, from compute capability 9 on.

A kernel that is to be launched so takes OVERLAP and begins with `after_previous`; its launch passes `overlap(device)`.
In a captured graph of short kernels that depend on each other it saves half a microsecond a kernel.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def after_previous(OVERLAP: tl.constexpr):
    """Wait until what was launched before is done, all its writes included; then let the next launch be set up.

    It comes before any access to memory. In this order, whoever is set up early finds everything finished but the one
    kernel that it then waits for.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def overlap(device: torch.device) -> dict[str, bool]:
    """A launch's options, empty of everything but OVERLAP where a device cannot do it."""
    compiled = isinstance(after_previous, triton.JITFunction)  # not by Triton's interpreter
    nvidia = device.type == "cuda" and torch.version.cuda is not None
    able = compiled and nvidia and torch.cuda.get_device_capability(device)[0] >= 9
    return {"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False}
