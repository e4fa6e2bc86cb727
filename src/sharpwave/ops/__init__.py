"""Pure functions on tensors: the scans, trees and losses everything else is made of.

Each op takes `backend`: "auto" runs the fastest kernel there is for the tensors' device (Numba on a CPU, Triton on a
GPU, plain PyTorch where there is neither), "reference" the plain PyTorch that defines it, "cpu" and "triton" the kernel
named, or an error where that cannot serve. `sharpwave info` lists what "auto" takes on this machine.
"""

from sharpwave._lazy import submodules

__getattr__, __dir__ = submodules(__name__, __path__)
