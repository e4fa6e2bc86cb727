"""Replay buffers beside each other: python -m benchmarks.replay [--sizes 1000000 10000000]

CPU, one thread, transitions of CartPole's shape, batches of 256 with data and weights, additions of 1024. Peers that
are installed (cpprb, tianshou, torchrl) are columns of the same run, their rounds interleaved with ours. On a GPU
(--device cuda): 84x84 observations, against torch.index_select of the observations, and of every field of the batch, as
replays of a captured graph.
Writes benchmarks/results/replay-DEVICE.json.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator

import numpy as np
import torch

from benchmarks._timing import captured, graph_us, interleaved_us, write
from sharpwave import PrioritizedReplay

BATCH, ADD = 256, 1024
ALPHA, BETA = 0.6, 0.4
Calls = dict[str, Callable[[], object]]


def transitions(n: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return dict(
        obs=rng.standard_normal((n, 4), np.float32),
        action=rng.integers(0, 2, n),
        reward=np.ones(n, np.float32),
        next_obs=rng.standard_normal((n, 4), np.float32),
        terminated=rng.random(n) < 0.01,
        truncated=np.zeros(n, bool),
    )


def td_errors(n: int, seed: int = 1) -> np.ndarray:
    return np.abs(np.random.default_rng(seed).standard_normal(n)).astype(np.float32)


def ours(size: int) -> Calls:
    buffer = PrioritizedReplay(size, alpha=ALPHA, beta=BETA)
    buffer.add(transitions(size))
    buffer.update_priorities(torch.arange(size), torch.from_numpy(td_errors(size)))
    new, td, out = transitions(ADD), torch.from_numpy(td_errors(BATCH)), buffer.sample(BATCH)

    def check() -> None:
        batch = buffer.sample(100_000)
        leaves = buffer.state.tree.leaves.double()
        torch.testing.assert_close(
            batch.probabilities.double(), leaves[batch.indices] / leaves.sum(), rtol=1e-5, atol=0
        )

    def cycle() -> None:
        batch = buffer.sample(BATCH)
        buffer.update_priorities(batch.indices, td, batch.generations)

    def cycle_out() -> None:
        buffer.sample(BATCH, out=out)
        buffer.update_priorities(out.indices, td, out.generations)

    check()
    return {"sample + update": cycle, "sample + update, out=": cycle_out, "add 1024": lambda: buffer.add(new)}


def cpprb(size: int) -> Calls:
    from cpprb import PrioritizedReplayBuffer

    scalar: dict = {}
    spec = {"obs": {"shape": 4}, "action": {"dtype": np.int64}, "reward": scalar, "next_obs": {"shape": 4}}
    flags = {"terminated": {"dtype": np.bool_}, "truncated": {"dtype": np.bool_}}
    buffer = PrioritizedReplayBuffer(size, spec | flags, alpha=ALPHA)
    buffer.add(**transitions(size))
    buffer.update_priorities(np.arange(size), td_errors(size))
    new, td = transitions(ADD), td_errors(BATCH)

    def cycle() -> None:
        batch = buffer.sample(BATCH, beta=BETA)
        buffer.update_priorities(batch["indexes"], td)

    return {"sample + update": cycle, "add 1024": lambda: buffer.add(**new)}


def tianshou(size: int) -> Calls:
    from tianshou.data import Batch, PrioritizedReplayBuffer

    buffer = PrioritizedReplayBuffer(size, alpha=ALPHA, beta=BETA)
    names = dict(obs="obs", action="act", reward="rew", next_obs="obs_next")
    data = {names.get(k, k): x for k, x in transitions(size).items()}
    buffer.add(Batch(**{k: x[0] for k, x in data.items()}, info={}))
    # It adds one transition at a time, so its arrays are filled directly.
    for key, x in data.items():
        getattr(buffer._meta, key)[:] = x
    buffer._size = size
    buffer.update_weight(np.arange(size), td_errors(size))
    td = td_errors(BATCH)

    def cycle() -> None:
        _, indices = buffer.sample(BATCH)
        buffer.update_weight(indices, td)

    return {"sample + update": cycle}


def torchrl(size: int) -> Calls:
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer

    sampler = PrioritizedSampler(size, ALPHA, BETA)  # raises where its compiled extension does not load
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(size), sampler=sampler, batch_size=BATCH)

    def as_dict(n: int) -> TensorDict:
        return TensorDict({k: torch.from_numpy(x) for k, x in transitions(n).items()}, [n])

    buffer.extend(as_dict(size))
    buffer.update_priority(torch.arange(size), torch.from_numpy(td_errors(size)))
    new, td = as_dict(ADD), torch.from_numpy(td_errors(BATCH))

    def cycle() -> None:
        batch = buffer.sample()
        buffer.update_priority(batch["index"], td)

    return {"sample + update": cycle, "add 1024": lambda: buffer.extend(new)}


def on_cpu(sizes: list[int], rounds: int) -> Iterator[dict]:
    torch.set_num_threads(1)
    for size in sizes:
        calls: dict[str, Calls] = {}
        for make in (ours, cpprb, tianshou, torchrl):
            name = "sharpwave" if make is ours else make.__name__
            try:
                for what, call in make(size).items():
                    calls.setdefault(what, {})[name] = call
            except (ImportError, RuntimeError, TypeError) as error:
                print(f"{name} is left out: {type(error).__name__}: {str(error).splitlines()[0]}")
        # Beside its peers, which all allocate, also with the batch's memory given.
        calls["sample + update"]["sharpwave, out="] = calls.pop("sample + update, out=")["sharpwave"]
        for what, columns in calls.items():
            yield {"size": size, "what": what, **interleaved_us(columns, rounds)}


def gpu_row(size: int, frames: int, envs: int = 64) -> dict:
    buffer = PrioritizedReplay(size, "cuda", num_envs=envs, frame_stack=frames)
    obs = torch.randint(0, 255, (envs, 84, 84), dtype=torch.uint8, device="cuda")
    flags = torch.zeros(envs, dtype=torch.bool, device="cuda")
    action = torch.zeros(envs, dtype=torch.int64, device="cuda")
    step = dict(obs=obs, next_obs=obs, action=action, reward=action.float(), terminated=flags, truncated=flags)

    def add() -> None:
        buffer.add(step)

    filling = captured(add, calls=64)
    for _ in range(buffer.state.layout.ring // 64 + 1):
        filling.replay()
    # What is copied must be read from memory, not from the cache.
    buffer.storage.tensors["obs"].random_(255)
    every = torch.arange(buffer.capacity, device="cuda")
    buffer.update_priorities(every, torch.rand(buffer.capacity, device="cuda"))
    batch, td = buffer.sample(BATCH), torch.rand(BATCH, device="cuda")

    def sample() -> None:
        buffer.sample(BATCH, out=batch)

    def update() -> None:
        buffer.update_priorities(batch.indices, td, batch.generations)

    def cycle() -> None:
        sample()
        update()

    origin = buffer.storage.tensors["obs"]
    outs = [torch.empty(BATCH * frames, 84, 84, dtype=torch.uint8, device="cuda") for _ in range(2)]
    # New rows for every call of the graph, as draws are new, and the rows after them.
    rows = [torch.randint(0, len(origin) - 1, (BATCH * frames,), device="cuda") for _ in range(20)]
    turn = itertools.cycle([(first, first + 1) for first in rows])
    names = ("action", "reward", "terminated", "truncated")
    small = [(x, torch.empty_like(x[:BATCH])) for x in (buffer.storage.tensors[name] for name in names)]

    def observations() -> None:
        for at, out in zip(next(turn), outs, strict=True):
            torch.index_select(origin, 0, at, out=out)

    def every_field() -> None:
        observations()
        for x, out in small:
            torch.index_select(x, 0, rows[0][:BATCH], out=out)

    calls = {"sample": sample, "update": update, "sample + update": cycle, "index_select": observations}
    calls |= {"index_select, every field": every_field, "add": add}
    return {"size": size, "frames": frames, **{name: graph_us(call) for name, call in calls.items()}}


def on_gpu(size: int) -> Iterator[dict]:
    for frames in (1, 4):
        yield gpu_row(size, frames)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--rounds", type=int, default=1000)
    args = parser.parse_args()
    write("replay", args.device, on_cpu(args.sizes, args.rounds) if args.device == "cpu" else on_gpu(args.sizes[0]))


if __name__ == "__main__":
    main()
