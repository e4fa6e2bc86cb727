"""What travels between environments on the host and a device arrives whole, and nothing is overwritten on the way."""

import numpy as np
import pytest
import torch

from sharpwave import envs
from sharpwave.envs._transfer import Transfer

ARRAYS = [
    lambda rng: rng.integers(0, 256, (3, 5, 7), dtype=np.uint8),
    lambda rng: rng.random((3,), dtype=np.float32),
    lambda rng: rng.random((3, 2)),
    lambda rng: rng.random((3, 4)) < 0.5,
    lambda rng: rng.integers(-5, 5, (3, 0), dtype=np.int64),
    lambda rng: rng.random((4, 3), dtype=np.float32).T,
    lambda rng: rng.integers(-5, 5, (3,), dtype=np.int64),
]


def places():
    return [("cpu", None), ("cpu", True), pytest.param("cuda", None, marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device, packed", places())
def test_arrays_arrive_and_stay(device, packed):
    rng = np.random.default_rng(0)
    transfer = Transfer(torch.device(device), packed)
    sent, arrived = [], []
    for turn in range(6):  # buffers are used again, grow and shrink
        arrays = [make(rng) for make in ARRAYS[: 2 + turn] + ARRAYS[:turn]]
        sent += [array.copy() for array in arrays]
        arrived += transfer.to_device(*arrays)
        if device != "cpu" or packed:
            for array in arrays:
                array[...] = 0
    for array, tensor in zip(sent, arrived, strict=True):
        assert tensor.device.type == device
        assert tensor.dtype == torch.from_numpy(array[:0]).dtype
        np.testing.assert_array_equal(tensor.cpu().numpy(), array)


@pytest.mark.parametrize("device, packed", places())
def test_none_and_what_is_given_twice(device, packed):
    transfer = Transfer(torch.device(device), packed)
    a, b = np.arange(3), np.arange(3)
    first, none, second, again = transfer.to_device(a, None, b, a)
    assert none is None and again is first and second is not first
    assert first.tolist() == second.tolist() == [0, 1, 2]


@pytest.mark.parametrize("device, packed", places())
def test_fetch(device, packed):
    transfer = Transfer(torch.device(device), packed)
    tensors = [torch.arange(6, device=device).view(2, 3), torch.full((40, 2), 0.5, device=device)]
    found = [transfer.fetch(tensor)() for tensor in tensors]
    for array, tensor in zip(found, tensors, strict=True):
        np.testing.assert_array_equal(array, tensor.cpu().numpy())


def test_on_a_cpu_nothing_is_copied():
    array = np.zeros(3)
    (tensor,) = Transfer(torch.device("cpu")).to_device(array)
    assert tensor.data_ptr() == array.ctypes.data


@pytest.mark.gpu
def test_on_a_gpu_no_copy_is_pageable():
    env = envs.make("Acrobot-v1", 8, "cuda", max_episode_steps=5)
    env.reset(0)
    action = torch.zeros(8, dtype=torch.int64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            step = env.step(action)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.obs.is_cuda and step.reward.tolist() == [-1.0] * 8
