"""The settings of the PPO trainer. No torch here: the command line reads this for its help."""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

from sharpwave.run.config import TrainerConfig
from sharpwave.run.errors import UserError


@dataclass(frozen=True)
class PPOConfig(TrainerConfig):
    """Recurrent PPO on prioritized trajectory segments."""

    GROUPS: ClassVar = {
        "total_steps": "amount",
        "lr": "optimizer",
        "gamma": "returns",
        "clip": "loss",
        "alpha": "priorities",
        "hidden": "network",
    }

    total_steps: int = 1_000_000
    """Environment steps of the whole run, over all environments and ranks, rounded down to whole epochs. At least one
    batch."""
    num_envs: int | None = None
    """N, environments stepped together, by each rank. Default: 64; 4096 for environments that a GPU steps (PufferLib
    4.0)."""
    env_groups: int = 1
    """G, groups that the environments step in. With 2, one group steps while the policy acts for the other, which pays
    where both take long (double-buffered sampling, Petrenko et al. 2020). For environments that the host steps."""
    horizon: int = 64
    """T, steps of a segment: what the recurrent layers are trained through (PufferLib)."""
    minibatch: int | None = None
    """Steps an update trains on, of each rank, a multiple of the horizon. Default: 8192 (PufferLib), at most a quarter
    batch."""
    replay_ratio: float = 1.0
    """How often a step is trained on, on average: an epoch has floor(replay_ratio * N * T / minibatch) updates."""

    lr: float = 0.015
    """Learning rate of Muon at the start (PufferLib)."""
    lr_schedule: Literal["cosine", "constant"] = "cosine"
    """How the learning rate goes on: to 0 along half a cosine, or not at all."""
    momentum: float = 0.95
    """Nesterov momentum of Muon, in [0, 1)."""
    max_grad_norm: float = 1.5
    """Largest global norm of the gradient; larger ones are scaled down to it."""

    gamma: float = 0.995
    """Discount of one step, in [0, 1]."""
    gae_lambda: float = 0.9
    """Lambda of the advantage estimate, in [0, 1] (Schulman et al. 2016)."""
    rho_clip: float = 1.0
    """Largest importance ratio on a step's temporal difference (V-trace's rho bar)."""
    c_clip: float = 1.0
    """Largest importance ratio on what follows a step (V-trace's c bar)."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this before training: returns of order 1 suit vf_coef and vf_clip. Logs show them as
    they are."""
    reward_clip: float | None = None
    """Clamp scaled rewards to [-reward_clip, reward_clip]; none takes them as they are."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return, before reward_scale (Engstrom et al.
    2020)."""
    normalize_obs: bool = False
    """Shift and scale each entry of the observation by its running mean and standard deviation. They are updated after
    each epoch, and kept with the weights: evaluation uses them too."""

    clip: float = 0.2
    """Epsilon of the clipped surrogate (Schulman et al. 2017)."""
    vf_coef: float = 2.0
    """Weight of the value loss."""
    vf_clip: float = 0.2
    """How far a value may move from the old one before its loss is clipped, in units of return."""
    ent_coef: float = 0.001
    """Weight of the entropy bonus."""

    alpha: float = 0.8
    """Exponent of a segment's priority, (sum of |advantage|)^alpha; 0 draws uniformly (Schaul et al. 2016)."""
    beta0: float = 0.2
    """Exponent of the importance weights at the start; it rises to 1 over the run (Schaul et al. 2016)."""

    hidden: int = 128
    """H, width of the network."""
    layers: int = 2
    """MinGRU layers; 0 makes a policy without memory."""
    encoder: Literal["linear", "mlp", "cnn"] = "linear"
    """From observation to the first layer: one matrix, two layers with ReLU, or convolutions."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the network computes in; weights are float32 always. auto: bfloat16 on a GPU, float32 on a CPU, where
    bfloat16 has a third of the speed."""
    puffer_compat: bool = False
    """PufferLib's formulas where they differ: no advantage on a segment's last step, rewards clamped to 1, no reset of
    the state inside a segment, episodes' ends all terminal, beta's slope times alpha. For comparing runs."""

    def resolved(self, cuda: bool) -> "PPOConfig":
        """This configuration with every default that depends on the machine filled in.

        Args:
            cuda: whether a CUDA device can be used.

        Raises:
            UserError: a value is out of range, or values do not fit each other.
        """
        device, on_gpu = self.chosen_device(cuda)
        num_envs = self.num_envs
        if num_envs is None:
            from sharpwave.envs.registry import steps_on_device  # only here, for it imports PyTorch

            num_envs = 4096 if on_gpu and steps_on_device(self.env) else 64
        minibatch = self.minibatch
        if minibatch is None:
            minibatch = min(8192, max(1, num_envs // 4) * self.horizon)
            minibatch -= minibatch % max(1, self.horizon)
        dtype = ("bfloat16" if on_gpu else "float32") if self.dtype == "auto" else self.dtype
        config = dataclasses.replace(self, device=device, num_envs=num_envs, minibatch=minibatch, dtype=dtype)
        config.validate()
        return config

    def validate(self) -> None:
        """Raise UserError, in one line that says what to do, where a value is out of range."""
        super().validate()
        require = self.require
        for name in ("total_steps", "env_groups", "horizon", "hidden"):
            require(getattr(self, name) >= 1, name, "at least 1")
        for name in ("num_envs", "minibatch"):
            require(getattr(self, name) is None or getattr(self, name) >= 1, name, "at least 1")
        require(self.layers >= 0, "layers", "at least 0")
        for name in ("lr", "replay_ratio", "max_grad_norm", "reward_scale", "rho_clip", "c_clip", "clip", "vf_clip"):
            require(0 < getattr(self, name) < float("inf"), name, "above 0 and finite")
        for name in ("vf_coef", "ent_coef", "alpha"):
            require(0 <= getattr(self, name) < float("inf"), name, "at least 0 and finite")
        for name in ("gamma", "gae_lambda", "beta0"):
            require(0 <= getattr(self, name) <= 1, name, "in [0, 1]")
        require(self.replay_ratio <= 1000, "replay_ratio", "at most 1000")
        require(self.horizon > 1 or not self.puffer_compat, "horizon", "at least 2 with --puffer-compat")
        require(0 <= self.momentum < 1, "momentum", "in [0, 1)")
        require(self.reward_clip is None or self.reward_clip > 0, "reward_clip", "above 0, or none")
        if self.num_envs is None or self.minibatch is None:
            return
        if self.num_envs % self.env_groups:
            near = self.num_envs // self.env_groups * self.env_groups
            raise UserError(
                f"--num-envs must be a multiple of --env-groups {self.env_groups}, for groups are of one size; got "
                f"{self.num_envs}: use {f'{near} or ' if near else ''}{near + self.env_groups}"
            )
        if self.minibatch % self.horizon:
            near = max(1, self.minibatch // self.horizon) * self.horizon
            raise UserError(
                f"--minibatch must be a multiple of --horizon {self.horizon}, for whole segments are drawn; got "
                f"{self.minibatch}: use {near} or {near + self.horizon}"
            )
        if self.total_steps < self.batch:
            raise UserError(
                f"--total-steps must be at least one batch of {self.batch} ({self.num_envs} environments x horizon "
                f"{self.horizon}); got {self.total_steps}: raise it, or lower --num-envs or --horizon"
            )
        if self.updates_per_epoch < 1:
            raise UserError(
                f"--minibatch {self.minibatch} is more than --replay-ratio {self.replay_ratio} times the batch of "
                f"{self.batch}, so that nothing would be trained: lower --minibatch or raise --replay-ratio"
            )

    @property
    def batch(self) -> int:
        """Steps of one rollout, N T."""
        assert self.num_envs is not None
        return self.num_envs * self.horizon

    @property
    def num_epochs(self) -> int:
        """Rollouts of the whole run."""
        return self.total_steps // self.batch

    @property
    def updates_per_epoch(self) -> int:
        """Updates after each rollout."""
        assert self.minibatch is not None
        return int(self.replay_ratio * self.batch / self.minibatch + 1e-9)
