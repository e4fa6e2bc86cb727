"""Recurrent PPO on prioritized trajectory segments.

The family is PufferLib 4.0's trainer: V-trace-corrected advantages, segments drawn by priority, MinGRU, Muon. An epoch
is a rollout of N environments for T steps and then updates, each on the segments that matter most at that moment:

    rollout:  for t in 0..T-1:  act, step, store;   V of the true next observation where a segment or episode is cut
    update:   a. advantages of all segments, from the latest values and ratios
              b. priority w = (sum_t |A_t|)^alpha
              c. draw M = minibatch / T segments from P = (w + 1e-6) / sum(w + 1e-6)
              d. importance weights (N P)^-beta
              e. gather the segments
              f. forward, loss, backward
              g. clip, Muon
              h. write ratios and values of the drawn segments back

Nothing in h and the next update's a to e waits for f's backward or g, so on a GPU they run beside these. Environments
on the host may step in groups: while one group steps, the policy acts for another.

R ranks (`sharpwave.run.distributed`) each have N environments, and draw M segments of their own; together they make one
update of R M segments, drawn from all R N (`sharpwave.algos.shards`). With them, c to g are

    c. draw M of the rank's N segments
    d. importance weights (R N P)^-beta, P of the whole; the advantages' mean and deviation over all ranks' minibatches
    f. gradient = sum over the ranks of W_r / W times the rank's, W_r the sum of its w
    g. clip, Muon: on every rank the same step
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sharpwave.algos import shards
from sharpwave.algos.env_group import EnvGroup
from sharpwave.algos.ppo_config import PPOConfig
from sharpwave.algos.ppo_metrics import UpdateMetrics, log_histogram
from sharpwave.algos.segments import Segments, segment_advantage
from sharpwave.envs.base import Reset, Step, VectorEnv, write_observations
from sharpwave.envs.stats import EpisodeStats
from sharpwave.nn import Policy, RewardNormalizer
from sharpwave.ops.cdf import draw_segments
from sharpwave.ops.ppo_loss import PPOGradient, advantage_moments
from sharpwave.ops.write_back import write_back
from sharpwave.optim import Muon
from sharpwave.run import seeding
from sharpwave.run.distributed import ALONE, World
from sharpwave.run.environment import make_env
from sharpwave.run.errors import UserError
from sharpwave.run.graphs import Branch, Captured
from sharpwave.run.timing import PhaseTimer

__all__ = ["PPO", "PPOConfig"]

EPS = 1e-6  # added to every segment's priority


class PPO:
    """The trainer. `train_epoch` is one rollout and its updates.

    Args:
        config: resolved for this machine if it is not yet.
        env: an environment of your own, which says `num_envs` where the configuration does not; by default
            `sharpwave.envs.make(config.env, ...)`.
        world: the ranks that train together; num_envs and minibatch are each rank's, total_steps is theirs together.

    Raises:
        UserError: the configuration does not fit the machine, itself or the environment.
        ValueError: there is no such environment, or it does not take `env_kwargs`.
    """

    shared: ClassVar[tuple[str, ...]] = ("epoch", "policy", "momentum")
    """What of `state_dict` all ranks hold alike."""

    def __init__(self, config: PPOConfig, env: VectorEnv | None = None, world: World = ALONE):
        if env is not None and config.num_envs is None:
            config = dataclasses.replace(config, num_envs=env.num_envs)
        self.config = config = config.resolved(torch.cuda.is_available())
        self.device = torch.device(config.device)
        self.dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self.world, rank = world, world.rank
        assert config.num_envs is not None and config.minibatch is not None
        self.env = env or make_env(config, self.device, config.env_groups)
        if self.env.num_envs != config.num_envs:
            raise UserError(f"the environment has {self.env.num_envs} copies, the configuration {config.num_envs}")
        if len(self.env.groups) != config.env_groups:
            raise UserError(f"the environment has {len(self.env.groups)} groups, the configuration {config.env_groups}")
        if not self.num_epochs:
            raise UserError(
                f"--total-steps must be at least one batch of all ranks, {config.batch * world.size} ({world.size} "
                f"ranks x {config.num_envs} environments x horizon {config.horizon}); got {config.total_steps}: raise "
                "it, or lower --num-envs or --horizon"
            )
        self.draws = config.minibatch // config.horizon

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeding.stream_seed(config.seed, 0, "weights"))
            policy = Policy(
                self.env.observation,
                self.env.action,
                config.hidden,
                config.layers,
                config.encoder,
                config.normalize_obs,
            )
        world.take_first_(policy.parameters())
        self.policy = policy.to(self.device)
        vectors = [] if self.policy.log_std is None else [self.policy.log_std]
        self.lr = torch.tensor(config.lr, device=self.device)
        rounded = self.device.type == "cuda" and self.dtype != torch.float32
        self.optimizer = Muon(
            self.policy.parameters(),
            self.lr,
            config.momentum,
            config.max_grad_norm,
            vectors=vectors,
            copies=self.policy.keep_rounded(self.dtype) if rounded else None,
        )

        self.generator = seeding.generator(self.device, config.seed, rank, "actions")
        self.draw_seed = seeding.stream_seed(config.seed, rank, "segments")
        self.draw_offset = torch.zeros(1, dtype=torch.int64, device=self.device)

        self.segments = Segments.empty(self.env, self.policy, config.horizon, self.dtype)
        self.batch = self.segments.batch(self.draws, self.policy, self.dtype)
        self.advantage = torch.zeros_like(self.segments.value)
        self.priority = self.advantage.new_zeros(config.num_envs)
        self.index = torch.zeros(self.draws, dtype=torch.int64, device=self.device)
        self.weight = torch.zeros(self.draws, device=self.device)
        self.moments = advantage_moments(self.batch.advantage.flatten())
        self.share = torch.ones((), dtype=torch.float64, device=self.device)
        """What this rank's gradient counts for."""
        if world.size > 1 and self.moments is None:
            self.moments = torch.zeros(4, 1, dtype=torch.float64)
        self.epoch = 0
        self.beta = torch.tensor(config.beta0, device=self.device)
        self.ent_coef = torch.tensor(config.ent_coef, device=self.device)
        self.reward_normalizer = None
        if config.normalize_reward:
            self.reward_normalizer = RewardNormalizer(config.num_envs, config.gamma, world.size > 1).to(self.device)
        self.timer = PhaseTimer(self.device)
        self.episodes = EpisodeStats(config.num_envs, self.device)
        self._beside, self._weights, self._fields = (Branch(self.device) for _ in range(3))
        self._run_draw = Captured(self._first_draw, self.device)
        self._run_update = Captured(self._update, self.device)
        self._run_last_update = Captured(partial(self._update, last=True), self.device)
        self._run_rollout = Captured(
            self._rollout if self.env.capturable else self._rollout_by_groups,
            self.device,
            [self.generator, *self.env.generators],
            enabled=self.env.capturable,
        )
        self._faults: list[str] = []
        self._metrics = UpdateMetrics(self.optimizer.grad_norm)
        self.state = self.policy.initial_state(config.num_envs)
        self.begins = torch.ones(config.num_envs, dtype=torch.bool, device=self.device)
        start = self.env.reset(seeding.stream_seed(config.seed, rank, "env"))
        self.obs = start.obs.clone()
        self.mask = None if start.action_mask is None else start.action_mask.clone()
        self.groups = [] if self.env.capturable else [EnvGroup(self, env) for env in self.env.groups]
        self._begin(start)

    def train_epoch(self) -> None:
        """One rollout, then `config.updates_per_epoch` updates. Nothing is read back from the device."""
        self._set_schedules()
        with self.timer("rollout"):
            self._run_rollout()
            self._metrics.rollout(segment_advantage(self.segments, self.config)[0], self.segments.value)
        self._train()
        if self.policy.normalizer is not None:
            # Between epochs, so that the updates read observations as the rollout did.
            self.policy.normalizer.update(self.segments.obs.flatten(0, 1), self.world.gather)
        if self.reward_normalizer is not None:
            self.reward_normalizer.join(self.world.gather)
        self.epoch += 1

    def _train(self) -> None:
        self._run_draw()
        for _ in range(self.config.updates_per_epoch - 1):
            self._run_update()
        self._run_last_update()

    @torch.no_grad()
    def _rollout(self) -> None:
        """That of environments which may be in its graph."""
        config, s = self.config, self.segments
        s.ratio.fill_(1)
        s.state.copy_(self.state)
        write_observations(self.obs, s.obs[:, 0])
        for t in range(config.horizon):
            last = t == config.horizon - 1
            if s.mask is not None and self.mask is not None:
                s.mask[:, t] = self.mask
            out, sample = self._act(
                s.obs[:, t], self.state, self._reset_flag(t, self.begins), self.mask, out_state=self.state
            )
            # In place, here as for the state and the flags: a graph goes on where the last replay stopped.
            step = self.env.step(
                self.policy.actions.to_env(sample.action),
                out=self.obs if last else s.obs[:, t + 1],
                need_next_obs=last or self.env.may_truncate,
            )
            s.record(t, sample, out.value, step, self._reward(step), self.begins)
            if last or self.env.may_truncate:
                self._next_value(step, self.state, s.next_value[:, t], last)
            self.episodes.update(step)
            if self.mask is not None and step.action_mask is not None:
                self.mask.copy_(step.action_mask)

    @torch.no_grad()
    def _rollout_by_groups(self) -> None:
        """That of environments which no graph can hold: while one group steps, the policy acts for the next."""
        self.segments.ratio.fill_(1)
        self.segments.state.copy_(self.state)
        for group in self.groups:
            group.send(0)
        for t in range(self.config.horizon):
            for group in self.groups:
                step = group.receive(t)
                if t + 1 < self.config.horizon:
                    group.send(t + 1)
                self.episodes.update(step, group.rows)

    def _first_draw(self) -> None:
        with torch.no_grad():
            with self.timer("draw"):
                self._draw()
            with self.timer("gather"):
                self._gather_observations()
                self._gather()

    def _update(self, last: bool = False) -> None:
        """Train on the segments drawn before; draw the next ones, unless this is the epoch's last update."""
        config, batch, policy = self.config, self.batch, self.policy
        with self._beside, torch.no_grad():
            self._metrics.settle()  # the update before
        with self.timer("forward"):  # f
            with self._autocast():
                features = policy.features(batch.obs, batch.state, None if config.puffer_compat else batch.reset)
            gradient = policy.loss(
                features,
                None if batch.mask is None else batch.mask.flatten(0, 1),
                batch.action.flatten(0, 1),
                batch.logprob.flatten(),
                batch.value.flatten(),
                batch.advantage.flatten(),
                self.weight,
                self.ent_coef,
                valid=None if batch.valid is None else batch.valid.flatten(),
                clip=config.clip,
                vf_clip=config.vf_clip,
                vf_coef=config.vf_coef,
                beside=self._beside,
                moments=self.moments,
            )
        with self._beside, self.timer("write back"), torch.no_grad():  # h
            s, shape = self.segments, (self.draws, config.horizon)
            fresh = [gradient.ratio.view(shape), gradient.value.view(shape)]
            write_back([s.ratio, s.value], fresh, self.index, gradient.loss)
            self._metrics.update(gradient.loss, gradient.stats)
        if not last:
            with self._beside, self.timer("draw"), torch.no_grad():
                self._draw(written=self.index)

        with self.timer("backward"):
            self.optimizer.zero_grad()
            policy.backward(features, gradient, self._weights)
            self._beside.join()
            loss = gradient.loss if self.world.size == 1 else self._join_gradients(gradient)
        if not last:
            # The optimizer is first: where its step is one launch, it can begin only while enough of the GPU is free.
            self._beside.fork()
            self._fields.fork()
        with self.timer("optimizer"), torch.no_grad():  # g
            self.optimizer.step(keep=loss)
        if not last:
            with self._beside, self.timer("gather"), torch.no_grad():
                self._gather_observations()
            with self._fields, torch.no_grad():
                self._gather()
            self._beside.join()
            self._fields.join()

    def _draw(self, written: Tensor | None = None) -> None:
        """a to d: advantages, which segments, and their importance weights.

        written: the segments that were written back since the last draw; no other advantages have changed. By default
            all are computed.
        """
        segment_advantage(self.segments, self.config, written, (self.advantage, self.priority))
        index, weight, bad = draw_segments(
            self.priority, self.draws, self.draw_seed, self.draw_offset, self.beta, eps=EPS
        )
        self.index.copy_(index)
        self.weight.copy_(weight)
        self._metrics.draw(bad)

    def _gather_observations(self) -> None:
        """e, but for the smaller fields."""
        self.segments.gather_observations(self.index, self.policy, self.batch)

    def _gather(self) -> None:
        """Those, and what the loss wants to know of the minibatch's advantages."""
        batch = self.batch
        self.segments.gather(self.index, self.advantage, batch)
        valid = None if batch.valid is None else batch.valid.flatten()
        advantage_moments(batch.advantage.flatten(), valid, out=self.moments)
        if self.world.size > 1:
            self._join_draws()

    def _join_draws(self) -> None:
        """What the draw's weights and moments are where other ranks have drawn too. All ranks call this together."""
        assert self.moments is not None
        every = self.world.gather(shards.tell(self.priority, EPS, self.moments))
        shards.settle(every, self.world.rank, self.weight, self.beta, self.moments, self.share)

    @torch.no_grad()
    def _join_gradients(self, gradient: PPOGradient) -> Tensor:
        """Give every parameter all ranks' gradient, and the metrics their loss and its STATS; the loss.

        What is not finite on one rank is so in the sum, so that all of them skip the step.
        """
        params = [p for p in self.policy.parameters() if p.grad is not None]
        parts = [p.grad.reshape(-1) for p in params if p.grad is not None]
        flat = torch.cat([*parts, gradient.loss[None], gradient.stats]) * self.share
        self.world.sum_(flat)
        *parts, loss, stats = flat.split([*map(len, parts), 1, len(gradient.stats)])
        for p, part in zip(params, parts, strict=True):
            p.grad = part.view_as(p)
        self._metrics.update(loss[0], stats)  # in place of this rank's own
        return loss[0]

    def _act(
        self,
        obs: Tensor,
        state: Tensor,
        reset: Tensor | None,
        mask: Tensor | None,
        deterministic: bool = False,
        out_state: Tensor | None = None,
    ):
        with self._autocast():
            out = self.policy.step(obs, state, reset, out_state)
        return out, self.policy.sample(out.params, mask, self.generator, deterministic)

    def _autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def _reset_flag(self, t: int, begins: Tensor) -> Tensor | None:
        """Where the recurrent state is zeroed before obs_t."""
        return None if self.config.puffer_compat and t > 0 else begins

    def _reward(self, step: Step, rows: slice = slice(None)) -> Tensor:
        """What a step of the environments at `rows` earned, as it is trained on."""
        reward = step.reward
        if self.reward_normalizer is not None:
            reward = self.reward_normalizer(reward, step.terminated | step.truncated, rows)
        return self._scale(reward)

    def _scale(self, reward: Tensor) -> Tensor:
        limit = 1.0 if self.config.puffer_compat else self.config.reward_clip
        if self.config.reward_scale != 1:
            reward = reward * self.config.reward_scale
        return reward if limit is None else reward.clamp(-limit, limit)

    def _next_value(self, step: Step, state: Tensor, out: Tensor, last: bool) -> None:
        """V(next_obs) where `puff_advantage` will read it: at truncations, and everywhere at the last step."""
        if last or self.device.type != "cpu":
            # On an accelerator all are computed: looking which are needed would wait for the device.
            out.copy_(self._value(step.next_obs, state))
        elif step.truncated.any():
            which = step.truncated.nonzero().squeeze(1)
            out[which] = self._value(step.next_obs[which], state[:, which])

    def _value(self, obs: Tensor, state: Tensor) -> Tensor:
        with self._autocast():
            return self.policy.step(obs, state).value

    def _set_schedules(self) -> None:
        config = self.config
        progress = self.epoch / self.num_epochs
        if config.lr_schedule == "cosine":
            self.lr.fill_(config.lr * 0.5 * (1 + math.cos(math.pi * progress)))
        slope = (1 - config.beta0) * (config.alpha if config.puffer_compat else 1)
        self.beta.fill_(config.beta0 + slope * progress)

    def _begin(self, start: Reset) -> None:
        """Stand at the environments' observations, where every episode begins unless it is continued."""
        self.obs.copy_(start.obs)
        if self.mask is not None and start.action_mask is not None:
            self.mask.copy_(start.action_mask)
        if not start.continued:
            self.state.zero_()
            self.begins.fill_(True)
            self.episodes.forget_running()
            if self.reward_normalizer is not None:
                self.reward_normalizer.forget_running()

    @property
    def global_step(self) -> int:
        """Environment steps taken so far, by all ranks."""
        return self.epoch * self.config.batch * self.world.size

    @property
    def num_epochs(self) -> int:
        """Epochs of the whole run."""
        return self.config.num_epochs // self.world.size

    @torch.no_grad()
    def act(
        self,
        obs: Tensor,
        state: Tensor | None = None,
        reset: Tensor | None = None,
        *,
        deterministic: bool = False,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Actions for N environments, in the environment's shape, and the next recurrent state (None begins anew)."""
        state = self.policy.initial_state(obs.shape[0]) if state is None else state
        out, sample = self._act(obs, state, reset, mask, deterministic)
        return self.policy.actions.to_env(sample.action), out.state

    def metrics(self) -> dict[str, float]:
        """What the updates and episodes since the last call came to, of all ranks, which call this together. Waits for
        the device, once.

        Losses, entropy and KLs are means over the updates that were taken; `fault/skipped_updates` counts the others,
        and `faults()` names what was not finite in them.
        """
        result, self._faults = self._metrics.read(self.lr, self.beta, self.world)
        self._faults = [f"the gradient of {self._bad_parameter()}" if f == "gradient" else f for f in self._faults]
        done = self.episodes.read(self.world.gather)
        result |= {"episode/return": done.mean_return, "episode/length": done.mean_length}
        return result | {"episode/return_std": done.std_return, "episode/count": float(done.episodes)}

    def faults(self) -> list[str]:
        """What was not finite in the updates that the last `metrics` call counted as skipped; empty when none was."""
        return self._faults

    @torch.no_grad()
    def histograms(self) -> dict[str, tuple[float, float, list[float]]]:
        """Of the segments' priorities now, for the dashboard. Waits for the device."""
        found = log_histogram(segment_advantage(self.segments, self.config)[1])
        return {} if found is None else {"priorities": found}

    def phases(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        return self.timer.take()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on, copied; taken between epochs."""
        state = {
            "epoch": self.epoch,
            "policy": self.policy.state_dict(),
            "momentum": {n: self.optimizer.state[p]["momentum"] for n, p in self.policy.named_parameters()},
            "generators": seeding.generator_states({"actions": self.generator}),
            "draw_offset": self.draw_offset,
            "env": self.env.state_dict(),
            "state": self.state,
            "begins": self.begins,
            "episodes": self.episodes.state_dict(),
        }
        if self.reward_normalizer is not None:
            state["reward_normalizer"] = self.reward_normalizer.state_dict()
        return tree_map_only(Tensor, torch.clone, state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s value, copied. Where the environment cannot continue, new episodes begin."""
        self.epoch = state["epoch"]
        self._metrics.forget()
        self.policy.load_state_dict(state["policy"])
        for name, p in self.policy.named_parameters():
            self.optimizer.state[p]["momentum"].copy_(state["momentum"][name])
        seeding.restore_generators({"actions": self.generator}, state["generators"])
        self.draw_offset.copy_(state["draw_offset"])
        self.episodes.load_state_dict(state["episodes"])
        if self.reward_normalizer is not None:
            self.reward_normalizer.load_state_dict(state["reward_normalizer"])
        self.state.copy_(state["state"])
        self.begins.copy_(state["begins"])
        self._begin(self.env.load_state_dict(state["env"]))

    def release_graphs(self) -> None:
        """Let go of what was captured: it holds on to the ranks' connection, which cannot be closed before."""
        for run in (self._run_draw, self._run_update, self._run_last_update):
            run.release()

    def close(self) -> None:
        """Close the environments."""
        self.env.close()

    def _bad_parameter(self) -> str:
        """The parameter whose gradient was not finite at the last step skipped for it."""
        place = int(self.optimizer.first_bad)
        for name, p in self.policy.named_parameters():
            if place < p.numel():
                return name
            place -= p.numel()
        raise AssertionError(place)
