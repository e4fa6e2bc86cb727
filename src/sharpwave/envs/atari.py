"""Atari games by ale-py, whose own vector class preprocesses and steps them in C++ threads."""

import difflib
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from sharpwave.envs.extras import needs
from sharpwave.envs.gymnasium import GymnasiumVector, make_gymnasium


def make_atari(
    name: str,
    num_envs: int,
    device: torch.device | str = "cpu",
    *,
    terminal_on_life_loss: bool = False,
    reward_clipping: bool = False,
    **options: Any,
) -> GymnasiumVector:
    """`num_envs` copies of an Atari game with the preprocessing of Mnih et al. 2015.

    An episode begins with up to 30 steps of doing nothing, and with FIRE in games that wait for it. An action is
    repeated for 4 frames; an observation is the last four such steps, each the maximum of its last two frames in grey,
    scaled to 84 x 84: (4, 84, 84) uint8, the latest last. As Machado et al. 2018 recommend, an episode ends when the
    game is over, and with probability 0.25 an action is the one before once more. It is truncated after 108000 frames,
    half an hour.

    Args:
        name: "ALE/Pong-v5" and the like.
        num_envs: N.
        device: where tensors go; the games run on the host.
        terminal_on_life_loss: set `terminated` where a life is lost, though the game goes on from there.
        reward_clipping: rewards are -1, 0 or 1. The trainers' `reward_clip` does it for training alone, so that logs
            and evaluation show the score.
        options: of `ale_py.AtariVectorEnv`, e.g. repeat_action_probability=0.0, full_action_space=True, noop_max=0,
            frameskip=4, stack_num=1, use_fire_reset=False, num_threads=4.

    Environment i is seeded with `environment_seeds(seed, N)[i]`. Deterministic. Episodes cannot be saved: after loading
    new ones begin.

    Raises:
        ImportError: ale-py is not installed.
        ValueError: there is no such game (the message lists those there are), or it does not take the options.
    """
    with needs("atari"):
        import ale_py
        import gymnasium
    gymnasium.register_envs(ale_py)
    if name not in gymnasium.registry:
        raise ValueError(_unknown(name, gymnasium.registry))
    # ale-py writes its autoreset mode into the dictionary that all classes of vector environments share.
    shared, before = VectorEnv.metadata, dict(VectorEnv.metadata)
    try:
        return make_gymnasium(
            name,
            num_envs,
            device,
            vectorization_mode="vector_entry_point",
            # DISABLED, which would be simpler, is not one of the modes that ale-py 0.12.1 was compiled with.
            autoreset_mode=AutoresetMode.SAME_STEP,
            life_loss_info=terminal_on_life_loss,
            reward_clipping=reward_clipping,
            vector_wrappers=(AtariEpisodes,),
            **options,
        )
    finally:
        shared.clear()
        shared.update(before)


class AtariEpisodes(VectorWrapper):
    """Seeds each game alone, and says which observation is the last of an episode that a lost life ended.

    `final_obs` is undefined where an episode ended and the game was not begun anew. There the observation is the last.
    """

    takes_seeds = True
    steps_beside = True

    def __init__(self, env: VectorEnv):
        super().__init__(env)
        self._lives = np.zeros(self.num_envs, dtype=np.int32)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None):
        """Begin new games; `seed` is one for each, or None."""
        obs, info = self.env.reset(seed=None if seed is None else np.array(seed), options=options)  # ty: ignore[invalid-argument-type]
        self._lives = info["lives"].copy()
        return obs, info

    def step(self, actions: Any):
        """One step, as `ale_py.AtariVectorEnv.step` under SAME_STEP but for the final observations."""
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: Any) -> None:
        """Let ale-py's threads begin a step."""
        self.env.send(actions)  # ty: ignore[missing-attribute]

    def step_wait(self):
        """What the step has returned."""
        obs, reward, terminated, truncated, info = self.env.recv()  # ty: ignore[missing-attribute]
        if "final_obs" in info:
            # A new game has as many lives as any: fewer than before means that the old one goes on.
            goes_on = info["lives"] < self._lives
            info["final_obs"][goes_on] = obs[goes_on]
        self._lives = info["lives"].copy()
        return obs, reward, terminated, truncated, info


def _unknown(name: str, registry: Any) -> str:
    games = sorted(known for known in registry if known.startswith("ALE/"))
    near = difflib.get_close_matches(name, games, n=1)
    nearest = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown Atari game {name!r}: {nearest}There are: {', '.join(games)}"
