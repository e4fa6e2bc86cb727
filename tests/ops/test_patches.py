"""patches: by hand, against PyTorch's unfold, and what does not fit."""

import pytest
import torch
from torch.nn import functional as F

from sharpwave.ops.patches import patches
from tests.conftest import backends


@backends("reference", "triton")
class TestPatches:
    def test_by_hand(self, backend, device):
        x = torch.arange(8, dtype=torch.uint8, device=device).view(1, 1, 2, 4)  # 0 1 2 3 / 4 5 6 7
        y = patches(x, 2, torch.float32, backend=backend)
        assert y.shape == (1, 4, 1, 2)
        assert y[0, :, 0, 0].tolist() == [0, 1, 4, 5] and y[0, :, 0, 1].tolist() == [2, 3, 6, 7]

    @pytest.mark.parametrize(
        "shape, size", [((2, 4, 84, 84), 4), ((3, 1, 6, 9), 3), ((1, 3, 5, 7), 1), ((0, 1, 4, 4), 2)]
    )
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_is_unfold(self, backend, device, shape, size, dtype):
        x = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        y = patches(x.to(device), size, dtype, backend=backend)
        assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)
        want = torch.empty(0) if not len(x) else F.unfold(x.float(), size, stride=size)
        assert torch.equal(y.float().cpu(), want.view(y.shape))

    def test_strided_and_bool(self, backend, device):
        x = torch.randn(2, 4, 8, 8, device=device)
        for y in (x, x > 0):
            got = patches(y[:, ::2], 4, torch.float32, backend=backend)
            assert torch.equal(got, patches(y[:, ::2].clone(), 4, torch.float32, backend="reference"))


def test_registration_and_errors():
    x = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    torch.library.opcheck(torch.ops.sharpwave.patches.default, (x, 2, torch.bfloat16, "reference"))
    with pytest.raises(ValueError, match=r"multiples of size 3; got \(2, 1, 4, 4\)"):
        patches(x, 3, torch.float32)
