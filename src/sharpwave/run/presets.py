"""Settings that suit a known environment, by (algorithm, environment): what differs from the defaults, and why."""

from typing import Any

# Returns of up to 500: a discount whose horizon is a fifth of that, and rewards scaled so that values are at most 1.
_CARTPOLE = {"total_steps": 500_000, "minibatch": 512, "gamma": 0.99, "reward_scale": 0.01}
# One step in ten is rewarded: what teaches is the number of updates.
_CUE_RECALL = {"total_steps": 300_000, "minibatch": 512}
# Returns of -500 to about -80.
_ACROBOT = {"total_steps": 400_000, "gamma": 0.99, "reward_scale": 0.01}
# Returns of -1200 to -150 in 200 steps, each of which matters for about 20 more.
_PENDULUM = {
    "total_steps": 300_000,
    "minibatch": 1024,
    "gamma": 0.95,
    "normalize_obs": True,
    "normalize_reward": True,
}

PRESETS: dict[tuple[str, str], dict[str, Any]] = {
    ("ppo", "CartPole-v1"): _CARTPOLE,
    ("ppo", "sharpwave/CartPole"): _CARTPOLE,
    ("ppo", "sharpwave/CueRecall"): _CUE_RECALL,
    ("ppo", "Acrobot-v1"): _ACROBOT,
    ("ppo", "Pendulum-v1"): _PENDULUM,
}
