"""Films of a policy at play: MP4 by PyAV, GIF by Pillow.

A picture comes from the first of these that there is: the environment's own drawing (`render_mode="rgb_array"` of a
Gymnasium environment, a method `render()` of any other), or its observation, if that is a picture already.
"""

import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sharpwave import envs
from sharpwave.envs.base import EnvFault, VectorEnv
from sharpwave.run import plot
from sharpwave.run.errors import UserError
from sharpwave.run.evaluate import Agent

SUFFIXES = (".mp4", ".gif")
LIMIT = 10_000  # pictures of a film
SIZE = 256  # pixels, at least, of the longer side of a film of observations
FPS = 30  # where the environment does not say
PALETTE = np.array(
    [[70, 130, 220], [240, 200, 60], [190, 120, 20], [220, 70, 70], [90, 190, 110], [170, 110, 200], [240, 240, 240]],
    dtype=np.uint8,
)  # of observations with a plane for each kind of thing


Pictures = Callable[[Tensor, bool], list[np.ndarray]]
"""The pictures since the last call, given the true next observation, and whether the film's last episode has ended.

An environment that draws itself has begun the next episode by then, whose first picture is no longer of the film."""


@dataclass
class Film:
    """What `record` made."""

    frames: int = 0
    seconds: float = 0.0
    returns: list[float] = field(default_factory=list)
    """Undiscounted return of each whole episode."""
    is_cut: bool = False
    """Whether it ends at LIMIT pictures, before the last episode does."""


def record(
    agent: Agent,
    name: str,
    options: Mapping[str, Any],
    device: torch.device | str,
    path: Path,
    *,
    episodes: int = 1,
    seed: int = 0,
    deterministic: bool = True,
    fps: float | None = None,
    force: bool = False,
) -> Film:
    """Play whole episodes in one environment and film them.

    Args:
        agent: see `Agent`; it acts on `device`.
        name, options: as `sharpwave.envs.make` takes them.
        device: where observations and actions are.
        path: ends in .mp4 or .gif; written under another name and then renamed.
        episodes: at least 1.
        seed: of the environment.
        deterministic: passed on to the agent.
        fps: pictures a second; None takes the environment's own, or 30.
        force: replace `path` if it exists.

    Raises:
        UserError: what is needed is not installed, the environment cannot be drawn or fails, or `path` cannot be
            written.
    """
    plot.check_target(path, SUFFIXES, option="--video", force=force)
    write = _WRITERS[path.suffix.lower()]()
    env, pictures, own_fps = _drawn(name, options, device)
    rate = fps or own_fps
    film = Film()
    temporary = path.with_name(f".{path.stem}.tmp-{os.getpid()}{path.suffix.lower()}")
    try:
        with env, _faults(name):
            shots = itertools.islice(_play(agent, env, pictures, episodes, seed, deterministic, film), LIMIT)
            film.frames = write(temporary, shots, rate)
        _place(temporary, path, force)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; choose another --video") from error
    finally:
        temporary.unlink(missing_ok=True)
    film.seconds = film.frames / rate
    film.is_cut = len(film.returns) < episodes
    return film


def check(name: str, options: Mapping[str, Any], device: torch.device | str, path: Path) -> None:
    """Draw one picture, without keeping it: whatever a film needs and is missing is found before anything is played.

    Raises:
        UserError: as `record`.
    """
    _WRITERS[path.suffix.lower()]()
    env, pictures, _ = _drawn(name, options, device)
    with env, _faults(name):
        pictures(env.reset(0).obs, False)


@contextmanager
def _faults(name: str) -> Generator[None]:
    """An environment's fault as a UserError; where it cannot draw for lack of a library, with what brings that."""
    try:
        yield
    except (EnvFault, ImportError) as fault:
        cause: BaseException | None = fault
        while cause is not None:
            if isinstance(cause, ImportError) and (cause.name or "").partition(".")[0] == "pygame":
                raise UserError(
                    f"{name} draws with pygame, which is missing: pip install 'sharpwave[video]'"
                ) from fault
            cause = cause.__cause__ or cause.__context__
        raise UserError(str(fault)) from fault


@torch.no_grad()
def _play(
    agent: Agent, env: VectorEnv, pictures: Pictures, episodes: int, seed: int, deterministic: bool, film: Film
) -> Iterator[np.ndarray]:
    now = env.reset(seed)
    obs, mask, state = now.obs, now.action_mask, None
    begins = torch.ones(1, dtype=torch.bool, device=env.device)
    total = 0.0
    yield from pictures(obs, False)
    while len(film.returns) < episodes:
        action, state = agent.act(obs, state, begins, deterministic=deterministic, mask=mask)
        step = env.step(action)
        total += step.reward.item()
        if bool(step.terminated | step.truncated):
            film.returns.append(total)
            total = 0.0
        yield from pictures(step.next_obs, len(film.returns) == episodes)
        obs, mask, begins = step.obs, step.action_mask, step.begins


def _drawn(name: str, options: Mapping[str, Any], device: torch.device | str) -> tuple[VectorEnv, Pictures, float]:
    """One environment, what gives its new pictures after a step, and how many a second it wants."""
    env = _make(name, options, device)
    try:
        single = _single(env)
        if single is not None:
            return (
                env,
                lambda _, last: single.render()[: 1 if last else None],
                float(single.metadata.get("render_fps", FPS)),
            )
        render = getattr(env, "render", None)
        if render is not None:
            return env, lambda _, last: [] if last else [render()], float(getattr(env, "render_fps", FPS))
        shape = env.observation.shape
        if (len(shape) == 3 and min(shape[1:]) > 1) or (len(shape) == 2 and min(shape) > 7):
            return env, lambda obs, _: [picture(obs[0].numpy(force=True))], FPS
    except BaseException:
        env.close()
        raise
    env.close()
    raise UserError(
        f"{name} cannot be filmed: it has neither Gymnasium's render_mode 'rgb_array' nor a method render(), and its "
        f"observations of shape {shape} are no pictures"
    )


def _make(name: str, options: Mapping[str, Any], device: torch.device | str) -> VectorEnv:
    """With as much of what asks for pictures as the environment takes."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws into memory, and must not look for a screen
    for asking in ({"render_mode": "rgb_array", "vectorization_mode": "sync"}, {"render_mode": "rgb_array"}, {}):
        try:
            return envs.make(name, 1, device, **{**options, **asking})
        except (ValueError, TypeError, ImportError, AttributeError, RuntimeError) as error:
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, ValueError) else str(error)
    raise UserError(f"--env {name} cannot be made: {reason}")


def _single(env: VectorEnv) -> Any:
    """The Gymnasium environment within, made to keep a picture of every step; None where it draws none."""
    vector = getattr(env, "vector", None)
    inside = getattr(getattr(vector, "unwrapped", None), "envs", None)
    if not isinstance(inside, list) or inside[0].render_mode != "rgb_array":
        return None
    from gymnasium.wrappers import RenderCollection

    # It takes the place of the environment that is stepped: so the last picture of an episode is kept, too.
    inside[0] = RenderCollection(inside[0], reset_clean=False)
    return inside[0]


def picture(obs: np.ndarray) -> np.ndarray:
    """(height, width, 3) uint8 of an observation that is a picture, enlarged to at least 256 pixels.

    Two dimensions are grey. Of three, the first is that of the planes if it is at most 4 and the last is larger, else
    the last. Three planes of uint8 are red, green and blue; of other uint8 planes, which are frames in a row, the last
    is shown; of all others each plane is one kind of thing and has its colour. Floats run from the smallest to the
    largest.
    """
    if obs.ndim == 2:
        obs = obs[..., None]
    elif obs.shape[0] <= 4 < obs.shape[-1]:
        obs = np.moveaxis(obs, 0, -1)
    planes = obs.shape[-1]
    if obs.dtype == np.uint8 and planes == 3:
        shot = obs
    elif obs.dtype == np.uint8 or planes == 1:
        shot = np.repeat(_grey(obs[..., -1])[..., None], 3, axis=2)
    else:
        shot = np.zeros((*obs.shape[:2], 3), dtype=np.uint8)
        for k in range(planes):
            shot[obs[..., k] > 0] = PALETTE[k % len(PALETTE)]
    factor = -(-SIZE // max(shot.shape[:2]))
    return shot.repeat(factor, axis=0).repeat(factor, axis=1)


def _grey(plane: np.ndarray) -> np.ndarray:
    if plane.dtype == np.uint8:
        return plane
    values = np.nan_to_num(plane.astype(np.float64))
    low, high = values.min(), values.max()
    return ((values - low) / (high - low or 1.0) * 255).astype(np.uint8)


def _mp4() -> Callable[[Path, Iterator[np.ndarray], float], int]:
    try:
        import av
    except ImportError as error:
        raise UserError(f"an MP4 needs PyAV: pip install 'sharpwave[video]' ({error})") from error
    from fractions import Fraction

    def write(path: Path, shots: Iterator[np.ndarray], fps: float) -> int:
        count = 0
        with av.open(str(path), "w", format="mp4") as container:
            stream = None
            for shot in shots:
                # H.264 with half the colours, which every player reads, wants an even height and width.
                even = np.pad(shot, ((0, shot.shape[0] % 2), (0, shot.shape[1] % 2), (0, 0)), mode="edge")
                if stream is None:
                    stream = container.add_stream("h264", rate=Fraction(fps).limit_denominator(1000))
                    stream.height, stream.width = even.shape[:2]
                    stream.pix_fmt = "yuv420p"
                container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(even), format="rgb24")))
                count += 1
            if stream is not None:
                container.mux(stream.encode())
        return count

    return write


def _gif() -> Callable[[Path, Iterator[np.ndarray], float], int]:
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(f"a GIF needs Pillow: pip install 'sharpwave[video]' ({error})") from error

    def write(path: Path, shots: Iterator[np.ndarray], fps: float) -> int:
        count = 0

        def images():
            nonlocal count
            for shot in shots:
                count += 1
                yield Image.fromarray(shot).quantize(64, Image.Quantize.FASTOCTREE)

        frames = images()
        first = next(frames)
        # Players slow down what lasts less than two hundredths of a second.
        first.save(path, format="GIF", save_all=True, append_images=frames, duration=max(20, round(1000 / fps)), loop=0)
        return count

    return write


_WRITERS = {".mp4": _mp4, ".gif": _gif}


def _place(temporary: Path, path: Path, force: bool) -> None:
    if force:
        os.replace(temporary, path)
        return
    try:
        os.link(temporary, path)  # unlike a rename, this never replaces a file
    except FileExistsError:
        raise UserError(f"{path} exists: choose another --video, or give --force to replace it") from None
    except OSError:  # a file system without links
        if path.exists():
            raise UserError(f"{path} exists: choose another --video, or give --force to replace it") from None
        os.rename(temporary, path)
