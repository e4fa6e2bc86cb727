"""Double DQN with n-step returns, dueling heads and prioritized replay.

Each step of N environments is followed by the updates that are due:

    step:     act with epsilon or noise; store the transitions, which enter with the largest priority so far
    update:   a. draw a batch, P(i) ~ (|td_i| + eps)^alpha
              b. target r + gamma^m Q_target(s', argmax_a Q(s', a)), of n-step returns
              c. td error, weighted Huber loss (or the cross-entropy of C51), backward
              d. clip, Adam
              e. priorities from the td errors, unweighted (or from the KL divergence)
              f. now and then move the target network

The action of the next step is chosen before the updates, so that environments on the host step while a GPU learns.
"""

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from sharpwave.algos.dqn_checks import make_replay, number_of_actions
from sharpwave.algos.dqn_config import DQNConfig
from sharpwave.algos.dqn_metrics import ReturnCheck, UpdateMetrics, join_numbers, replay_metrics
from sharpwave.algos.ppo_metrics import log_histogram
from sharpwave.envs.base import Reset, Step, VectorEnv
from sharpwave.envs.stats import EpisodeStats
from sharpwave.nn.q_network import QNetwork, greedy
from sharpwave.ops import _backends
from sharpwave.ops.dqn_loss import c51_loss, dqn_loss
from sharpwave.ops.q_mlp_loss import q_mlp_gradient, q_mlp_loss
from sharpwave.optim.adam import FlatAdam, flatten_parameters, in_memory_order
from sharpwave.optim.muon import Muon
from sharpwave.replay.nest import Batch
from sharpwave.run import seeding
from sharpwave.run.distributed import ALONE, World
from sharpwave.run.environment import make_env
from sharpwave.run.errors import UserError
from sharpwave.run.graphs import Captured
from sharpwave.run.streams import SideStream
from sharpwave.run.timing import PhaseTimer

__all__ = ["DQN", "DQNConfig"]

BLOCK = 16  # updates in one graph, at most: a launch costs the host as much as a small update costs the GPU


class DQN:
    """The trainer. `train_epoch` is `config.epoch_steps` steps of every environment, and the updates due after each.

    Args:
        config: resolved for this machine if it is not yet.
        env: an environment of your own; by default `sharpwave.envs.make(config.env, ...)`.
        world: the ranks that train together: num_envs, batch_size and buffer_size are each rank's, total_steps and
            learning_starts theirs together.

    Raises:
        UserError: the configuration does not fit the machine, itself or the environment.
    """

    shared: ClassVar = ("epoch", "updates", "held_steps", "due", "policy", "target", "optimizer")
    """What of `state_dict` all ranks hold alike."""

    def __init__(self, config: DQNConfig, env: VectorEnv | None = None, world: World = ALONE):
        self.world, rank = world, world.rank
        self._gather = world.gather if world.size > 1 else None
        self.config = config = config.resolved(torch.cuda.is_available())
        self.device = torch.device(config.device)
        assert config.num_envs is not None
        self.env = env or make_env(config, self.device)
        if self.env.num_envs != config.num_envs:
            raise UserError(f"the environment has {self.env.num_envs} copies, the configuration {config.num_envs}")
        if not self.num_epochs:
            raise UserError(
                f"--total-steps must be at least one epoch of all ranks, {config.batch * world.size} ({world.size} "
                f"ranks x {config.num_envs} environments x epoch-steps {config.epoch_steps}); got "
                f"{config.total_steps}: raise it, or lower --num-envs or --epoch-steps"
            )
        self.num_actions = number_of_actions(self.env)

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seeding.stream_seed(config.seed, 0, "weights"))
            policy = QNetwork(
                self.env.observation, self.num_actions, config.network, config.hidden, config.layers,
                frames=config.frame_stack, dueling=config.dueling, noisy=config.noisy, atoms=config.atoms,
                normalize=config.normalize_obs,
            )  # fmt: skip
        world.take_first_(policy.parameters())
        self.policy = policy.to(self.device)
        self.target = copy.deepcopy(self.policy).requires_grad_(False)
        self.target.normalizer = None  # it is given what the policy has made ready
        self.atoms = None
        if config.atoms > 1:
            self.atoms = torch.linspace(config.v_min, config.v_max, config.atoms, device=self.device)
        narrow = config.dtype == "bfloat16" or (
            config.dtype == "auto" and policy.is_image and self.device.type == "cuda"
        )
        self.dtype = torch.bfloat16 if narrow else torch.float32
        self.lr = torch.tensor(config.lr, device=self.device)
        parameters = list(self.policy.parameters())
        if config.optimizer == "muon":
            self.optimizer = Muon(parameters, self.lr, config.momentum, config.max_grad_norm)
            online = flatten_parameters(parameters)
        else:
            self.optimizer = FlatAdam(parameters, self.lr, config.adam_eps, config.max_grad_norm)
            online = self.optimizer.flat
        self._weights = online, flatten_parameters(self.target.parameters())
        self._is_fused = self.policy.is_narrow and config.optimizer == "adam" and self.dtype == torch.float32
        self._is_fused &= _backends.choose("q_mlp_loss", self.device.type) == "triton"

        self.replay = make_replay(config, self.env, world, self.device)
        self._batches: list[Batch] = []
        self._side = [SideStream(self.device) for _ in range(2)]

        self.generator = seeding.generator(self.device, config.seed, rank, "actions")
        self.noise_generator = seeding.generator(self.device, config.seed, rank, "noise")
        self.epoch = self.updates = 0
        self.held_steps = 0
        """Environment steps of all ranks since the replay was last empty."""
        self.due = 0.0
        """Updates due, a fraction of one."""
        self.timer = PhaseTimer(self.device)
        self.episodes = EpisodeStats(config.num_envs, self.device)
        self._metrics = UpdateMetrics(self.device, config.batch_size)
        self._check = ReturnCheck(config.num_envs, config.gamma, self.device)
        self._faults: list[str] = []
        self._run_step = Captured(
            self._step, self.device, [self.generator, *self.env.generators], enabled=self.env.capturable
        )
        self._run_block, self._run_one = (
            Captured(lambda count=count: self._learn(count), self.device, [self.noise_generator])
            for count in (self.block, 1)
        )

        self.epsilon = torch.zeros((), device=self.device)
        self.action = torch.zeros(config.num_envs, dtype=torch.int64, device=self.device)
        self.begins = torch.ones(config.num_envs, dtype=torch.bool, device=self.device)
        start = self.env.reset(seeding.stream_seed(config.seed, rank, "env"))
        self.obs = start.obs.clone()
        self.frames = self._stack(None, self.obs, self.begins)
        on_host = self.device.type == "cuda" and not self.env.capturable
        self._host_action = torch.zeros(config.num_envs, dtype=torch.int64, pin_memory=True) if on_host else None
        self._acted = torch.cuda.Event() if on_host else None
        self._begin(start)

    @property
    def block(self) -> int:
        """Updates of one graph, where as many are due."""
        assert self.config.num_envs is not None
        return max(1, min(BLOCK, int(self.config.num_envs * self.config.updates_per_step)))

    def train_epoch(self) -> None:
        """Steps of all environments and the updates due after each. On a GPU nothing is read back."""
        config = self.config
        assert config.num_envs is not None
        at_once = config.num_envs * self.world.size
        first = max(config.learning_starts, config.n_step * at_once)
        if config.lr_schedule == "linear":
            self.lr.fill_(config.lr * (1 - self.epoch / self.num_epochs))
        for t in range(config.epoch_steps):
            self.epsilon.fill_(self._epsilon(self.global_step + t * at_once))
            with self._outer("collect"):
                self._run_step()
            self.held_steps += at_once
            if self.held_steps < first:
                continue
            self.due += config.num_envs * config.updates_per_step
            with self._outer("learn"):
                self.update(int(self.due))
            self.due -= int(self.due)
        self.epoch += 1

    def update(self, count: int) -> None:
        """Train on `count` batches."""
        interval = self.config.target_interval
        while count > 0:
            whole = count >= self.block and (interval == 1 or interval - self.updates % interval >= self.block)
            (self._run_block if whole else self._run_one)()
            done = self.block if whole else 1
            self.updates += done
            count -= done
            if interval > 1 and self.updates % interval == 0:
                self._move_target()

    @torch.no_grad()
    def _step(self) -> None:
        with self._inner("env"):
            step = self.env.step(self._action_for_env())
        with self._inner("insert"):
            reward = self._scale(step.reward)
            self._store(step, reward)
            self.episodes.update(step)
            self._check.step(step, reward)
            # In place, so that a captured step goes on where the last one stopped.
            self.obs.copy_(step.obs)
            self.begins.copy_(step.begins)
            if self.policy.normalizer is not None:
                self.policy.normalizer.update(self.obs, self._gather)
        self._choose()

    def _store(self, step: Step, reward: Tensor) -> None:
        fields = dict(obs=self.obs, action=self.action, reward=reward, next_obs=step.next_obs)
        ends = dict(terminated=step.terminated, truncated=step.truncated)
        if step.valid is not None:
            # No transition took place: what is stored ends an episode of one step, and its loss is left out.
            ends |= dict(truncated=step.truncated | ~step.valid, valid=step.valid)
        self.replay.add(fields | ends)

    @torch.no_grad()
    def _choose(self) -> None:
        """The action at `obs`, which the coming step takes."""
        with self._inner("act"):
            self.frames.copy_(self._stack(self.frames, self.obs, self.begins))
            self.policy.draw_noise(len(self.obs), self.generator)
            with self._autocast():
                output = self.policy(self._shown(self.frames))
            action, value = greedy(output, self.atoms)
            self._check.value(value, self.begins)
            self.action.copy_(self._explore(action, self.epsilon))
            if self._host_action is not None and self._acted is not None:
                self._host_action.copy_(self.action, non_blocking=True)
                self._acted.record()

    def _explore(self, action: Tensor, epsilon: Tensor) -> Tensor:
        if self.config.noisy:
            return action
        n = len(action)
        random = torch.randint(self.num_actions, (n,), generator=self.generator, device=self.device)
        return torch.where(torch.rand(n, generator=self.generator, device=self.device) < epsilon, random, action)

    def _learn(self, count: int) -> None:
        """`count` updates. On a GPU the priorities are written, and the next batch drawn, beside the backward pass."""
        with self._inner("sample"):
            batch = self._draw(0)  # a
        for k in range(count):
            with self._inner("train"):
                td_error, gradient = self._loss(batch)  # b, c
            if "valid" in batch:
                td_error = td_error * batch.valid
            self._side[1].join()  # the last update's metrics
            with self._side[0]():
                with self._inner("priorities"):
                    self.replay.update_priorities(batch.indices, td_error, batch.generations)  # e
                if k + 1 < count:
                    with self._inner("sample"):
                        batch = self._draw(1 - k % 2)
            with self._inner("train"):
                grad, stats = gradient()
                if self.world.size > 1:
                    grad, stats = self._join_gradients(grad, stats)
                self._descend(grad, stats)  # d
                if self.config.target_interval == 1:
                    self._move_target()  # f
            with self._side[1](), torch.no_grad():
                self._metrics.update(stats, self.optimizer.grad_norm, td_error)
            self._side[0].join()
        self._side[1].join()

    def _draw(self, which: int) -> Batch:
        """The next batch, in memory that the one before it does not use."""
        if which >= len(self._batches):
            self._batches.append(self.replay.sample(self.config.batch_size, group=self._gather))
            return self._batches[which]
        return self.replay.sample(self.config.batch_size, out=self._batches[which], group=self._gather)

    def _loss(self, batch: Batch) -> tuple[Tensor, Callable[[], tuple[Tensor | None, Tensor]]]:
        """TD errors, and what computes the loss's gradient and returns it, laid out as the weights, or None where the
        parameters hold it; and the loss's STATS.

        On a GPU the three passes run beside each other.
        """
        config = self.config
        weight = batch.weights if "valid" not in batch else batch.weights * batch.valid
        rows = (batch.reward, batch.discount, weight)
        if self._is_fused:
            x, following = self.policy.prepare(batch.obs), self.policy.prepare(batch.next_obs)
            fused = q_mlp_loss(
                *self._weights, x, following, batch.action, *rows, hidden=config.hidden, k=config.hidden,
                actions=self.num_actions, dueling=config.dueling, double=config.double, huber=config.huber,
            )  # fmt: skip
            return fused.td_error, lambda: q_mlp_gradient(fused)
        self.policy.draw_noise(1, self.noise_generator)
        self.target.draw_noise(1, self.noise_generator)
        next_output = None
        with self._autocast():
            following = self.policy.prepare(batch.next_obs)
        with self._side[0](), torch.no_grad(), self._autocast():
            next_target = self.target.output(following)
        if config.double:
            with self._side[1](), torch.no_grad(), self._autocast():
                next_output = self.policy.output(following)
        with self._autocast():
            output = self.policy(batch.obs)
        for side in self._side:
            side.join()
        with torch.no_grad():
            if self.atoms is not None:
                loss = c51_loss(output, batch.action, next_output, next_target, *rows, self.atoms)
            else:
                loss = dqn_loss(output, batch.action, next_output, next_target, *rows, huber=config.huber)

        def backward() -> tuple[None, Tensor]:
            self.optimizer.zero_grad()
            output.backward(loss.gradient)
            return None, loss.stats

        return loss.td_error, backward

    @torch.no_grad()
    def _join_gradients(self, grad: Tensor | None, stats: Tensor) -> tuple[Tensor | None, Tensor]:
        """The average of all ranks' gradients, where it was, and of their losses; the other STATS as they are.

        What is not finite on one rank is so in the sum, so that all of them skip the step.
        """
        params, flat_order = list(self.policy.parameters()), isinstance(self.optimizer, FlatAdam)
        held = [p.grad for p in params if p.grad is not None] if grad is None else []
        parts = [in_memory_order(g) if flat_order else g.reshape(-1) for g in held] if grad is None else [grad]
        flat = torch.cat([*parts, stats[:1]])
        self.world.sum_(flat)
        flat /= self.world.size
        joint, loss = flat.split([len(flat) - 1, 1])
        stats = torch.cat([loss, stats[1:]])
        if flat_order:
            return joint, stats
        for p, part in zip(params, joint.split([p.numel() for p in params]), strict=True):
            p.grad = part.view_as(p)
        return None, stats

    def _descend(self, grad: Tensor | None, stats: Tensor) -> None:
        if grad is None:
            self.optimizer.step(keep=stats[0])
        else:
            assert isinstance(self.optimizer, FlatAdam)
            self.optimizer.step(keep=stats[0], grad=grad)

    @torch.no_grad()
    def _move_target(self) -> None:
        online, target = self._weights
        if self.config.tau == 1:
            target.copy_(online)
        else:
            target.lerp_(online, self.config.tau)

    def _autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def _inner(self, phase: str):
        """Phases of a step and an update, where they run one after the other: not on a GPU."""
        return self.timer(phase) if self.device.type != "cuda" else nullcontext()

    def _outer(self, phase: str):
        return self.timer(phase) if self.device.type == "cuda" else nullcontext()

    def _scale(self, reward: Tensor) -> Tensor:
        limit = self.config.reward_clip
        reward = reward * self.config.reward_scale
        return reward if limit is None else reward.clamp(-limit, limit)

    def _epsilon(self, step: int) -> float:
        config = self.config
        part = config.epsilon_fraction * config.total_steps
        done = min(step / part, 1.0) if part > 0 else 1.0
        return config.epsilon_start + (config.epsilon_end - config.epsilon_start) * done

    def _action_for_env(self) -> Tensor:
        if self._host_action is None or self._acted is None:
            return self.action
        self._acted.synchronize()  # waits for the action, not for the updates that were launched after it
        return self._host_action

    def _stack(self, frames: Tensor | None, obs: Tensor, begins: Tensor) -> Tensor:
        """(N, frame_stack, *shape), the newest last; an episode's first frame repeated where it begins."""
        first = obs.unsqueeze(1).expand(-1, self.config.frame_stack, *obs.shape[1:])
        if frames is None:
            return first.clone()
        moved = torch.cat([frames[:, 1:], obs.unsqueeze(1)], 1)
        return torch.where(begins.view(-1, *[1] * obs.ndim), first, moved)

    def _shown(self, frames: Tensor) -> Tensor:
        return frames if self.config.frame_stack > 1 else frames[:, 0]

    def _begin(self, start: Reset) -> None:
        """Stand at the environments' observations, where every episode begins unless it is continued."""
        if start.continued:
            return
        self.obs.copy_(start.obs)
        self.begins.fill_(True)
        self.episodes.forget_running()
        self._check.forget_running()
        self.epsilon.fill_(self._epsilon(self.global_step))
        self._choose()

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
        """Actions for N environments, and the frames seen so far, which are the state (None begins anew)."""
        begins = torch.ones(len(obs), dtype=torch.bool, device=obs.device) if reset is None else reset
        frames = self._stack(state, obs, begins)
        if deterministic:
            self.policy.drop_noise()
        else:
            self.policy.draw_noise(len(obs), self.generator)
        with self._autocast():
            output = self.policy(self._shown(frames))
        action, _ = greedy(output, self.atoms)
        if not deterministic:
            action = self._explore(action, torch.tensor(self.config.epsilon_end, device=self.device))
        return action, frames

    def metrics(self) -> dict[str, float]:
        """What the updates and episodes since the last call came to, of all ranks, which call this together. Waits for
        the device.

        `fault/skipped_updates` counts updates that were not taken, and `faults()` names what was not finite in them.
        """
        result, self._faults = self._metrics.read()
        self._faults = [f"the gradient of {self._bad_parameter()}" if f == "gradient" else f for f in self._faults]
        result["episode/overestimation"] = self._check.read()
        result |= replay_metrics(self.replay.stats())
        result |= {"schedule/lr": self.lr.item(), "schedule/epsilon": 0.0 if self.config.noisy else self.epsilon.item()}
        if self.world.size > 1:
            result = join_numbers(result, self.world)
        done = self.episodes.read(self._gather)
        result |= {"episode/return": done.mean_return, "episode/length": done.mean_length}
        return result | {"episode/return_std": done.std_return, "episode/count": float(done.episodes)}

    def faults(self) -> list[str]:
        """What was not finite in the updates that the last `metrics` call counted as skipped; empty when none was."""
        return self._faults

    def histograms(self) -> dict[str, tuple[float, float, list[float]]]:
        """Of the priorities p^alpha held and the last update's TD errors, for the dashboard. Waits for the device."""
        leaves = self.replay.state.tree.leaves
        shown = {"priorities": leaves[leaves > 0]}
        if self.updates:
            shown["TD errors"] = self._metrics.td_error.abs().nan_to_num(0, 0)
        found = {name: log_histogram(values) for name, values in shown.items()}
        return {name: histogram for name, histogram in found.items() if histogram is not None}

    def phases(self) -> dict[str, float]:
        """Seconds by phase since the last call."""
        return self.timer.take()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on, copied; taken between epochs."""
        state = {
            "epoch": self.epoch,
            "updates": self.updates,
            "held_steps": self.held_steps,
            "due": self.due,
            "policy": self.policy.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": {n: self.optimizer.state[p] for n, p in self.policy.named_parameters()},
            "generators": seeding.generator_states(self._generators()),
            "env": self.env.state_dict(),
            "acting": self._acting(),
            "episodes": self.episodes.state_dict(),
            "draws": self.replay.state.offset,
            "max_priority": self.replay.state.max_priority,
        }
        state = tree_map_only(Tensor, torch.clone, state)
        return state | ({"replay": self.replay.state_dict()} if self.config.save_replay else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s value, copied. Where the environment cannot continue, new episodes begin."""
        self.epoch, self.updates, self.due = state["epoch"], state["updates"], state["due"]
        self.policy.load_state_dict(state["policy"])
        self.target.load_state_dict(state["target"])
        for name, p in self.policy.named_parameters():
            for key, tensor in self.optimizer.state[p].items():
                tensor.copy_(state["optimizer"][name][key])
        seeding.restore_generators(self._generators(), state["generators"])
        self.episodes.load_state_dict(state["episodes"])
        for name, tensor in self._acting().items():
            tensor.copy_(state["acting"][name])
        self.replay.clear()
        self.held_steps = 0
        if "replay" in state:
            self.replay.load_state_dict(state["replay"])
            self.held_steps = state["held_steps"]
        self.replay.state.offset.copy_(state["draws"])
        self.replay.state.max_priority.copy_(state["max_priority"])
        if self._host_action is not None and self._acted is not None:
            self._host_action.copy_(self.action)
        self._begin(self.env.load_state_dict(state["env"]))

    def release_graphs(self) -> None:
        """Let go of what was captured: it holds on to the ranks' connection, which cannot be closed before."""
        for run in (self._run_step, self._run_block, self._run_one):
            run.release()

    def close(self) -> None:
        """Close the environments."""
        self.env.close()

    def _acting(self) -> dict[str, Tensor]:
        acting = {"obs": self.obs, "frames": self.frames, "action": self.action, "begins": self.begins}
        return acting | {f"check.{name}": tensor for name, tensor in self._check.state().items()}

    def _generators(self) -> dict[str, torch.Generator]:
        return {"actions": self.generator, "noise": self.noise_generator}

    def _bad_parameter(self) -> str:
        """The parameter whose gradient was not finite at the last step skipped for it."""
        place = int(self.optimizer.first_bad)
        for name, p in self.policy.named_parameters():
            if place < p.numel():
                return name
            place -= p.numel()
        raise AssertionError(place)
