"""A parallel environment whose agents leave one after the other, each in its own way."""

import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv


class Relay(ParallelEnv):
    """Three agents; agent i leaves after a random number of steps, i = 0 by termination, 1 truncated, 2 by both."""

    metadata = {"name": "relay_v0"}  # noqa: RUF012

    def __init__(self, longest: int = 5, fault: str | None = None):
        self.possible_agents = ["a", "b", "c"]
        self.agents = []
        self.longest, self.fault = longest, fault

    def observation_space(self, agent):
        return spaces.Dict({"observation": spaces.Box(-1, 1e6, (3,), np.float32), "action_mask": spaces.MultiBinary(3)})

    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.rng, self.episode = np.random.default_rng(seed), 0
        self.episode += 1
        self.t = 0
        self.agents = list(self.possible_agents)
        self.until = dict(zip(self.agents, self.rng.integers(1, self.longest + 1, 3), strict=True))
        return {agent: self.observe(agent, -1) for agent in self.agents}, {agent: {} for agent in self.agents}

    def observe(self, agent, action):
        mask = np.arange(3) != self.t % 3
        return {"observation": np.array([self.episode, self.t, action], dtype=np.float32), "action_mask": mask}

    def step(self, actions):
        assert actions.keys() == set(self.agents), "those that have left do not act"
        self.t += 1
        if self.fault == "raise" and self.t == 2:
            raise OSError("the simulator has gone away")
        obs = {agent: self.observe(agent, int(action)) for agent, action in actions.items()}
        reward = {agent: float(self.t + int(action)) for agent, action in actions.items()}
        if self.fault == "nan" and self.t == 2:
            reward[self.agents[-1]] = float("nan")
        over = {agent: self.t >= self.until[agent] for agent in self.agents}
        terminated = {agent: over[agent] and agent != "b" for agent in self.agents}
        truncated = {agent: over[agent] and agent != "a" for agent in self.agents}
        infos = {agent: {} for agent in self.agents}
        self.agents = [agent for agent in self.agents if not over[agent]]
        return obs, reward, terminated, truncated, infos
