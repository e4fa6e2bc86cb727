"""Between environments that step on the host and a trainer's device."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 256  # bytes between the starts of two arrays, a multiple of every GPU's memory transactions


class Transfer:
    """Host arrays as tensors of a device, and a device's tensors as host arrays.

    To a CUDA device all arrays of one call travel as one asynchronous copy from page-locked memory, so that the host
    goes on at once. Two buffers are filled by turns: the host only waits where the copy before the last has not ended.
    To a CPU nothing is copied.

    Args:
        device: the trainer's.
        packed: whether arrays go through buffers; by default on every device but a CPU.
    """

    def __init__(self, device: torch.device, packed: bool | None = None):
        self.device = device
        self._packed = device.type != "cpu" if packed is None else packed
        self._buffers: Iterator[_Buffer] = itertools.cycle([_Buffer(device), _Buffer(device)])
        self._back = _Buffer(device)

    def to_device(self, *arrays: np.ndarray | None) -> list[Any]:
        """A tensor for each array and None for None; the same one where an array is given twice.

        On a CPU a tensor shares the array's memory; elsewhere the array may be written again after the call.
        """
        distinct = list({id(array): array for array in arrays if array is not None}.values())
        if self._packed:
            tensors = next(self._buffers).send(distinct)
        else:
            tensors = [torch.from_numpy(array) for array in distinct]
        found = {id(array): tensor for array, tensor in zip(distinct, tensors, strict=True)}
        return [None if array is None else found[id(array)] for array in arrays]

    def fetch(self, tensor: Tensor) -> Callable[[], np.ndarray]:
        """Begin to bring a tensor to the host. What is returned waits for the work that makes it, and has its values.

        One tensor at a time, and none is written before it was waited for.
        """
        if self._packed and tensor.device.type == "cuda":
            return self._back.receive(tensor)
        return partial(tensor.numpy, force=True)


class _Buffer:
    """Host memory that grows as needed, page-locked for a CUDA device, and the end of the copy that last used it."""

    def __init__(self, device: torch.device):
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    def send(self, arrays: list[np.ndarray]) -> list[Tensor]:
        starts = [0, *itertools.accumulate(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)]
        room = self._reserve(starts[-1])
        host = room.numpy()
        for start, array in zip(starts, arrays, strict=False):
            np.copyto(host[start : start + array.nbytes].view(array.dtype).reshape(array.shape), array)
        there = room.to(self._device, non_blocking=True, copy=True)
        self._note()
        return [
            there[start : start + array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
            for start, array in zip(starts, arrays, strict=False)
        ]

    def receive(self, tensor: Tensor) -> Callable[[], np.ndarray]:
        room = self._reserve(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        room.copy_(tensor, non_blocking=True)
        self._note()

        def values() -> np.ndarray:
            self._wait()
            return room.numpy().copy()  # environments may keep an action, and the buffer is used again

        return values

    def _reserve(self, size: int) -> Tensor:
        self._wait()
        if self._memory.numel() < size:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._is_cuda)
        return self._memory[:size]

    def _note(self) -> None:
        if self._is_cuda:
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(self._device))

    def _wait(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
