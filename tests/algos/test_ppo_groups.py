"""PPO with its environments in groups: what is trained on is what the groups give, stepped in turn."""

import pytest
import torch

from sharpwave import envs
from sharpwave.algos.ppo import PPO, PPOConfig
from sharpwave.envs import Grouped
from sharpwave.run import seeding
from sharpwave.run.checkpoint import flatten, unflatten
from sharpwave.run.errors import UserError
from sharpwave.run.evaluate import evaluate
from tests.algos.test_ppo import fingerprint, train, trainer
from tests.algos.toys import in_turn

RELAY = dict(name="tests.envs.relay:Relay", num_envs=12, minibatch=48, total_steps=12 * 16 * 2)
PROCESSES = dict(vectorization_mode="async", max_episode_steps=9)
CASES = {
    "agents that leave": RELAY,
    "three groups": RELAY | dict(num_envs=18, env_groups=3, total_steps=18 * 16 * 2),
    "processes": dict(name="Acrobot-v1", num_envs=4, minibatch=32, total_steps=4 * 16 * 2, env_kwargs=PROCESSES),
    "continuous": dict(
        name="Pendulum-v1", normalize_obs=True, normalize_reward=True, total_steps=128 * 3, layers=0,
        env_kwargs=dict(max_episode_steps=9),
    ),
    "compat": dict(name="CartPole-v1", puffer_compat=True, total_steps=128 * 3),
}  # fmt: skip


def grouped(**changes):
    if "Relay" in changes.get("name", ""):
        pytest.importorskip("pettingzoo")
    return trainer(**dict(env_groups=2) | changes)


def by_hand(agent, vectors, obs, mask, begins, state):
    """A rollout of each vector in turn, a step at a time, as columns of `agent.segments`."""
    columns = []
    for t in range(agent.config.horizon):
        rows = []
        for g, vector in enumerate(vectors):
            reset = None if agent.config.puffer_compat and t else begins[g]
            out = agent.policy.step(obs[g], state[g], reset)
            sample = agent.policy.sample(out.params, mask[g], agent.generator)
            step = vector.step(agent.policy.actions.to_env(sample.action))
            after = agent.policy.step(step.next_obs, out.state).value
            rows_of = slice(g * vector.num_envs, (g + 1) * vector.num_envs)
            agent.episodes.update(step, rows_of)
            reward = step.reward
            if agent.reward_normalizer is not None:
                reward = agent.reward_normalizer(reward, step.terminated | step.truncated, rows_of)
            fields = dict(obs=obs[g], action=sample.action, logprob=sample.logprob, value=out.value, reset=begins[g])
            fields |= dict(terminated=step.terminated, truncated=step.truncated, after=after)
            rows.append(fields | dict(mask=mask[g], valid=step.valid, reward=agent._scale(reward)))
            obs[g], mask[g], begins[g], state[g] = step.obs, step.action_mask, step.begins, out.state
        columns.append({k: None if rows[0][k] is None else torch.cat([row[k] for row in rows]) for k in rows[0]})
    return {k: None if x is None else torch.stack([c[k] for c in columns], 1) for k, x in columns[0].items()}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_rollout_is_that_of_the_vectors_stepped_in_turn(case):
    """Two rollouts, bit for bit: the second goes on where the first stopped."""
    agent, twin = (grouped(**CASES[case]) for _ in range(2))
    config, n = twin.config, twin.env.groups[0].num_envs
    vectors = [envs.make(config.env, n, **config.env_kwargs) for _ in twin.env.groups]
    words = Grouped(vectors).reset(seeding.stream_seed(0, 0, "env"))
    obs, mask = list(words.obs.split(n)), [None] * len(vectors)
    if words.action_mask is not None:
        mask = list(words.action_mask.split(n))
    begins = [torch.ones(n, dtype=torch.bool) for _ in vectors]
    state = [twin.policy.initial_state(n) for _ in vectors]
    s, ends = agent.segments, 0
    for _ in range(2):
        before = torch.cat(state, 1)
        want = by_hand(twin, vectors, obs, mask, begins, state)
        agent._run_rollout()
        assert torch.equal(s.state, before)
        assert agent.episodes.read() == twin.episodes.read()
        for name in (
            "obs",
            "action",
            "logprob",
            "value",
            "terminated",
            "truncated",
            "reset",
            "reward",
            "mask",
            "valid",
        ):
            got = getattr(s, name)
            assert (got is None and want[name] is None) or torch.equal(got, want[name]), name
        read = s.truncated.clone()
        read[:, -1] = True
        assert torch.allclose(s.next_value[read], want["after"][read], atol=1e-6)
        ends += int(want["reset"].sum())
    assert ends > 2 * config.num_envs, "episodes must have ended for this to show anything"
    for each in (agent, twin, Grouped(vectors)):
        each.close()


@pytest.mark.parametrize("case", ["agents that leave", "processes", "continuous"])
def test_overlapped_is_in_turn(case):
    """Whole trainings, with all that a checkpoint holds."""
    overlapped, turns = (grouped(**CASES[case]) for _ in range(2))
    in_turn(turns.env)
    for agent in (train(overlapped), train(turns)):
        assert agent.metrics()["episode/count"] > 0
    first = fingerprint(overlapped)
    assert first == fingerprint(turns)
    whole = CASES[case] | dict(env_groups=1)
    if case == "continuous":  # groups are other environments: the test above can fail
        assert first != fingerprint(train(grouped(**whole)))
    for agent in (overlapped, turns):
        agent.close()


def test_resume_is_exact():
    """Four epochs are two and two, normalisers and all, through the file format."""
    changes = dict(name="Pendulum-v1", total_steps=128 * 4, normalize_obs=True, normalize_reward=True)
    straight = train(grouped(**changes))
    half, resumed = grouped(**changes), grouped(**changes)
    for _ in range(2):
        half.train_epoch()
    resumed.load_state_dict(unflatten(*flatten(half.state_dict())))
    assert fingerprint(train(resumed)) == fingerprint(straight)


def test_evaluation_plays_all_groups():
    agent = grouped(name="CartPole-v1")
    returns = evaluate(agent, agent.env, 12, seed=1)
    first, again = returns.tolist(), evaluate(agent, agent.env, 12, seed=1).tolist()
    assert first == again and len(first) == 12 and min(first) >= 8


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(env_groups=0), "--env-groups must be at least 1; got 0"),
        (dict(env_groups=3), r"--num-envs must be a multiple of --env-groups 3, .*; got 8: use 6 or 9"),
        (dict(env_groups=16), r"multiple of --env-groups 16, .*; got 8: use 16"),
        (dict(env_groups=2), r"--env-groups 2, each of 4 environments: sharpwave/CartPole cannot step beside"),
        (dict(env_groups=2, name="Nothing-v0"), r"--env-groups 2, .*unknown environment 'Nothing-v0'"),
    ],
)
def test_errors(changes, words):
    with pytest.raises(UserError, match=words):
        trainer(**changes)


def test_an_environment_of_your_own():
    vectors = [envs.make("CartPole-v1", 4) for _ in range(2)]
    settings = dict(env="CartPole-v1", device="cpu", horizon=16, minibatch=64, total_steps=128, hidden=8)
    with pytest.raises(UserError, match="the environment has 2 groups, the configuration 1"):
        PPO(PPOConfig(**settings), Grouped(vectors))
    assert PPO(PPOConfig(**settings, env_groups=2), Grouped(vectors)).config.num_envs == 8
