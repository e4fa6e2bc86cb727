"""MiniGrid's environments, their symbolic view one-hot."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from sharpwave.envs.extras import needs
from sharpwave.envs.gymnasium import GymnasiumVector, make_gymnasium


def make_minigrid(
    name: str,
    num_envs: int,
    device: torch.device | str = "cpu",
    *,
    view: Literal["onehot", "image"] = "onehot",
    actions: Sequence[str] | None = None,
    wrappers: tuple = (),
    **options: Any,
) -> GymnasiumVector:
    """`num_envs` copies of a MiniGrid environment, e.g. "MiniGrid-MemoryS7-v0".

    MiniGrid shows (7, 7, 3) numbers, each cell's kind of object, colour and state, with a direction and a mission as
    text. The direction is left out, for the view turns with the agent, and the mission, which is the same in nearly
    every environment: give `wrappers` of your own to see them. BabyAI's missions differ, so there they must be given.

    Args:
        name: a registered id.
        num_envs: N.
        device: where tensors go.
        view: "onehot": (7, 7, 21) int8, the three numbers of each cell as one-hot vectors side by side; "image": the
            numbers, uint8.
        actions: those the agent may choose from, of left, right, forward, pickup, drop, toggle and done; None offers
            all seven, also where most of them do nothing.
        wrappers: put around each environment instead of the view's.
        options: as in `make_gymnasium`.

    Raises:
        ImportError: minigrid is not installed. ValueError: see `make_gymnasium`; BabyAI without wrappers.
    """
    if view not in ("onehot", "image"):
        raise ValueError(f"view must be 'onehot' or 'image'; got {view!r}")
    with needs("minigrid"):
        import minigrid
        from minigrid.core.actions import Actions
        from minigrid.wrappers import ImgObsWrapper
    gymnasium.register_envs(minigrid)
    if name.startswith("BabyAI") and not wrappers:
        raise ValueError(f"{name}: the mission is text: give wrappers=(...) that turn it into numbers")
    around = list(wrappers) or [OneHotView if view == "onehot" else ImgObsWrapper]
    if actions is not None:
        around.append(partial(ChosenActions, chosen=_numbers(actions, [action.name for action in Actions])))
    return make_gymnasium(name, num_envs, device, wrappers=tuple(around), **options)


def _numbers(actions: Sequence[str], known: list[str]) -> list[int]:
    strange = [action for action in actions if action not in known]
    if strange or not actions:
        raise ValueError(f"actions must be some of {', '.join(known)}; got {', '.join(strange) or 'none'}")
    return [known.index(action) for action in actions]


class ChosenActions(gymnasium.ActionWrapper):
    """Action i is `chosen[i]` of the environment's."""

    def __init__(self, env: gymnasium.Env, chosen: list[int]):
        super().__init__(env)
        self.chosen = chosen
        self.action_space = spaces.Discrete(len(chosen))

    def action(self, action: Any) -> int:
        """The environment's action."""
        return self.chosen[action]


class OneHotView(gymnasium.ObservationWrapper):
    """(h, w, 3) numbers of kind, colour and state -> (h, w, kinds + colours + states) int8, one-hot side by side."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX, STATE_TO_IDX

        image = env.observation_space["image"]  # ty: ignore[not-subscriptable]
        sizes = [max(names.values()) + 1 for names in (OBJECT_TO_IDX, COLOR_TO_IDX)]
        # A door has three states; the agent's state is its direction, one of four.
        sizes.append(max(max(STATE_TO_IDX.values()) + 1, 4))
        self._offset = np.cumsum([0, *sizes[:2]])
        self._depth = sum(sizes)
        self.observation_space = spaces.Box(0, 1, (*image.shape[:2], self._depth), np.int8)

    def observation(self, observation: Any) -> np.ndarray:
        """The view of one step."""
        image = observation["image"]
        view = np.zeros((*image.shape[:2], self._depth), dtype=np.int8)
        np.put_along_axis(view, image + self._offset, 1, axis=2)
        return view
