"""JAX environments behind this package's contract, their arrays shared by DLPack: gymnax and Craftax."""

import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sharpwave.envs.base import Continuous, Discrete, Observation, Reset, Step, VectorEnv
from sharpwave.envs.extras import needs

# JAX takes three quarters of a GPU's memory when it is first used, and would leave too little for PyTorch.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
with needs("jax"):
    import jax
    import jax.numpy as jnp

CRAFTAX = (
    "Craftax-Symbolic-v1",
    "Craftax-Pixels-v1",
    "Craftax-Classic-Symbolic-v1",
    "Craftax-Classic-Pixels-v1",
)

ResetOne = Callable[[Any], tuple[Any, Any]]
StepOne = Callable[[Any, Any, Any], tuple[Any, Any, Any, Any, Any]]


def make_gymnax(name: str, num_envs: int, device: torch.device | str = "cpu", **options: Any) -> "JaxVector":
    """`num_envs` copies of a gymnax environment, e.g. "gymnax/CartPole-v1" or "gymnax/Breakout-MinAtar".

    Args:
        name: "gymnax/" and a name in `gymnax.registered_envs`.
        num_envs: N.
        device: where environment and tensors are; on a CUDA device JAX needs its own CUDA build.
        options: fields of the environment's parameters, e.g. max_steps_in_episode=200; `check_finite`.

    Raises:
        ImportError: gymnax is not installed. ValueError: unknown name, or a parameter it does not have.
    """
    with needs("jax"):
        import gymnax
    kind = name.partition("/")[2]
    if kind not in gymnax.registered_envs:
        raise ValueError(_unknown(name, "gymnax", gymnax.registered_envs))
    env, params = gymnax.make(kind)
    check_finite = options.pop("check_finite", True)
    params = _replaced(name, params, options)

    def step(key: Any, state: Any, action: Any):
        obs, state, reward, terminated, _ = env.step_env(key, state, action, params)
        return obs, state, reward, terminated, env.is_truncated(state, params)

    action = _action(name, env.action_space(params))
    return JaxVector(
        name, num_envs, device, action, lambda key: env.reset_env(key, params), step, check_finite=check_finite
    )


def make_craftax(name: str, num_envs: int, device: torch.device | str = "cpu", **options: Any) -> "JaxVector":
    """`num_envs` copies of Craftax (Matthews et al. 2024): "craftax/Craftax-Symbolic-v1", and Classic or Pixels.

    A new world takes hundreds of times as long as a step: they are made in stock, N / 16 at a time.

    Args:
        name: "craftax/" and one of Craftax's names.
        num_envs: N.
        device: as in `make_gymnax`.
        options: fields of the environment's parameters, e.g. max_timesteps=1000; `check_finite`.

    `truncated` where the episode reached max_timesteps, `terminated` where it ended otherwise.

    Raises:
        ImportError: craftax is not installed. ValueError: unknown name, or a parameter it does not have.
    """
    kind = name.partition("/")[2]
    if kind not in CRAFTAX:
        raise ValueError(_unknown(name, "craftax", CRAFTAX))
    with needs("jax"):
        from craftax.craftax_env import make_craftax_env_from_name
    env = make_craftax_env_from_name(kind, auto_reset=False)
    check_finite = options.pop("check_finite", True)
    params = _replaced(name, env.default_params, options)
    endless = params.replace(max_timesteps=2**31 - 1)

    def step(key: Any, state: Any, action: Any):
        obs, state, reward, _, _ = env.step_env(key, state, action, params)
        return obs, state, reward, env.is_terminal(state, endless), state.timestep >= params.max_timesteps

    return JaxVector(
        name,
        num_envs,
        device,
        Discrete((env.action_space(params).n,)),
        lambda key: env.reset_env(key, params),
        step,
        reset_batch=max(1, num_envs // 16),
        check_finite=check_finite,
    )


class JaxVector(VectorEnv):
    """N copies of a pure function's environment, stepped by one compiled JAX function.

    Observations, rewards and flags are JAX arrays that PyTorch reads where they lie, and actions are read by JAX where
    PyTorch wrote them: nothing is copied (discrete actions are cast to int32 first). On a GPU PyTorch waits for
    nothing either. Do not write into what a step returned: JAX believes that its arrays never change.

    Args:
        name: for messages, and to be saved with the state.
        num_envs: N.
        device: "cpu" or a CUDA device that JAX sees as well.
        action: the action space; observations are what `reset` returns, one array of any shape.
        reset: key -> (observation, state), for one environment.
        step: (key, state, action) -> (observation, state, reward, terminated, truncated), for one environment, without
            beginning the next episode: the observation is the true final one.
        reset_batch: how many episodes are begun at a time. N begins one for every environment at each step and keeps
            those that are needed, the fastest where beginning is cheap. Fewer are begun in stock, and each that ends
            takes the next, so that all are used; the stock is made anew when it is used up. The memory that beginning
            takes is that of a batch.
        check_finite: on a CPU, raise where a reward or observation is NaN or infinite. On a GPU that would wait.

    Deterministic for a seed and device. Episodes are saved exactly: all state is arrays. The first step compiles, which
    takes a minute for Craftax on a CPU; set JAX_COMPILATION_CACHE_DIR to keep what was compiled.
    """

    inexact_because = None

    def __init__(
        self,
        name: str,
        num_envs: int,
        device: torch.device | str,
        action: Discrete | Continuous,
        reset: ResetOne,
        step: StepOne,
        *,
        reset_batch: int | None = None,
        check_finite: bool = True,
    ):
        self._place = _jax_device(torch.device(device))
        shown = jax.eval_shape(jax.vmap(reset), jax.random.split(jax.random.PRNGKey(0), num_envs))[0]
        if not hasattr(shown, "shape"):
            raise ValueError(f"{name}: observations must be one array; they are {jax.tree.structure(shown)}")
        dtype = torch.from_numpy(np.empty(0, shown.dtype)).dtype
        super().__init__(name, num_envs, device, Observation(tuple(shown.shape[1:]), dtype), action)
        self._check = check_finite and self.device.type == "cpu"
        batch = min(reset_batch or num_envs, num_envs)
        begin = _beginning(reset, num_envs, batch)
        self._begin_all = jax.jit(begin)
        self._shapes = jax.eval_shape(begin, jax.random.PRNGKey(0))
        # The states are nobody else's: a step may write the next ones over them.
        self._advance_all = jax.jit(_advancing(reset, step, num_envs, batch), donate_argnums=(1, 2))
        self._compiled: Future | None = None
        self._low = self._high = None
        if isinstance(action, Continuous):
            self._low, self._high = torch.tensor([action.low, action.high], device=self.device)
        self._key: Any = None
        self._world: Any = None
        self._stock: Any = None
        self._obs: Any = None

    def _reset(self, seed: int) -> Reset:
        words = np.random.SeedSequence(seed).generate_state(2)
        self._key = jax.device_put(jnp.asarray(words, dtype=jnp.uint32), self._place)
        self._compile()
        self._obs, self._world, self._stock, self._key = self._begin_all(self._key)
        return Reset(self._shown())

    def _step(self, action: Tensor) -> Step:
        action = action.to(torch.int32) if self._low is None else action.clamp(self._low, self._high)
        given = jax.dlpack.from_dlpack(action.to(self.device).contiguous())
        assert self._compiled is not None
        advance = self._compiled.result()
        self._obs, self._world, self._stock, self._key, out = advance(self._key, self._world, self._stock, given)
        final, reward, terminated, truncated, finite = out
        if self._check and not bool(finite.all()):
            index = int(np.argmin(np.asarray(finite)))
            raise self._fault(index, "returned a NaN or infinite reward or observation")
        final, reward, terminated, truncated = map(torch.from_dlpack, (final, reward, terminated, truncated))
        return Step(self._shown(), reward, terminated, truncated, final)

    def _compile(self) -> None:
        """Begin to compile the step, once, beside whatever else is compiled before the first one is taken."""
        if self._compiled is not None:
            return
        kind = jnp.int32 if self._low is None else jnp.float32
        action = jax.ShapeDtypeStruct(tuple(self._action_shape), kind)
        _, world, stock, key = self._shapes
        here = jax.sharding.SingleDeviceSharding(self._place)
        given = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), (key, world, stock, action)
        )
        worker = ThreadPoolExecutor(1)
        self._compiled = worker.submit(lambda: self._advance_all.lower(*given).compile())
        worker.shutdown(wait=False)

    def _shown(self) -> Tensor:
        return torch.from_dlpack(self._obs)

    def _state(self) -> dict[str, Any]:
        leaves = jax.tree.leaves((self._obs, self._world, self._stock, self._key))
        return {f"leaf {i}": _saved(leaf) for i, leaf in enumerate(leaves)}

    def _load(self, state: Mapping[str, Any]) -> Reset:
        shapes, tree = jax.tree.flatten(self._shapes)
        found = [state[f"leaf {i}"] for i in range(len(shapes)) if f"leaf {i}" in state]
        if f"leaf {len(shapes)}" in state or [(tuple(x.shape), x.element_size()) for x in found] != [
            (s.shape, s.dtype.itemsize) for s in shapes
        ]:
            raise ValueError(f"{self.name}: the state was saved from other options or another version: make it as then")
        arrays = [_loaded(x, s.dtype) for x, s in zip(found, shapes, strict=True)]
        self._compile()
        kept = jax.device_put(jax.tree.unflatten(tree, arrays), self._place)
        self._obs, self._world, self._stock, self._key = kept
        return Reset(self._shown(), continued=True)


def _beginning(reset: ResetOne, n: int, batch: int) -> Callable[[Any], tuple[Any, Any, Any, Any]]:
    """key -> (observations, states, stock, key). All at once, thousands of large worlds take much of a GPU's memory."""

    def begin(key: Any):
        key, sub, later = jax.random.split(key, 3)
        obs, world = _strong(jax.lax.map(reset, jax.random.split(sub, n), batch_size=math.gcd(n, batch)))
        if batch == n:
            return obs, world, None, key
        nothing = jax.tree.map(lambda x: jnp.zeros((batch, *x.shape[1:]), x.dtype), (obs, world))
        return obs, world, (nothing, jnp.int32(batch), later), key

    return begin


def _advancing(reset: ResetOne, step: StepOne, n: int, batch: int) -> Callable[..., Any]:
    """(key, states, stock, actions) -> (observations, states, stock, key, what a step tells), ended ones begun anew.

    The stock is None where one is begun for every environment; else `batch` beginnings, how many of them are used, and
    the key of those to come.
    """

    def advance(key: Any, world: Any, stock: Any, action: Any):
        key, sub, later = jax.random.split(key, 3)
        final, world, reward, terminated, truncated = jax.vmap(step)(jax.random.split(sub, n), world, action)
        reward = reward.astype(jnp.float32)
        terminated, truncated = terminated.astype(bool), truncated.astype(bool)
        ended = terminated | truncated
        finite = jnp.isfinite(reward) & jnp.isfinite(final.reshape(n, -1)).all(1)
        now = _strong((final, world))
        if stock is None:
            first = jax.vmap(reset)(jax.random.split(later, n))

            def pick(new: Any, old: Any):
                return jnp.where(ended.reshape(-1, *[1] * (new.ndim - 1)), new, old)

            now = jax.tree.map(pick, _strong(first), now)
        else:
            serve = _serving(reset, n, batch)
            _, now, stock = jax.lax.while_loop(lambda carry: carry[0].any(), serve, (ended, now, stock))
        return *now, stock, key, (final, reward, terminated, truncated, finite)

    return advance


def _serving(reset: ResetOne, n: int, batch: int) -> Callable[[Any], Any]:
    """(who waits, what is current, stock) -> the same, after the first in line have taken what there is."""

    def restock(stock: Any):
        later, sub = jax.random.split(stock[2])
        return _strong(jax.vmap(reset)(jax.random.split(sub, batch))), jnp.int32(0), later

    def serve(carry: Any):
        waiting, current, stock = carry
        stock = jax.lax.cond(stock[1] == batch, restock, lambda same: same, stock)
        fresh, used, later = stock
        (line,) = jnp.nonzero(waiting, size=batch, fill_value=n)
        place = used + jnp.arange(batch, dtype=jnp.int32)
        line = jnp.where(place < batch, line, n)  # n: nobody, which the writes below leave out
        taken = jax.tree.map(lambda x: x.at[place].get(mode="clip"), fresh)
        current = jax.tree.map(lambda old, new: old.at[line].set(new, mode="drop"), current, taken)
        used = used + (line < n).sum(dtype=jnp.int32)
        return waiting.at[line].set(False, mode="drop"), current, (fresh, used, later)

    return serve


def _strong(tree: Any) -> Any:
    """Arrays whose type is fixed: a step that returned others than it took would be compiled once more."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, jnp.asarray(x).dtype), tree)


def _jax_device(device: torch.device) -> Any:
    """JAX's name for a PyTorch device."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda for JAX environments; got {device}")
    try:
        index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
        return jax.devices("cpu" if device.type == "cpu" else "cuda")[index or 0]
    except (RuntimeError, IndexError) as error:
        raise ValueError(
            f"device {device}: JAX does not see it ({' '.join(str(error).split())}): install JAX's CUDA build, or use "
            "device='cpu'"
        ) from error


def _saved(leaf: Any) -> Tensor:
    array = np.array(leaf)
    return torch.from_numpy(array.view(f"i{array.itemsize}") if array.dtype.kind == "u" else array)


def _loaded(tensor: Tensor, dtype: Any) -> np.ndarray:
    array = tensor.detach().cpu().numpy()
    return array.view(dtype) if array.dtype != dtype else array


def _action(name: str, space: Any) -> Discrete | Continuous:
    if hasattr(space, "n"):
        return Discrete((int(space.n),))
    if hasattr(space, "low") and len(space.shape) == 1:
        low, high = (np.broadcast_to(np.asarray(x, dtype=float), space.shape) for x in (space.low, space.high))
        return Continuous(space.shape[0], tuple(low.tolist()), tuple(high.tolist()))
    raise ValueError(f"{name}: action space {space} is not supported: a Discrete, or a Box of one dimension, is")


def _replaced(name: str, params: Any, options: Mapping[str, Any]) -> Any:
    fields = list(getattr(params, "__dataclass_fields__", ()))
    stray = [option for option in options if option not in fields]
    if stray:
        raise ValueError(f"{name} does not take {', '.join(stray)}: its parameters are {', '.join(fields)}")
    return params.replace(**options)


def _unknown(name: str, prefix: str, known: Iterable[str]) -> str:
    all_names = [f"{prefix}/{one}" for one in known]
    near = difflib.get_close_matches(name, all_names, n=1, cutoff=0.5)
    nearest = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown environment {name!r}: {nearest}There are: {', '.join(all_names)}"
