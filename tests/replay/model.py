"""A replay buffer in plain Python, slow and obvious: what the real one is held to."""

import math

import numpy as np


class Flat:
    """Unrelated items in a ring: slot -> (number of the item, its value, p^alpha)."""

    def __init__(self, capacity: int, alpha: float, eps: float, p_max: float):
        self.capacity, self.alpha, self.eps, self.p_max = capacity, alpha, eps, p_max
        self.items: dict[int, list] = {}
        self.head = self.written = self.stale = self.bad = 0
        self.max_priority = 1.0

    def add(self, values) -> None:
        for value in list(values)[-self.capacity :]:
            self.items[self.head] = [self.written, value, self.max_priority**self.alpha]
            self.head = (self.head + 1) % self.capacity
            self.written += 1

    def update(self, indices, td_errors, generations) -> None:
        fresh = []
        for i, td, generation in zip(indices, td_errors, generations, strict=True):
            if i not in self.items or self.items[i][0] != generation:
                self.stale += 1
                continue
            if math.isfinite(td):
                p = min(abs(td) + self.eps, self.p_max)
                self.max_priority = max(self.max_priority, p)
            else:
                self.bad += 1
                p = None
            fresh.append((i, p))
        for i, p in fresh:
            self.items[i][2] = (self.max_priority if p is None else p) ** self.alpha

    def clear(self) -> None:
        self.items.clear()
        self.head = self.stale = self.bad = 0
        self.max_priority = 1.0

    def leaves(self) -> np.ndarray:
        out = np.zeros(self.capacity)
        for slot, (_, _, leaf) in self.items.items():
            out[slot] = leaf
        return out


class Stream:
    """Environments in time order: the whole history is kept, and what each slot holds is written beside it.

    Whether a window can be drawn is asked of the contents of the slots: does everything that its batch would show still
    lie where it would be read?
    """

    def __init__(self, envs: int, ring: int, span: int, short: bool, period: int, frames: int, gamma: float):
        self.envs, self.ring, self.span, self.short = envs, ring, span, short
        self.period, self.frames, self.gamma = period, frames, gamma
        self.history: list[list[dict]] = [[] for _ in range(envs)]  # a list of steps, episodes one after the other
        self.obs_at = [dict() for _ in range(envs)]  # position -> (episode, step) whose observation lies there
        self.step_at = [dict() for _ in range(envs)]  # position -> index in history of the step that lies there
        self.head = [0] * envs
        self.episode, self.step = [0] * envs, [0] * envs
        self.written = 0

    def add(self, reward, terminated, truncated, valid) -> None:
        for e in range(self.envs):
            if not valid[e]:
                continue
            p, q = self.head[e], (self.head[e] + 1) % self.ring
            place = (self.episode[e], self.step[e])
            ended = bool(terminated[e] or truncated[e])
            self.history[e].append(
                {
                    "episode": place[0],
                    "step": place[1],
                    "reward": float(reward[e]),
                    "terminated": bool(terminated[e]),
                    "truncated": bool(truncated[e]),
                    "number": self.written + e,
                    "position": p,
                }
            )
            self.obs_at[e][p] = place
            self.step_at[e][p] = len(self.history[e]) - 1
            self.obs_at[e][q] = (place[0], place[1] + 1)
            self.step_at[e].pop(q, None)
            self.head[e] = (p + 1 + ended) % self.ring
            self.episode[e], self.step[e] = (place[0] + 1, 0) if ended else (place[0], place[1] + 1)
        self.written += self.envs

    def window(self, e: int, position: int) -> dict | None:
        """What a batch shows of the window that starts there; None if it cannot be drawn."""
        if position not in self.step_at[e]:
            return None
        start = self.step_at[e][position]
        steps = []
        for k in range(self.span):
            at = start + k
            if at >= len(self.history[e]):
                break
            step = self.history[e][at]
            if self.step_at[e].get((position + k) % self.ring) != at:
                return None
            steps.append(step)
            if step["terminated"] or step["truncated"]:
                break
        ended = steps[-1]["terminated"] or steps[-1]["truncated"]
        if len(steps) < self.span and not (self.short and ended):
            return None
        first, last, m = steps[0], steps[-1], len(steps)
        if first["step"] % self.period:
            return None

        def stack(step: int, where: int):
            frames = []
            for back in (min(k, step) for k in range(self.frames - 1, -1, -1)):
                place = (first["episode"], step - back)
                if self.obs_at[e].get((where - back) % self.ring) != place:
                    return None
                frames.append(place)
            return frames

        obs, following = stack(first["step"], position), stack(first["step"] + m, position + m)
        if obs is None or following is None:
            return None
        return {
            "steps": steps,
            "obs": obs,
            "next_obs": following,
            "return": sum(self.gamma**k * s["reward"] for k, s in enumerate(steps)),
            "discount": 0.0 if last["terminated"] else self.gamma**m,
            "terminated": last["terminated"],
            "truncated": last["truncated"],
            "number": first["number"],
        }

    def drawable(self) -> dict[int, dict]:
        windows = {e * self.ring + p: self.window(e, p) for e in range(self.envs) for p in range(self.ring)}
        return {slot: w for slot, w in windows.items() if w is not None}
