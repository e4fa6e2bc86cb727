"""Faults that users of other replay buffers reported, as small cases with the right value. Each names its report."""

import math
import subprocess
import sys
from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import sharpwave
from sharpwave.envs.gymnasium import GymnasiumVector
from sharpwave.replay import PrioritizedReplay, SequenceReplay

CPU = pytest.mark.parametrize("backend", ["cpu", "reference"])


def filled(n, capacity=None, **options):
    buffer = PrioritizedReplay(capacity or n, **options)
    buffer.add(x=torch.arange(n))
    return buffer


def set_priorities(buffer, p):
    """|td| + eps = p."""
    p = torch.tensor(p, dtype=torch.float32)
    buffer.update_priorities(torch.arange(len(p)), p - buffer.eps)


# Priorities and weights


@CPU
def test_new_items_enter_at_the_largest_priority_with_alpha_applied_once(backend):
    """pytorch/rl#2211: the leaf is 16^0.5 = 4, not 2. ray#11750: after update(5), the new item has priority 5."""
    buffer = filled(2, 4, alpha=0.5, backend=backend)
    set_priorities(buffer, [16.0])
    buffer.add(x=torch.tensor([9]))
    assert buffer.priorities(torch.tensor([2])).item() == pytest.approx(4, rel=1e-6)
    buffer = filled(2, 4, alpha=1.0, backend=backend)
    set_priorities(buffer, [5.0])
    buffer.add(x=torch.tensor([9]))
    assert buffer.priorities(torch.tensor([2])).item() == pytest.approx(5, rel=1e-6)
    assert float(buffer.max_priority) == pytest.approx(5, rel=1e-6)


@CPU
def test_alpha_zero_draws_uniformly(backend):
    """pytorch/rl#2164."""
    buffer = filled(4, alpha=0.0, beta=1.0, backend=backend)
    set_priorities(buffer, [1.0, 100.0, 0.01, 5.0])
    batch = buffer.sample(4000)
    assert (batch.weights == 1).all() and (batch.probabilities == 0.25).all()
    assert torch.bincount(batch.x).min() > 900


@CPU
def test_changing_alpha_changes_what_is_held(backend):
    """pytorch/rl#4014: p = [1, 16], alpha from 0.5 to 1: P = [1/17, 16/17]."""
    buffer = filled(2, alpha=0.5, backend=backend)
    set_priorities(buffer, [1.0, 16.0])
    buffer.alpha = 1.0
    batch = buffer.sample(1000)
    want = torch.tensor([1 / 17, 16 / 17])[batch.x]
    torch.testing.assert_close(batch.probabilities, want, rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="alpha"):
        buffer.alpha = -1


@CPU
def test_weights_by_hand(backend):
    """baselines#1131: p = [1, 4], N = 2, beta = 1: (2/5)^-1 = 2.5 and (8/5)^-1 = 0.625, divided by 2.5: [1, 0.25]."""
    buffer = filled(2, alpha=1.0, beta=1.0, backend=backend)
    set_priorities(buffer, [1.0, 4.0])
    batch = buffer.sample(100)
    torch.testing.assert_close(batch.weights, torch.tensor([1, 0.25])[batch.x], rtol=1e-5, atol=0)
    buffer = filled(2, alpha=1.0, beta=1.0, weight_norm=None, backend=backend)
    set_priorities(buffer, [1.0, 4.0])
    batch = buffer.sample(100)
    torch.testing.assert_close(batch.weights, torch.tensor([2.5, 0.625])[batch.x], rtol=1e-5, atol=0)


@CPU
@pytest.mark.parametrize("norm, weight", [("buffer", 0.25), ("batch", 1.0)])
def test_what_the_largest_weight_is_taken_over(norm, weight, backend):
    """takoika#2, chainerrl#570: p = [1, 4, 4], the batch {4, 4}."""
    buffer = filled(3, alpha=1.0, beta=1.0, weight_norm=norm, backend=backend)
    set_priorities(buffer, [1.0, 4.0, 4.0])
    batch = next(b for b in iter(lambda: buffer.sample(2), None) if (b.x > 0).all())
    torch.testing.assert_close(batch.weights, torch.full((2,), weight), rtol=1e-5, atol=0)


@CPU
@pytest.mark.parametrize("norm", ["batch", "buffer", None])
def test_a_nearly_empty_buffer_has_finite_weights(norm, backend):
    """MorvanZhou#183: capacity 1000, 10 filled."""
    buffer = filled(10, 1000, beta=1.0, weight_norm=norm, backend=backend)
    batch = buffer.sample(64)
    assert batch.x.max() < 10
    torch.testing.assert_close(batch.weights, torch.ones(64), rtol=1e-6, atol=0)


@CPU
def test_a_td_error_of_zero(backend):
    """alf#1232: eps 1e-6, alpha 0.5: leaf 1e-3."""
    buffer = filled(2, alpha=0.5, eps=1e-6, backend=backend)
    buffer.update_priorities(torch.tensor([0]), torch.tensor([0.0]))
    assert buffer.priorities(torch.tensor([0])).item() == pytest.approx(1e-3, rel=1e-5)


@CPU
def test_priorities_do_not_depend_on_beta(backend):
    """Shmuma/ptan#36. tensorforce#267: the gradient scales with w."""
    leaves = []
    for beta in (0.0, 0.4, 1.0):
        buffer = filled(50, beta=beta, backend=backend)
        batch = buffer.sample(32)
        td = (batch.x.float() - 20).requires_grad_()
        (batch.weights * td.square()).sum().backward()
        torch.testing.assert_close(td.grad, 2 * batch.weights * td.detach())
        buffer.update_priorities(batch.indices, td, batch.generations)
        leaves.append(buffer.state.tree.leaves.clone())
    assert torch.equal(leaves[0], leaves[1]) and torch.equal(leaves[0], leaves[2])


@CPU
def test_bad_td_errors_keep_the_largest_priority(backend):
    """seed_rl#27, MorvanZhou#54."""
    buffer = filled(4, alpha=1.0, backend=backend)
    buffer.update_priorities(torch.arange(4), torch.tensor([1.0, math.nan, math.inf, -3.0]))
    largest = 3 + 1e-6
    assert buffer.priorities(torch.arange(4)).tolist() == pytest.approx([1, largest, largest, largest], rel=1e-6)
    stats = buffer.stats()
    assert stats["bad_td_errors"] == 2
    assert math.isfinite(stats["total_priority"])
    buffer.update_priorities(torch.tensor([0]), torch.tensor([1e30]))
    assert buffer.priorities(torch.tensor([0])).item() == pytest.approx(1e6, rel=1e-6)


@CPU
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_td_errors_of_any_precision(dtype, backend):
    buffer = filled(3, alpha=1.0, backend=backend)
    buffer.update_priorities(torch.arange(3), torch.tensor([0.5, -2.0, 4.0], dtype=dtype).requires_grad_())
    assert buffer.priorities(torch.arange(3)).tolist() == pytest.approx([0.5, 2, 4], rel=1e-5)


@CPU
def test_beta_goes_from_first_to_last(backend):
    buffer = filled(10, beta=(0.4, 1.0, 100), backend=backend)
    seen = []
    for _ in range(6):
        seen.append(float(buffer.beta))
        buffer.sample(25)
    assert seen == pytest.approx([0.4, 0.55, 0.7, 0.85, 1.0, 1.0])
    buffer.beta = 0.5
    assert float(buffer.beta) == 0.5


@CPU
def test_the_largest_priority_within_the_buffer(backend):
    buffer = filled(2, 2, alpha=1.0, max_priority_over="buffer", backend=backend)
    set_priorities(buffer, [50.0, 2.0])
    buffer.add(x=torch.tensor([7]))  # overwrites the 50, but enters with it
    assert buffer.priorities(torch.tensor([0, 1])).tolist() == pytest.approx([50, 2])
    set_priorities(buffer, [3.0])
    assert float(buffer.max_priority) == pytest.approx(3)
    buffer.add(x=torch.tensor([7]))
    assert buffer.priorities(torch.tensor([0, 1])).tolist() == pytest.approx([3, 3])


# Indices


@CPU
def test_an_update_of_an_overwritten_item_is_dropped(backend):
    """ray#6534, cleanrl#511."""
    buffer = filled(4, alpha=1.0, backend=backend)
    batch = buffer.sample(1)
    slot, rest = batch.indices.item(), 4
    for k in range(rest):
        buffer.add(x=torch.tensor([100 + k]))
    buffer.update_priorities(batch.indices, torch.tensor([77.0]), batch.generations)
    assert buffer.priorities(torch.tensor([slot])).item() == 1
    assert buffer.stats()["stale"] == 1 and float(buffer.max_priority) == 1


@CPU
def test_indices_out_of_range_never_wrap_around(backend):
    """muzero-general#23, pytorch/rl#2206."""
    buffer = filled(5, 5, backend=backend)
    before = buffer.state.tree.leaves.clone()
    for bad in (5, -1, 2**40):
        with pytest.raises(IndexError, match=r"\[0, 5\)"):
            buffer.update_priorities(torch.tensor([1, bad]), torch.tensor([9.0, 9.0]))
    assert torch.equal(buffer.state.tree.leaves, before)


@CPU
def test_of_equal_indices_the_last_wins(backend):
    buffer = filled(5, alpha=1.0, backend=backend)
    for _ in range(100):
        buffer.update_priorities(torch.tensor([3, 3, 3]), torch.tensor([1.0, 2.0, 9.0]))
        assert buffer.priorities(torch.tensor([3])).item() == pytest.approx(9, rel=1e-6)
        assert float(buffer.total_priority) == buffer.state.tree.leaves.double().sum()


@CPU
def test_clear_keeps_the_seeds_promise(backend):
    """coax#24."""
    buffer = filled(50, seed=4, backend=backend)
    first = [buffer.sample(10).indices for _ in range(3)]
    old = buffer.sample(10)
    buffer.update_priorities(old.indices, torch.rand(10), old.generations)
    buffer.clear()
    assert len(buffer) == 0 and float(buffer.max_priority) == 1
    buffer.add(x=torch.arange(50))
    for indices in first:
        assert torch.equal(buffer.sample(10).indices, indices)
    buffer.update_priorities(old.indices, torch.rand(10), old.generations)
    assert buffer.stats()["stale"] == 10, "updates from before clear() belong to items that are gone"


@CPU
def test_an_update_without_generations_cannot_revive_what_is_gone(backend):
    buffer = PrioritizedReplay(20, num_envs=1, backend=backend)
    for t in range(30):
        buffer.add(**step([t], [t + 1]))
    dead = (buffer.state.tree.leaves == 0).nonzero()[:, 0]
    assert len(dead)
    buffer.update_priorities(dead, torch.full((len(dead),), 5.0))
    assert (buffer.state.tree.leaves[dead] == 0).all() and buffer.stats()["stale"] == len(dead)


@CPU
def test_generations_of_nothing_are_stale(backend):
    """Slots never written (-1), draws of nothing (-2), and steps whose window is not complete yet."""
    buffer = PrioritizedReplay(20, num_envs=1, n_step=3, backend=backend)
    last = [buffer.add(**step([t], [t + 1])) for t in range(5)][-1]
    indices = torch.cat([last, torch.tensor([15, 16])])
    generation = torch.cat([buffer.state.generation[last], torch.tensor([-1, -2])])
    assert generation[0] >= 0
    buffer.update_priorities(indices, torch.full((3,), 5.0), generation)
    assert (buffer.state.tree.leaves[indices] == 0).all() and buffer.stats()["stale"] == 3
    assert float(buffer.max_priority) == 1


# Episodes


def step(obs, next_obs, reward=1.0, terminated=False, truncated=False):
    n = len(obs)
    return dict(
        obs=torch.tensor(obs),
        next_obs=torch.tensor(next_obs),
        reward=torch.full((n,), float(reward)),
        terminated=torch.full((n,), terminated),
        truncated=torch.full((n,), truncated),
    )


@CPU
def test_windows_stay_in_one_trajectory(backend):
    """pytorch/rl#2208: trajectories [3, 3, 0, 1, 1, 1, 2, 2, 2, 3] in a ring, windows of 3: only 1, 2, and 3 across
    the ring's seam. Here an end takes a slot too, so the ring that they fill is 14 long."""
    ring = 14
    buffer = SequenceReplay(ring, num_envs=1, length=3, backend=backend)
    lengths = [(9, 9), (0, 2), (1, 3), (2, 3), (3, 4)]
    for trajectory, length in lengths:
        for k in range(length):
            buffer.add(**step([trajectory], [trajectory], terminated=k == length - 1))
    batch = buffer.sample(500)
    assert (batch.obs == batch.obs[:, :1]).all()
    assert set(batch.obs[:, 0].tolist()) == {1, 2, 3}
    starts = set(batch.indices.tolist())
    assert any(s % ring + 3 > ring for s in starts), "a window crosses the seam"


@CPU
def test_every_start_is_as_likely(backend):
    """pytorch/rl#1774: length 2, window 1: both starts half the time."""
    buffer = SequenceReplay(8, num_envs=1, length=1, backend=backend)
    buffer.add(**step([0], [1]))
    buffer.add(**step([1], [2], terminated=True))
    share = buffer.sample(4000).obs.float().mean()
    assert abs(share - 0.5) < 0.04


@CPU
@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_a_frame_stack_never_reaches_across_an_end(kind, backend):
    """dopamine#213; and #228: one terminal item an episode."""
    buffer = PrioritizedReplay(40, num_envs=1, frame_stack=4, backend=backend)
    for t in range(30):
        buffer.add(**step([t], [t + 1] if t % 5 < 4 else [1000 + t], **{kind: t % 5 == 4}))
    batch = buffer.sample(400)
    episode = batch.obs // 5
    assert (episode == episode[:, -1:]).all()
    assert (batch.obs[:, -1] - batch.obs[:, 0] == (batch.obs[:, -1] % 5).clamp(max=3)).all()
    ends = batch[kind]
    assert torch.equal(ends, batch.obs[:, -1] % 5 == 4)
    assert (batch.next_obs[ends, -1] == 1000 + batch.obs[ends, -1]).all()
    assert (batch.next_obs[ends, :-1] == batch.obs[ends, 1:]).all()


@CPU
def test_the_next_observation_at_a_truncation_is_the_true_one(backend):
    """SB3#934, cleanrl#460: not the next episode's first."""
    buffer = PrioritizedReplay(30, num_envs=2, backend=backend)
    for t in range(40):
        end = t % 4 == 3
        buffer.add(**step([t, t], [777, 778] if end else [t + 1, t + 1], truncated=end))
    batch = buffer.sample(300)
    cut = batch.truncated
    assert set(batch.next_obs[cut].tolist()) == {777, 778}
    assert (batch.next_obs[~cut] == batch.obs[~cut] + 1).all()
    assert (batch.discount == 0.99).all()


@CPU
def test_n_step_returns_by_hand(backend):
    """AgileRL#159: r = [1, 1, 1], gamma 0.5, n = 3: 1 + 0.5 + 0.25 = 1.75; ending at the second: 1.5."""
    buffer = PrioritizedReplay(20, num_envs=1, n_step=3, gamma=0.5, backend=backend)
    for t in range(4):
        buffer.add(**step([t], [t + 1]))
    assert len(buffer) == 2, "the newest two wait for their third step"
    batch = buffer.sample(20)
    assert (batch.reward == 1.75).all() and (batch.discount == 0.125).all()
    assert (batch.next_obs == batch.obs + 3).all()
    buffer.clear()
    buffer.add(**step([0], [1]))
    buffer.add(**step([1], [99], terminated=True))
    batch = buffer.sample(50)
    assert set(zip(batch.obs.tolist(), batch.reward.tolist(), strict=True)) == {(0, 1.5), (1, 1.0)}
    assert (batch.discount == 0).all() and (batch.next_obs == 99).all()


@CPU
@pytest.mark.parametrize("terminated, truncated", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_terminated_and_truncated_are_apart(terminated, truncated, backend):
    """SB3#1864: only termination ends the value."""
    buffer = PrioritizedReplay(20, num_envs=1, n_step=2, gamma=0.5, backend=backend)
    buffer.add(**step([0], [1], terminated=bool(terminated), truncated=bool(truncated)))
    buffer.add(**step([5], [6]))
    buffer.add(**step([6], [7]))
    batch = buffer.sample(60)
    first = batch.obs == 0
    if not (terminated or truncated):
        assert (batch.reward[first] == 1.5).all() and (batch.discount[first] == 0.25).all()
        return
    assert (batch.reward[first] == 1).all() and (batch.next_obs[first] == 1).all()
    assert (batch.discount[first] == (0.0 if terminated else 0.5)).all()


def test_constant_reward_through_truncations():
    """CleanRL#198: reward 1, cut after 10 steps, gamma 0.9: V tends to 10, not to (1 - 0.9^10) / 0.1 = 6.5."""
    buffer = PrioritizedReplay(200, num_envs=1, n_step=3, gamma=0.9)
    for t in range(100):
        buffer.add(**step([t % 10], [t % 10 + 1], truncated=t % 10 == 9))
    value = torch.zeros(11)
    for _ in range(300):
        batch = buffer.sample(64)
        target = batch.reward + batch.discount * value[batch.next_obs]
        value[batch.obs] += 0.5 * (target - value[batch.obs])
        value[10] = value[9]  # the state that episodes are cut off in is like any other
    torch.testing.assert_close(value, torch.full((11,), 10.0), atol=0.05, rtol=0)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_autoreset_modes_give_one_set_of_transitions(mode):
    """CleanRL#499, through the environment contract that feeds the buffer."""
    vector = SyncVectorEnv([partial(gymnasium.make, "CartPole-v1", max_episode_steps=30)] * 2, autoreset_mode=mode)
    env = GymnasiumVector(vector)
    buffer = PrioritizedReplay(400, num_envs=2)
    obs, _, _ = env.reset(seed=0)
    gen = torch.Generator().manual_seed(0)
    for _ in range(100):
        now = env.step(torch.randint(0, 2, (2,), generator=gen))
        buffer.add(
            obs=obs, next_obs=now.next_obs, reward=now.reward, terminated=now.terminated, truncated=now.truncated
        )
        obs = now.obs
    env.close()
    # By CartPole's equations, whatever ended: x' = x + 0.02 x_dot, theta' = theta + 0.02 theta_dot.
    batch = buffer.sample(500)
    assert len(buffer) == 200 and batch.terminated.any()
    want = batch.obs[:, [0, 2]] + 0.02 * batch.obs[:, [1, 3]]
    torch.testing.assert_close(batch.next_obs[:, [0, 2]], want, atol=1e-5, rtol=1e-5)


# Keeping


@CPU
@pytest.mark.parametrize("num_envs", [None, 2])
def test_saved_and_loaded_it_continues_with_the_same_draws(tmp_path, num_envs, backend):
    """pytorch/rl#3056, #2506, tianshou#728: the next 1000 draws, bit for bit; and a second save to a new path."""
    buffer = PrioritizedReplay(100, num_envs=num_envs, beta=(0.4, 1.0, 5000), seed=3, backend=backend)
    gen = torch.Generator().manual_seed(0)

    def go(b, k, gen):
        for t in range(k):
            b.add(**step([t, t + 1], [t + 1, t + 2], reward=t, terminated=t % 7 == 6))
            if t > 2:
                batch = b.sample(16)
                b.update_priorities(batch.indices, torch.randn(16, generator=gen), batch.generations)

    go(buffer, 80, gen)
    buffer.save(tmp_path / "one")
    copy = PrioritizedReplay.load(tmp_path / "one", backend=backend)
    copy.save(tmp_path / "two")
    copy = PrioritizedReplay.load(tmp_path / "two", backend=backend)
    for _ in range(1000):
        a, b = buffer.sample(1), copy.sample(1)
        assert all(torch.equal(a[k], b[k]) for k in a)
    go(buffer, 10, torch.Generator().manual_seed(5))
    go(copy, 10, torch.Generator().manual_seed(5))
    a, b = buffer.sample(64), copy.sample(64)
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("frames", [1, 2, 4])
@pytest.mark.parametrize("steps", range(14, 46))
def test_frames_that_only_stacks_still_show_are_kept(frames, steps):
    """Where the write head is next to the ring's end, the slots after it hold frames but no items."""
    buffer = PrioritizedReplay(14, num_envs=1, frame_stack=frames)
    for t in range(steps):
        buffer.add(**step([t + 1], [t + 2], truncated=t % 5 == 4))
    other = PrioritizedReplay(14, num_envs=1, frame_stack=frames)
    other.load_state_dict(buffer.state_dict())
    a, b = buffer.sample(60), other.sample(60)
    assert torch.equal(a.obs, b.obs) and torch.equal(a.next_obs, b.next_obs)


def test_a_state_is_not_aliased():
    """pytorch/rl#3966."""
    buffer = filled(10, 20)
    state = buffer.state_dict()
    other = PrioritizedReplay(20)
    other.load_state_dict(state)
    for tensor in (*state["tensors"].values(), *state["fields"].values()):
        tensor.zero_()
    assert float(other.total_priority) == float(buffer.total_priority) == 10
    assert torch.equal(other.sample(20).x, buffer.sample(20).x)


def test_public_names():
    assert sharpwave.PrioritizedReplay is PrioritizedReplay and sharpwave.SequenceReplay is SequenceReplay
    with pytest.raises(AttributeError, match="Nothing"):
        _ = sharpwave.Nothing
    light = "import sys, sharpwave; assert not {'torch', 'numba', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", light], check=True)


@CPU
def test_arrays_and_strided_tensors_are_taken_as_they_are(backend):
    buffer = filled(8, alpha=1.0, backend=backend)
    buffer.update_priorities(np.array([1, 2]), np.array([3.0, 4.0]))
    buffer.update_priorities(torch.tensor([3, 0, 5, 0])[::2], torch.tensor([5.0, 0, 6.0, 0])[::2])
    assert buffer.priorities(torch.tensor([1, 2, 3, 5])).tolist() == pytest.approx([3, 4, 5, 6], rel=1e-6)
    buffer.add(x=torch.arange(16)[::2])
    assert sorted(set(buffer.sample(200).x.tolist())) == list(range(0, 16, 2))


@CPU
def test_environments_that_took_no_step_are_left_out(backend):
    """Environment 1 begins its second episode one step late: its transitions are as if that step had not been."""
    late = PrioritizedReplay(60, num_envs=2, n_step=2, backend=backend)
    for t in range(6):
        skips = t == 3
        returned = late.add(
            obs=torch.tensor([[10.0 + t], [20.0 + t - (t > 3)]]),
            next_obs=torch.tensor([[11.0 + t], [99.0 if skips else 21.0 + t - (t > 3)]]),
            reward=torch.tensor([1.0, 100.0 if skips else 2.0]),
            terminated=torch.tensor([False, t == 2]),
            truncated=torch.tensor([False, skips]),
            valid=torch.tensor([True, not skips]),
        )
        assert (returned < 0).tolist() == [False, skips]
    batch = late.sample(400)
    second = batch.obs[:, 0] >= 20
    triples = {tuple(x) for x in torch.stack([batch.obs, batch.next_obs], 1)[second, :, 0].tolist()}
    assert triples == {(20.0, 22.0), (21.0, 23.0), (22.0, 23.0), (23.0, 25.0)}
    assert {round(x, 4) for x in batch.reward[second].tolist()} == {2.0, 3.98}
    assert len(late) == 5 + 4
    several = PrioritizedReplay(60, num_envs=2, backend=backend)
    zeros = torch.zeros(3, 2)
    slots = several.add(
        obs=zeros[..., None],
        next_obs=zeros[..., None],
        reward=zeros,
        terminated=zeros > 0,
        truncated=zeros > 0,
        valid=torch.tensor([[True, False], [False, False], [True, True]]),
    )
    assert slots.tolist() == [[0, -1], [-1, -1], [1, 30]]
    with pytest.raises(ValueError, match=r"valid must be \(2,\) bool"):
        several.add(
            obs=zeros[0, :, None],
            next_obs=zeros[0, :, None],
            reward=zeros[0],
            terminated=zeros[0] > 0,
            truncated=zeros[0] > 0,
            valid=torch.ones(3, dtype=torch.bool),
        )


def test_valid_is_a_field_without_environments():
    buffer = PrioritizedReplay(4)
    buffer.add(x=torch.arange(2), valid=torch.tensor([True, False]))
    assert set(buffer.sample(20).valid.tolist()) == {True, False}
