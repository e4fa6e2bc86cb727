"""Offline datasets of Minari, or of the same form, as transitions."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sharpwave.replay.core import Replay
from sharpwave.replay.nest import Batch


def transitions(episode: Any) -> Batch:
    """One `minari.EpisodeData` of T steps as fields (T, ...): obs, action, reward, next_obs, terminated, truncated.

    Observations, which Minari keeps T + 1 of, and actions may be dictionaries; float64 becomes float32.

    Raises:
        TypeError: an observation or action of a Tuple space, whose parts have no names.
    """

    def part(values: Any, rows: slice) -> Any:
        if isinstance(values, tuple):
            raise TypeError(
                f"observations and actions must be arrays or dictionaries of them; got a tuple of {len(values)}, as of "
                "a Tuple space: name its parts, as a Dict space does"
            )
        if isinstance(values, Mapping):
            return Batch({k: part(x, rows) for k, x in values.items()})
        array = np.asarray(values)[rows]
        return array.astype(np.float32) if array.dtype == np.float64 else array

    whole = slice(None)
    return Batch(
        obs=part(episode.observations, slice(None, -1)),
        next_obs=part(episode.observations, slice(1, None)),
        action=part(episode.actions, whole),
        reward=part(episode.rewards, whole),
        terminated=np.asarray(episode.terminations, bool),
        truncated=np.asarray(episode.truncations, bool),
    )


def load(buffer: Replay, dataset: Any) -> int:
    """Add every episode of a dataset to a buffer.

    Args:
        buffer: without environments, or with num_envs=1: then in time order, for n-step returns and sequences. An
            episode that neither terminated nor was truncated is taken as truncated, since another follows it.
        dataset: `minari.load_dataset(...)`, or anything with `iterate_episodes()`.

    Returns:
        The number of transitions added. A buffer too small keeps the last ones; an episode of no steps adds none.

    Raises:
        ValueError: the buffer has several environments.
        TypeError: see `transitions`; nothing was added.
    """
    envs = buffer.state.layout.envs
    if envs > 1:
        raise ValueError(f"buffer must have num_envs=None or 1, since episodes come one after the other; got {envs}")
    count = 0
    for episode in dataset.iterate_episodes():
        batch = transitions(episode)
        if not len(batch.reward):
            continue
        if not (batch.terminated[-1] or batch.truncated[-1]):
            batch.truncated = batch.truncated.copy()
            batch.truncated[-1] = True
        count += len(batch.reward)
        buffer.add(_one_environment(batch) if envs else batch)
    return count


def _one_environment(nest: Any) -> Any:
    return {k: _one_environment(x) for k, x in nest.items()} if isinstance(nest, Mapping) else nest[:, None]
