"""Double DQN with n-step returns and prioritized replay, in one file: python examples/dqn_per.py

Learns CartPole on one CPU core. On a GPU (--device cuda) transitions, priorities and network stay there.
"""

from dataclasses import dataclass

import torch
import tyro
from torch import nn
from torch.nn import functional as F

import sharpwave
from sharpwave import envs


@dataclass
class Args:
    env: str = "sharpwave/CartPole"
    """an environment of `sharpwave.envs` with discrete actions and flat observations"""
    device: str = "cpu"
    seed: int = 1
    num_envs: int = 8
    total_steps: int = 60_000
    """environment steps"""
    buffer_size: int = 50_000
    learning_starts: int = 1_000
    """environment steps before the first update"""
    batch_size: int = 128
    steps_an_update: int = 4
    """environment steps for each update (it rounds up to num_envs)"""
    learning_rate: float = 5e-4
    gamma: float = 0.99
    n_step: int = 3
    alpha: float = 0.6
    beta: float = 0.4
    """at first; it goes to 1 while the run lasts"""
    target_every: int = 100
    """updates between copies of the network to the target network"""
    epsilon_end: float = 0.05
    epsilon_fraction: float = 0.3
    """part of the run in which exploration falls from 1 to epsilon_end"""


def main(args: Args) -> float:
    torch.set_num_threads(1)  # networks this small are slower on several
    torch.manual_seed(args.seed)
    env = envs.make(args.env, args.num_envs, device=args.device)
    width, actions = env.observation.shape[0], env.action.nvec[0]

    def network() -> nn.Module:
        layers = nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, actions)
        return nn.Sequential(*layers).to(args.device)

    q_net, target_net = network(), network()
    target_net.load_state_dict(q_net.state_dict())
    optimizer = torch.optim.Adam(q_net.parameters(), lr=args.learning_rate)
    updates_a_step = max(args.num_envs // args.steps_an_update, 1)
    draws = args.total_steps // args.num_envs * updates_a_step * args.batch_size
    buffer = sharpwave.PrioritizedReplay(
        args.buffer_size,
        args.device,
        num_envs=args.num_envs,  # steps in time order: no observation is stored twice
        n_step=args.n_step,
        gamma=args.gamma,
        alpha=args.alpha,
        beta=(args.beta, 1.0, draws),
        seed=args.seed,
    )

    returns, running = [], torch.zeros(args.num_envs, device=args.device)
    obs, _, _ = env.reset(seed=args.seed)
    updates = 0
    for t in range(0, args.total_steps, args.num_envs):
        epsilon = max(1 - (1 - args.epsilon_end) * t / (args.epsilon_fraction * args.total_steps), args.epsilon_end)
        with torch.no_grad():
            greedy = q_net(obs).argmax(1)
        explore = torch.rand(args.num_envs, device=args.device) < epsilon
        action = torch.where(explore, torch.randint_like(greedy, actions), greedy)
        step = env.step(action)
        # next_obs is the true one, also where an episode ended; terminated and truncated stay apart.
        buffer.add(
            obs=obs,
            action=action,
            reward=step.reward,
            next_obs=step.next_obs,
            terminated=step.terminated,
            truncated=step.truncated,
        )
        obs = step.obs
        running += step.reward
        ended = step.terminated | step.truncated
        if ended.any():
            returns += running[ended].tolist()
            running[ended] = 0
            if len(returns) % 50 < int(ended.sum()):
                print(f"{t:7d} steps  return {sum(returns[-50:]) / len(returns[-50:]):6.1f}")

        if t < args.learning_starts:
            continue
        for _ in range(updates_a_step):
            batch = buffer.sample(args.batch_size)
            with torch.no_grad():
                best = q_net(batch.next_obs).argmax(1, keepdim=True)
                following = target_net(batch.next_obs).gather(1, best)[:, 0]
                # discount is gamma^m, and 0 where the episode terminated: a truncated one is bootstrapped from.
                target = batch.reward + batch.discount * following
            q = q_net(batch.obs).gather(1, batch.action[:, None])[:, 0]
            loss = (batch.weights * F.smooth_l1_loss(q, target, reduction="none")).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            # The TD error itself, not the weighted loss.
            buffer.update_priorities(batch.indices, target - q, batch.generations)
            updates += 1
            if updates % args.target_every == 0:
                target_net.load_state_dict(q_net.state_dict())
    env.close()
    last = sum(returns[-50:]) / len(returns[-50:])
    print(f"return of the last 50 episodes: {last:.1f}; replay: {buffer.stats()['held']} held")
    return last


if __name__ == "__main__":
    main(tyro.cli(Args))
