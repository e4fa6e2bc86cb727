"""Settings that suit a known environment, by (algorithm, environment): what differs from the defaults, and why.

Those of PPO are for 64 environments, which a GPU should not change by its own default: fewer, larger updates learn less
from the same steps. Where the environment runs on the GPU, `ON_GPU` says what many thousands of them take.
"""

from typing import Any

# Returns of up to 500: a discount whose horizon is a fifth of that, and rewards scaled so that values are at most 1.
_CARTPOLE = {"num_envs": 64, "total_steps": 500_000, "minibatch": 512, "gamma": 0.99, "reward_scale": 0.01}
# One step in ten is rewarded: what teaches is the number of updates. With less entropy one seed in three ends with two
# cues taken for one.
_CUE_RECALL = {"num_envs": 64, "total_steps": 300_000, "minibatch": 512, "ent_coef": 0.02}
# Returns of -500 to about -80.
_ACROBOT = {"num_envs": 64, "total_steps": 400_000, "gamma": 0.99, "reward_scale": 0.01}
# Returns of -1200 to -150 in 200 steps, each of which matters for about 20 more.
_PENDULUM = {
    "num_envs": 64,
    "total_steps": 300_000,
    "minibatch": 1024,
    "gamma": 0.95,
    "normalize_obs": True,
    "normalize_reward": True,
}
# A brick now and then, and nothing to remember but which way the ball flies.
_BREAKOUT = {
    "num_envs": 64,
    "total_steps": 300_000,
    "minibatch": 1024,
    "gamma": 0.99,
    "encoder": "mlp",
    "layers": 1,
}
# Returns of a hundredth a bar, which the next few bars decide.
_BARS = {"num_envs": 64, "total_steps": 100_000, "minibatch": 1024, "gamma": 0.9, "normalize_reward": True}
# Three of the seven actions do something here, and steps are slow, so that each is trained on four times.
_MINIGRID_MEMORY = {
    "env_kwargs": {"actions": ["left", "right", "forward"]},
    "num_envs": 64,
    "total_steps": 170_000,
    "horizon": 32,
    "minibatch": 512,
    "replay_ratio": 4.0,
    "gamma": 0.98,
    "ent_coef": 0.005,
    "layers": 1,
}
# An achievement a hundred steps or so, worth 1 to 8.
_CRAFTAX = {"num_envs": 64, "gamma": 0.99, "reward_scale": 0.1, "ent_coef": 0.01}

# Values of up to 10, and a target network that follows smoothly: with copies every 100 to 200 updates one seed in three
# ended below 400. 50,000 steps were too few for two seeds of seven.
_CARTPOLE_DQN = {
    "total_steps": 80_000,
    "buffer_size": 80_000,
    "batch_size": 128,
    "hidden": 64,
    "reward_scale": 0.1,
    "lr": 1e-3,
    "lr_schedule": "linear",
    "target_interval": 1,
    "tau": 0.01,
}
# Single frames, which the replay keeps once, and what Hessel et al. 2018 settled on, for many environments at once.
_ATARI_DQN = {
    "env_kwargs": {"stack_num": 1},
    "frame_stack": 4,
    "reward_clip": 1.0,
    "hidden": 512,
    "total_steps": 10_000_000,
    "buffer_size": 1_000_000,
    "learning_starts": 80_000,
    "updates_per_step": 0.0625,
    "lr": 1e-4,
    "adam_eps": 1.5e-4,
    "target_interval": 1000,
    "epsilon_end": 0.01,
    "epsilon_fraction": 0.1,
}

PRESETS: dict[tuple[str, str], dict[str, Any]] = {
    ("ppo", "CartPole-v1"): _CARTPOLE,
    ("ppo", "sharpwave/CartPole"): _CARTPOLE,
    ("ppo", "sharpwave/CueRecall"): _CUE_RECALL,
    ("ppo", "Acrobot-v1"): _ACROBOT,
    ("ppo", "Pendulum-v1"): _PENDULUM,
    ("ppo", "sharpwave/Breakout"): _BREAKOUT,
    ("ppo", "sharpwave/Bars"): _BARS,
    ("ppo", "MiniGrid-MemoryS7-v0"): _MINIGRID_MEMORY,
    ("ppo", "craftax/Craftax-Symbolic-v1"): _CRAFTAX,
    ("dqn", "CartPole-v1"): _CARTPOLE_DQN,
    ("dqn", "sharpwave/CartPole"): _CARTPOLE_DQN,
    ("dqn", "ALE/*"): _ATARI_DQN,
}


# What is otherwise where the environment and the network share a GPU.
ON_GPU: dict[tuple[str, str], dict[str, Any]] = {
    ("ppo", "sharpwave/Breakout"): {"num_envs": 1024, "total_steps": 15_000_000, "minibatch": 8192},
    ("ppo", "sharpwave/CartPole"): {"num_envs": 2048, "horizon": 32, "total_steps": 6_000_000, "minibatch": 4096},
    # With a learning rate of 0.015 four ratios of ten were clipped.
    ("ppo", "craftax/Craftax-Symbolic-v1"): {
        "num_envs": 4096,
        "total_steps": 50_000_000,
        "minibatch": 8192,
        "replay_ratio": 2.0,
        "lr": 0.005,
        "hidden": 512,
    },
    # Segments of the episodes' length and more, for delays of up to 126.
    ("ppo", "sharpwave/CueRecall"): {
        "num_envs": 1024,
        "horizon": 128,
        "total_steps": 30_000_000,
        "minibatch": 8192,
        "ent_coef": 0.01,
    },
}


def preset(algorithm: str, env: str, on_gpu: bool = False) -> dict[str, Any]:
    """The settings for an environment: those of its own name, else of its family ("ALE/*"), else none.

    Args:
        algorithm, env: as in `PRESETS`.
        on_gpu: whether the network runs on a CUDA device; then what `ON_GPU` says for the environment comes on top.
    """
    namespace, slash, _ = env.partition("/")
    family = f"{namespace}/*" if slash else env
    found = PRESETS.get((algorithm, env), PRESETS.get((algorithm, family), {}))
    there = ON_GPU.get((algorithm, env)) if on_gpu else None
    return found if there is None else found | there
