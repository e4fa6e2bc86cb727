"""What each of two ranks does in the tests of data-parallel training; `start` runs this file as their processes."""

import gc
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

from sharpwave.algos.dqn import DQN, DQNConfig
from sharpwave.algos.ppo import EPS, PPO, PPOConfig
from sharpwave.run import loop
from sharpwave.run.distributed import Ranks, World, joined
from sharpwave.run.errors import UserError
from sharpwave.run.graphs import Captured

ROOT = Path(__file__).parents[2]
SMALL = dict(num_envs=4, horizon=8, minibatch=16, hidden=16, layers=1, total_steps=64 * 6)


def start(*cases: str, device: str = "cpu", size: int = 2) -> list[subprocess.Popen]:
    """The processes of `size` ranks that do `cases`, as torchrun would start them, but three seconds sooner.

    A case is a function below, "train", or with its argument "train=folder".
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, "-m", "tests.algos.ranks", device, *cases]
    env = os.environ | dict(
        WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    return [
        subprocess.Popen(
            command, cwd=ROOT, env=env | dict(RANK=str(r), LOCAL_RANK=str(r)), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )
        for r in range(size)
    ]  # fmt: skip


def finish(processes: list[subprocess.Popen], timeout: float = 60) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each."""
    found = []
    for process in processes:
        out, err = process.communicate(timeout=timeout)
        found.append((process.returncode, out, err))
    return found


def talk(world: World) -> None:
    """Every method of `World` once."""
    rank = world.rank
    x = torch.tensor([1.0 + rank, float("nan") if rank else 2.0])
    world.sum_(x)
    assert x[0] == 3 and x[1].isnan()
    assert torch.equal(world.gather(torch.tensor([rank, 7])), torch.tensor([[0, 7], [1, 7]]))
    weights = [torch.full((2, 3), 1.0 + rank), torch.full((1,), -rank - 1.0)]
    world.take_first_(weights)
    assert torch.equal(weights[0], torch.ones(2, 3)) and weights[1] == -1
    assert world.largest(3 * rank) == 3 and world.largest(-rank) == 0
    assert world.tell("Grüße" if rank == 0 else "") == "Grüße" and world.tell("") == ""
    world.require_same("a\nb", "settings")
    try:
        world.require_same(f"a\nlr={rank}", "settings")
    except UserError as error:
        assert rank == 1 and "rank 1 has other settings than rank 0 ('lr=1', not 'lr=0')" in str(error)
    else:
        assert rank == 0


def union_gradient(agent: PPO, every: dict[str, torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of all ranks' segments as one minibatch, from the definitions.

    `every` holds what each rank drew from and drew, (R, ...). Segment i of rank r stands in the minibatch for the
    share W_r / W of the whole, and has the importance weight (R N P_i)^-beta.
    """
    config, policy = agent.config, agent.policy
    w = every["priority"].double() + EPS
    drawn = every["index"]
    p = w.gather(1, drawn) / w.sum()
    importance = (w.numel() * p).pow(-float(agent.beta))
    mass = (w.sum(1) / w.sum() / drawn.shape[1])[:, None].expand_as(p).flatten() / config.horizon
    mass = mass[:, None].expand(-1, config.horizon)

    def flat(name):
        return every[name].flatten(0, 1)

    advantage, old_value = flat("advantage").double(), flat("value").double()
    state = every["state"].permute(1, 0, 2, 3).flatten(1, 2)
    out = policy(flat("obs"), state, flat("reset"))
    logp, new_value = torch.log_softmax(out.params.double(), -1), out.value.double()
    logprob = logp.gather(2, flat("action"))[..., 0]
    entropy = -(logp.exp() * logp).sum(-1)
    mean = (mass * advantage).sum()
    a_hat = (advantage - mean) / ((mass * (advantage - mean).square()).sum().sqrt() + 1e-8)
    ratio = (logprob - flat("logprob").double()).exp()
    surrogate = -importance.flatten()[:, None] * a_hat
    policy_loss = torch.maximum(surrogate * ratio, surrogate * ratio.clamp(1 - config.clip, 1 + config.clip))
    target, change = advantage + old_value, new_value - old_value
    clipped = old_value + change.clamp(-config.vf_clip, config.vf_clip)
    value_loss = 0.5 * torch.maximum((new_value - target).square(), (clipped - target).square())
    loss = (mass * (policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy)).sum()
    gradients = torch.autograd.grad(loss, list(policy.parameters()))
    return loss.detach(), list(gradients)


def gradients(world: World, updates: int = 3) -> None:
    """Each update's gradient is that of the union of the ranks' minibatches, and their weights never differ."""
    agent = PPO(PPOConfig(env="sharpwave/CartPole", device=DEVICE, dtype="float32", **SMALL), world=world)
    agent.train_epoch()
    agent._run_rollout()
    agent._run_draw()
    fields = ("obs", "action", "logprob", "value", "advantage", "reset", "state")
    for _ in range(updates):
        told = {name: getattr(agent.batch, name) for name in fields}
        told |= {"priority": agent.priority, "index": agent.index}
        told = {name: x.float() if x.dtype == torch.bool else x for name, x in told.items()}
        every = {name: world.gather(x) for name, x in told.items()}
        every["reset"] = every["reset"] > 0
        loss, want = union_gradient(agent, every)
        w = every["priority"].double() + EPS
        importance = (w.numel() * w[world.rank][agent.index] / w.sum()).pow(-agent.beta.double())
        torch.testing.assert_close(agent.weight.double(), importance, rtol=1e-5, atol=0)
        agent._run_update()
        for p, g in zip(agent.policy.parameters(), want, strict=True):
            torch.testing.assert_close(p.grad, g, rtol=1e-3, atol=1e-5 * float(g.abs().max()))
        assert loss.isfinite()
        weights = world.gather(torch.cat([p.detach().flatten() for p in agent.policy.parameters()]))
        assert torch.equal(weights[0], weights[1])
    assert not torch.equal(*world.gather(agent.batch.advantage)), "each rank has experience of its own"


def skips(world: World) -> None:
    """What is not finite on one rank keeps all from a step, and is told by all."""
    agent = PPO(PPOConfig(env="sharpwave/CartPole", device=DEVICE, **SMALL), world=world)
    agent._run_rollout()
    agent.metrics()
    agent._run_draw()
    if world.rank == 1:
        agent.batch.value[0, 0] = float("inf")
    before = [p.detach().clone() for p in agent.policy.parameters()]
    agent._run_last_update()
    assert all(map(torch.equal, before, agent.policy.parameters()))
    numbers = agent.metrics()
    assert numbers["fault/skipped_updates"] == 1 and "value_loss" in agent.faults()


class OneRankAsks:
    """A stop request to rank 1 alone, after its third epoch."""

    def __init__(self, agent: PPO | DQN, world: World):
        self.agent, self.world = agent, world

    @property
    def requested(self) -> bool:
        return self.world.rank == 1 and self.agent.epoch == 3


def train(world: World, folder: str) -> None:
    """A run stopped through rank 1 and resumed is one that was left alone, on every rank."""
    settings = SMALL | dict(normalize_obs=True, normalize_reward=True, checkpoint_interval=100)
    rest = stop_and_resume(
        world, folder, lambda: PPO(PPOConfig(env="sharpwave/CartPole", device=DEVICE, **settings), world=world)
    )
    same(world, [getattr(rest.reward_normalizer, name) for name in ("count", "mean", "var")])


SMALL_DQN = dict(
    num_envs=4, epoch_steps=8, total_steps=64 * 6, batch_size=8, buffer_size=200, learning_starts=60, hidden=16,
    target_interval=5, n_step=2,
)  # fmt: skip


def dqn(world: World, folder: str) -> None:
    """The same for DQN, its replay in shards; and what one update is of both ranks' batches."""
    settings = SMALL_DQN | dict(normalize_obs=True, checkpoint_interval=100)

    def make(**changes):
        return DQN(DQNConfig(env="sharpwave/CartPole", device=DEVICE, **(settings | changes)), world=world)

    rest = stop_and_resume(world, folder, make)
    same(world, [*rest.policy.state_dict().values(), *rest.target.state_dict().values()])
    same(world, [rest.replay.state.max_priority, *rest.optimizer.state[next(rest.policy.parameters())].values()])
    told = rest.metrics()
    assert told["replay/held"] == world.gather(rest.replay.state.counters[0]).sum()

    for optimizer in ("adam", "muon"):
        agent = make(optimizer=optimizer, max_grad_norm=1e9)
        for _ in range(3):
            agent.train_epoch()
        batch = agent._draw(0)
        weights = world.gather(batch.weights)
        assert not torch.equal(weights[0], weights[1])
        td_error, gradient = agent._loss(batch)
        grad, stats = gradient()
        own = grad if grad is not None else torch.cat([p.grad.flatten() for p in agent.policy.parameters()])
        want = world.gather(own.clone()).mean(0)
        grad, joint = agent._join_gradients(grad, stats)
        got = grad if grad is not None else torch.cat([p.grad.flatten() for p in agent.policy.parameters()])
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(joint[0], world.gather(stats[0]).mean())
        assert torch.equal(joint[1:], stats[1:]) and td_error.isfinite().all()


def same(world: World, tensors) -> None:
    """Every rank holds these, to the bit."""
    for x in tensors:
        every = world.gather(x.double())
        assert torch.equal(every[0], every[1])


def stop_and_resume(world: World, folder: str, make):
    """Two runs of six epochs below `folder`, whole and half; the trainer that went through the second half."""
    whole, half = Path(folder) / "whole", Path(folder) / "half"
    if world.is_first:
        whole.mkdir(parents=True)
        half.mkdir()
    world.barrier()
    assert loop.run(make(), whole, world=world)
    agent = make()
    assert not loop.run(agent, half, world=world, stop=OneRankAsks(agent, world))
    assert agent.epoch == 3
    rest = make()
    assert loop.run(rest, half, world=world, resume=True)
    assert rest.epoch == 6 and rest.global_step == 6 * 64 == rest.config.total_steps
    same(world, [getattr(rest.policy.normalizer, name) for name in ("count", "mean", "var")])
    assert rest.policy.normalizer.count == 6 * 64
    return rest


def fails(world: World) -> None:
    """Rank 1's environment raises while rank 0 waits for it."""
    agent = PPO(PPOConfig(env="sharpwave/CartPole", device=DEVICE, **SMALL), world=world)
    agent.train_epoch()
    if world.rank == 1:
        raise UserError("the pole broke")
    agent.train_epoch()
    agent.metrics()


def captured(world: World) -> None:
    """On GPUs graphs with collectives in them do what the same calls do without."""
    agents = []
    for enabled in (True, False):
        agent = PPO(PPOConfig(env="sharpwave/CartPole", device=DEVICE, **SMALL), world=world)
        runs = [run for run in vars(agent).values() if isinstance(run, Captured)]
        for run in runs:
            run.enabled &= enabled
        while agent.epoch < agent.num_epochs:
            agent.train_epoch()
        assert all(run.graph is not None for run in runs if run.enabled)
        agents.append(agent)
    for a, b in zip(*(agent.policy.parameters() for agent in agents), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(agents[0].segments.obs, agents[1].segments.obs)


CASES = {f.__name__: f for f in (talk, gradients, skips, train, dqn, fails, captured)}
DEVICE = sys.argv[1] if __name__ == "__main__" else "cpu"


def main() -> None:
    torch.set_num_threads(1)
    with joined(DEVICE) as world:
        assert isinstance(world, Ranks) and world.size == 2
        for case in sys.argv[2:]:
            name, _, argument = case.partition("=")
            CASES[name](world, *[argument] if argument else [])
            print(name, flush=True)
        gc.collect()  # graphs hold on to the connection that is closed now
        world.close()


if __name__ == "__main__":
    main()
