"""The settings of the DQN trainer. No torch here: the command line reads this for its help."""

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from sharpwave.run.config import TrainerConfig
from sharpwave.run.errors import UserError


@dataclass(frozen=True)
class DQNConfig(TrainerConfig):
    """Double DQN with n-step returns and dueling heads on prioritized replay."""

    GROUPS: ClassVar = {
        "total_steps": "amount",
        "buffer_size": "replay",
        "lr": "optimizer",
        "gamma": "returns",
        "epsilon_start": "exploration",
        "network": "network",
    }

    total_steps: int = 1_000_000
    """Environment steps of the whole run, over all environments and ranks, rounded down to whole epochs. At least one
    epoch."""
    num_envs: int | None = None
    """N, environments stepped together, by each rank. Default: 8 on a CPU, 64 on a GPU."""
    epoch_steps: int = 128
    """Steps of every environment in an epoch, which is what lies between two log lines."""
    updates_per_step: float = 0.25
    """Updates for each environment step, on average; 0.25 is one every four steps (Mnih et al. 2015). N environments
    step once, then N times this many updates follow."""
    batch_size: int = 256
    """Transitions an update trains on, of each rank."""

    buffer_size: int = 100_000
    """Transitions the replay of a rank holds, over all its environments; more steps overwrite the oldest."""
    learning_starts: int = 1_000
    """Environment steps taken before the first update, by all ranks."""
    save_replay: bool = True
    """Whether checkpoints hold the replay. Without it they are small, and a resumed run first takes learning_starts
    steps again; it is then not bit for bit the run that was stopped."""
    alpha: float = 0.6
    """Exponent of a transition's priority, (|TD error| + eps)^alpha; 0 draws uniformly (Schaul et al. 2016)."""
    beta0: float = 0.4
    """Exponent of the importance weights at the start; it rises to 1 over the run (Schaul et al. 2016)."""
    n_step: int = 3
    """Rewards summed before bootstrapping (Hessel et al. 2018)."""
    frame_stack: int = 1
    """Frames the network sees, the newest included; the replay keeps each once. For environments that give single
    ones."""

    lr: float = 5e-4
    """Learning rate at the start."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """How the learning rate goes on: not at all, or to 0 at the end."""
    optimizer: Literal["adam", "muon"] = "adam"
    """Adam, or Muon on the matrices (about ten times Adam's learning rate suits it)."""
    adam_eps: float = 1e-8
    """Epsilon of Adam; 1.5e-4 for Atari (Hessel et al. 2018)."""
    momentum: float = 0.95
    """Nesterov momentum of Muon, in [0, 1)."""
    max_grad_norm: float = 10.0
    """Largest global norm of the gradient; larger ones are scaled down to it (Wang et al. 2016)."""

    gamma: float = 0.99
    """Discount of one step, in [0, 1]."""
    double: bool = True
    """Choose the next action by the online network and value it by the target network (van Hasselt et al. 2016)."""
    target_interval: int = 500
    """Updates between two moves of the target network."""
    tau: float = 1.0
    """How far the target network moves to the online one each time, in (0, 1]: 1 copies it (hard updates);
    target_interval 1 with tau 0.005 is Polyak averaging."""
    huber: float = 1.0
    """TD error at which the loss turns from quadratic to linear, in units of return."""
    reward_scale: float = 1.0
    """Rewards are multiplied by this before training: returns of order 1 to 10 suit huber and lr. Logs show them as
    they are."""
    reward_clip: float | None = None
    """Clamp scaled rewards to [-reward_clip, reward_clip]; none takes them as they are. 1 for Atari."""

    normalize_obs: bool = False
    """Shift and scale each entry of the observation by its running mean and standard deviation. They are updated at
    each step, and kept with the weights: evaluation uses them too."""

    epsilon_start: float = 1.0
    """Share of random actions at the start."""
    epsilon_end: float = 0.05
    """Share of random actions from epsilon_fraction on, and where an evaluation draws actions."""
    epsilon_fraction: float = 0.2
    """Part of the run in which epsilon falls linearly from its start to its end."""

    noisy: bool = False
    """Explore by noise of learnt size on the last layers (Fortunato et al. 2018); epsilon is then 0."""

    network: Literal["auto", "mlp", "nature", "impala"] = "auto"
    """Network: linear layers, convolutions of Mnih et al. 2015, or residual ones of Espeholt et al. 2018. auto: nature
    for images, mlp for anything else."""
    hidden: int = 128
    """Width of the linear layers (512 in the networks for Atari)."""
    layers: int = 2
    """Hidden layers of the MLP; the others have one after the convolutions."""
    dueling: bool = True
    """Value and advantage in streams of their own (Wang et al. 2016)."""
    atoms: int = 1
    """1 learns expected values; more learn their distribution over so many atoms, 51 in C51 (Bellemare et al. 2017)."""
    v_min: float = -10.0
    """Least value of the distribution, in scaled units; for atoms above 1."""
    v_max: float = 10.0
    """Largest value of the distribution, in scaled units; for atoms above 1."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What trunk and streams compute in; weights, heads and targets are float32 always. auto: bfloat16 for convolutions
    on a GPU, else float32."""

    def resolved(self, cuda: bool) -> "DQNConfig":
        """This configuration with every default that depends on the machine filled in.

        Args:
            cuda: whether a CUDA device can be used.

        Raises:
            UserError: a value is out of range, or values do not fit each other.
        """
        device, on_gpu = self.chosen_device(cuda)
        num_envs = self.num_envs if self.num_envs is not None else (64 if on_gpu else 8)
        config = dataclasses.replace(self, device=device, num_envs=num_envs)
        config.validate()
        return config

    def validate(self) -> None:
        """Raise UserError, in one line that says what to do, where a value is out of range."""
        super().validate()
        require = self.require
        for name in (
            *("total_steps", "epoch_steps", "batch_size", "buffer_size", "n_step", "frame_stack", "target_interval"),
            *("hidden", "layers", "atoms"),
        ):
            require(getattr(self, name) >= 1, name, "at least 1")
        require(self.buffer_size <= 2_000_000_000, "buffer_size", "at most 2,000,000,000")
        require(self.num_envs is None or self.num_envs >= 1, "num_envs", "at least 1")
        require(self.learning_starts >= 0, "learning_starts", "at least 0")
        for name in ("lr", "adam_eps", "max_grad_norm", "reward_scale"):
            require(0 < getattr(self, name) < math.inf, name, "above 0 and finite")
        require(self.huber > 0, "huber", "above 0")
        require(0 <= self.updates_per_step <= 1000, "updates_per_step", "in [0, 1000]")
        require(0 <= self.alpha <= 2, "alpha", "in [0, 2]")
        for name in ("gamma", "beta0", "epsilon_start", "epsilon_end", "epsilon_fraction"):
            require(0 <= getattr(self, name) <= 1, name, "in [0, 1]")
        require(0 < self.tau <= 1, "tau", "in (0, 1]")
        require(0 <= self.momentum < 1, "momentum", "in [0, 1)")
        require(self.reward_clip is None or self.reward_clip > 0, "reward_clip", "above 0, or none")
        require(-math.inf < self.v_min < math.inf, "v_min", "finite")
        require(self.v_min < self.v_max < math.inf, "v_max", f"above --v-min {self.v_min:g} and finite")
        if self.num_envs is None:
            return
        if self.total_steps < self.batch:
            raise UserError(
                f"--total-steps must be at least one epoch of {self.batch} ({self.num_envs} environments x epoch-steps "
                f"{self.epoch_steps}); got {self.total_steps}: raise it, or lower --num-envs or --epoch-steps"
            )
        if self.buffer_size < self.least_buffer:
            raise UserError(
                f"--buffer-size must be at least {self.least_buffer}, n-step + frame-stack + 2 steps of each "
                f"environment; got {self.buffer_size}"
            )
        if self.learning_starts >= self.total_steps:
            raise UserError(
                f"--learning-starts {self.learning_starts} is not below --total-steps {self.total_steps}, so that "
                "nothing would be trained: lower it"
            )

    def for_playing(self) -> "DQNConfig":
        """With the smallest replay: one that was trained with a large one plays on a small machine."""
        return dataclasses.replace(self, buffer_size=self.least_buffer)

    @property
    def least_buffer(self) -> int:
        """Transitions that the replay must hold at least."""
        assert self.num_envs is not None
        return self.num_envs * (self.n_step + self.frame_stack + 2)

    @property
    def batch(self) -> int:
        """Environment steps of one epoch."""
        assert self.num_envs is not None
        return self.num_envs * self.epoch_steps

    @property
    def num_epochs(self) -> int:
        """Epochs of the whole run."""
        return self.total_steps // self.batch

    @property
    def num_updates(self) -> int:
        """Updates of the whole run, about."""
        return max(1, int((self.num_epochs * self.batch - self.learning_starts) * self.updates_per_step))
