"""DQN's update as users of torchrl write it, on its prioritized buffer: `python -m benchmarks.dqn_torchrl`.

Network, batch, loss and optimizer are those of `sharpwave bench dqn`, in PyTorch's own layers: Double DQN with dueling
heads, bfloat16 autocast for convolutions, a clipped gradient, fused Adam. Transitions lie in a storage on the device;
the segment tree is where torchrl's wheel on PyPI has it, on the host.
"""

import argparse
import copy
import inspect
import json
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ACTIONS = 18


class Dueling(nn.Module):
    """Nature's convolutions on stacks of four frames, or a hidden layer of 128; then two streams."""

    def __init__(self, images: bool):
        super().__init__()
        self.images, hidden = images, 512 if images else 128
        features = 3136 if images else 128
        convolutions = (nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1))
        trunk = convolutions if images else (nn.Linear(4, 128),)
        self.trunk = nn.Sequential(*trunk, nn.ReLU(), nn.Flatten())
        self.advantage = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, ACTIONS))
        self.value = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.images:
            x = x.to(torch.bfloat16 if torch.is_autocast_enabled(x.device.type) else torch.float32) / 255
        x = self.trunk(x)
        a = self.advantage(x).float()
        return a + (self.value(x).float() - a.mean(1, keepdim=True))


def measure(images: bool, capacity: int, batch: int, device: str, updates: int, repeats: int, compiled: bool) -> dict:
    """Microseconds of an update: the median of `repeats` runs of `updates`."""
    import torchrl
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer

    # Its wheels on PyPI have the tree for CPUs alone; newer ones must be told so where storage is a GPU's.
    tree = {"device": "cpu"} if "device" in inspect.signature(PrioritizedSampler).parameters else {}
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity, device=device),
        sampler=PrioritizedSampler(capacity, alpha=0.6, beta=0.4, **tree),
        batch_size=batch,
        priority_key="td_error",
    )
    shape = (4, 84, 84) if images else (4,)
    for start in range(0, capacity, 50_000):
        n = min(50_000, capacity - start)
        rows = {
            name: torch.randint(0, 255, (n, *shape), dtype=torch.uint8, device=device) for name in ("obs", "next_obs")
        }
        if not images:
            rows = {name: x.float() for name, x in rows.items()}
        rows["action"] = torch.randint(ACTIONS, (n,), device=device)
        rows["reward"] = torch.rand(n, device=device)
        rows["discount"] = torch.full((n,), 0.99, device=device)
        buffer.extend(TensorDict(rows, [n], device=device))
    buffer.update_priority(torch.arange(capacity), torch.rand(capacity))

    net = Dueling(images).to(device)
    target = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-4, fused=device == "cuda")

    def loss_of(obs, next_obs, action, reward, discount, weight):
        with torch.autocast(device, torch.bfloat16, enabled=images and device == "cuda"):
            with torch.no_grad():
                best = net(next_obs).argmax(1, keepdim=True)
                following = target(next_obs).gather(1, best)[:, 0]
            q = net(obs).gather(1, action[:, None])[:, 0]
        td_error = reward + discount * following - q
        loss = (weight * F.smooth_l1_loss(q, reward + discount * following, reduction="none")).mean()
        return loss, td_error.detach()

    if compiled:
        loss_of = torch.compile(loss_of)

    def step() -> None:
        drawn = buffer.sample()
        weight = drawn[next(name for name in ("priority_weight", "_weight") if name in drawn)].to(device)
        loss, td_error = loss_of(*(drawn[k] for k in ("obs", "next_obs", "action", "reward", "discount")), weight)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        optimizer.step()
        drawn["td_error"] = td_error.abs()
        buffer.update_tensordict_priority(drawn)

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(5):
        step()
    times = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        for _ in range(updates):
            step()
        wait()
        times.append((time.perf_counter() - start) / updates * 1e6)
    tree = type(buffer._sampler._sum_tree).__name__
    return {
        "network": "nature" if images else "mlp", "compiled": compiled, "capacity": capacity, "batch": batch,
        "update_us": statistics.median(times), "least_us": min(times), "tree": tree, "torchrl": torchrl.__version__,
    }  # fmt: skip


def main() -> None:
    """Print a line of JSON for each network."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--image-capacity", type=int, default=200_000, help="stacks are kept whole: 56 KB a transition")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--network", nargs="+", default=["mlp", "nature"], choices=["mlp", "nature"])
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for network in args.network:
        images = network == "nature"
        capacity = args.image_capacity if images else args.capacity
        sizes = (args.batch, device, args.updates, args.repeats, args.compile)
        print(json.dumps(measure(images, capacity, *sizes)), flush=True)


if __name__ == "__main__":
    main()
