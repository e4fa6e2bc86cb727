"""Where a run's settings come from: defaults < preset of the environment < file < command line.

Each trainer has one frozen dataclass of settings with a docstring under each field; this module builds it, checks it
and writes it down. It imports no trainer and no torch until one is asked for.
"""

import dataclasses
import difflib
import importlib
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from sharpwave.run import plain_json
from sharpwave.run.errors import UserError
from sharpwave.run.presets import ON_GPU, preset

# name -> where its settings dataclass and its trainer are, each imported when asked for
ALGORITHMS = {
    "ppo": ("sharpwave.algos.ppo_config:PPOConfig", "sharpwave.algos.ppo:PPO"),
    "dqn": ("sharpwave.algos.dqn_config:DQNConfig", "sharpwave.algos.dqn:DQN"),
}


# What Stable-Baselines3 and CleanRL call a setting, and what it is called here: the first that the algorithm has.
ELSEWHERE = {
    "batch_size": ("minibatch",),
    "clip_coef": ("clip",),
    "clip_range": ("clip",),
    "clip_range_vf": ("vf_clip",),
    "end_e": ("epsilon_end",),
    "env_id": ("env",),
    "exploration_final_eps": ("epsilon_end",),
    "exploration_fraction": ("epsilon_fraction",),
    "exploration_initial_eps": ("epsilon_start",),
    "gradient_steps": ("updates_per_step",),
    "learning_rate": ("lr",),
    "minibatch_size": ("minibatch",),
    "n_envs": ("num_envs",),
    "n_epochs": ("replay_ratio",),
    "n_steps": ("horizon", "n_step"),
    "num_steps": ("horizon", "n_step"),
    "start_e": ("epsilon_start",),
    "target_network_frequency": ("target_interval",),
    "target_update_interval": ("target_interval",),
    "total_timesteps": ("total_steps",),
    "update_epochs": ("replay_ratio",),
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What the loop around any trainer does; trainers' settings inherit it."""

    GROUPS: ClassVar[Mapping[str, str]] = {"log_interval": "run"}
    """The help's groups: the first field of each, and its name."""

    log_interval: int = 1
    """Epochs between two lines of metrics.jsonl (epochs, >= 1); each checkpoint has one too."""

    checkpoint_interval: int = 20
    """Epochs between two checkpoints (epochs, >= 1); more are written at the start, at the end and at an interrupt."""

    keep_checkpoints: int = 2
    """Checkpoints kept; older ones are deleted (>= 1)."""

    eval_episodes: int = 100
    """Episodes played by the greedy policy when training ends (episodes, >= 0; 0 plays none)."""

    logger: tuple[Literal["wandb", "trackio"], ...] = ()
    """Trackers to log to besides metrics.jsonl and TensorBoard: wandb, trackio, each an extra of that name."""

    project: str = "sharpwave"
    """The project under which trackers file the run."""

    threads: int = 1
    """CPU threads of PyTorch and of the CPU kernels (>= 1). More pay for wide networks on idle cores only: where
    another process takes one of the cores, every thread waits for the one that lost its own."""

    def for_playing(self) -> Any:
        """These settings for a trainer that only plays, without what takes memory to train."""
        return self

    def require(self, ok: bool, name: str, rule: str) -> None:
        """Raise UserError, which says by what `rule` and what the field `name` is, unless `ok`."""
        if not ok:
            raise UserError(f"--{name.replace('_', '-')} must be {rule}; got {getattr(self, name)}")

    def validate(self) -> None:
        """Raise UserError, in one line that says what to do, where a value is out of range."""
        for name in ("log_interval", "checkpoint_interval", "keep_checkpoints", "threads"):
            self.require(getattr(self, name) >= 1, name, "at least 1")
        if self.eval_episodes < 0:
            raise UserError(f"--eval-episodes must be at least 0; got {self.eval_episodes}: 0 skips the evaluation")


@dataclass(frozen=True)
class TrainerConfig(RunConfig):
    """What the settings of every trainer begin with."""

    GROUPS: ClassVar[Mapping[str, str]] = {"env": "experiment"}

    env: str
    """Environment: a Gymnasium id (CartPole-v1), a native one (sharpwave/CartPole), or module:attribute."""
    seed: int = 0
    """Seed of every random stream. Runs of equal seed, configuration and machine are equal bit for bit."""
    device: str = "auto"
    """Where network, replay and native environments live: cpu, cuda, cuda:1, or auto (cuda where there is one)."""
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment, e.g. k=4 delay=8."""

    def chosen_device(self, cuda: bool) -> tuple[str, bool]:
        """The device that "auto" stands for, and whether it is a GPU.

        Args:
            cuda: whether a CUDA device can be used.

        Raises:
            UserError: a CUDA device is asked for where there is none.
        """
        device = ("cuda" if cuda else "cpu") if self.device == "auto" else self.device
        on_gpu = device.startswith("cuda")
        if on_gpu and not cuda:
            raise UserError(f"--device {self.device}: no CUDA device can be used here; use --device cpu")
        return device, on_gpu

    def validate(self) -> None:
        """Raise UserError, in one line that says what to do, where a value is out of range."""
        super().validate()
        self.require(0 <= self.seed < 2**63, "seed", "in [0, 2^63)")
        odd = plain_json.nonfinite(self.env_kwargs, "--env-kwargs")
        if odd is not None:
            raise UserError(
                f"{odd[0]} must be finite; got {odd[1]}: settings are kept as JSON, which has no such number"
            )


def config_class(algorithm: str) -> Any:
    """The settings dataclass of an algorithm."""
    return _member(algorithm, 0)


def trainer_class(algorithm: str) -> Any:
    """The trainer of an algorithm: `trainer_class(a)(config)` is a `sharpwave.run.loop.Trainer`."""
    return _member(algorithm, 1)


def layers(
    algorithm: str, file: Path | None, env: str | None, device: str | None = None
) -> tuple[dict[str, Any], str | None]:
    """The settings that preset and file make, and the environment they are for.

    Args:
        algorithm: a key of ALGORITHMS.
        file: a TOML file of settings by name (or the config.json of a run), or None.
        env, device: those given on the command line, which win over the file's; or None.

    Returns:
        ({field: value} without those left at their defaults, env or None).
    """
    given = read_file(file) if file is not None else {}
    given = coerce_all(config_class(algorithm), given, str(file))
    env = env if env is not None else given.get("env")
    below: dict[str, Any] = {}
    if env is not None:
        on_gpu = (algorithm, env) in ON_GPU and _is_gpu(device or given.get("device", "auto"))
        below = preset(algorithm, env, on_gpu)
    return merge(below, given, {"env": env} if env is not None else {}), env


def _is_gpu(device: str) -> bool:
    """Whether a --device is a CUDA device."""
    if device != "auto":
        return device.startswith("cuda")
    import torch  # only here: PyTorch takes seconds to import

    return torch.cuda.is_available()


def merge(*settings: Mapping[str, Any]) -> dict[str, Any]:
    """Later settings over earlier ones; where both are dicts (env_kwargs), key by key."""
    merged: dict[str, Any] = {}
    for layer in settings:
        for name, value in layer.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
            merged[name] = {**merged[name], **value} if both else value
    return merged


def build(algorithm: str, settings: Mapping[str, Any], source: str) -> Any:
    """The checked settings dataclass. `source` is named in errors ("runs/x/config.json").

    Raises:
        UserError: an unknown or missing name, a value of another type, or one out of range.
    """
    cls = config_class(algorithm)
    values = coerce_all(cls, settings, source)
    missing = [f.name for f in dataclasses.fields(cls) if f.name not in values and _required(f)]
    if missing:
        raise UserError(f"{source}: {', '.join(missing)} must be given")
    return check(cls(**values))


def check(config: Any) -> Any:
    """`config`, if its `validate` accepts it; else its ValueError as a UserError."""
    try:
        config.validate()
    except ValueError as error:
        raise UserError(" ".join(str(error).split())) from error
    return config


def read_file(path: Path) -> dict[str, Any]:
    """Settings from a TOML file, or a JSON file whose name ends in .json."""
    try:
        text = path.read_text(encoding="utf-8")
        data = plain_json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise UserError(f"cannot read the config file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # TOML nested too deeply
        raise UserError(f"the config file {path} is not valid: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise UserError(f"the config file {path} must hold settings by name; it holds a {type(data).__name__}")
    return data


def to_json(config: Any) -> str:
    """Every field by name, as JSON that `build` reads back to an equal dataclass."""
    return json.dumps({f.name: getattr(config, f.name) for f in dataclasses.fields(config)}, indent=2) + "\n"


def coerce_all(cls: Any, settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    """`settings` with each value as its field's type has it (a list for a tuple, 1 for 1.0).

    Raises:
        UserError: a name that is no field of `cls` (the closest one is named), or a value of another type.
    """
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    values = {}
    for key, value in settings.items():
        name = key.replace("-", "_")
        if name not in names and isinstance(value, Mapping):
            raise UserError(f"{source}: there is no table [{key}]: settings stand at the top level, such as lr = 0.01")
        if name not in names:
            raise UserError(f"{source}: unknown setting {key!r}{closest(name, names)}")
        try:
            values[name] = _coerce(value, hints[name])
        except TypeError:
            expected = _describe(hints[name])
            raise UserError(f"{source}: {name} must be {expected}; got {json.dumps(value, default=str)}") from None
    return values


def closest(word: str, known: Iterable[str]) -> str:
    """ ": did you mean 'x'?" for the known word that other libraries call so, or the most similar one; "" where none is
    near."""
    known = list(known)
    plain = {name.removeprefix("--").replace("-", "_"): name for name in known}
    synonyms = ELSEWHERE.get(word.removeprefix("--").replace("-", "_"), ())
    near = [plain[name] for name in synonyms if name in plain]
    near = near or difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f": did you mean {near[0]!r}?" if near else ""


def _member(algorithm: str, which: int) -> Any:
    if algorithm not in ALGORITHMS:
        raise UserError(f"unknown algorithm {algorithm!r}: choose {' or '.join(ALGORITHMS)}")
    module, _, name = ALGORITHMS[algorithm][which].partition(":")
    return getattr(importlib.import_module(module), name)


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _coerce(value: Any, hint: Any) -> Any:
    """`value` as an instance of the type `hint`, or TypeError. Only what JSON and TOML can write comes in."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _coerce(value, args[0])
    if origin in (typing.Union, types.UnionType):
        for choice in args:
            try:
                return _coerce(value, choice)
            except TypeError:
                continue
        raise TypeError
    if origin is typing.Literal:
        if any(value == a and type(value) is type(a) for a in args):
            return value
        raise TypeError
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_coerce(v, args[0]) for v in value)
        if len(args) != len(value):
            raise TypeError
        return tuple(_coerce(v, a) for v, a in zip(value, args, strict=True))
    if origin is list:
        if not isinstance(value, list | tuple):
            raise TypeError
        return [_coerce(v, args[0]) for v in value]
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
            raise TypeError
        return {k: _coerce(v, args[1]) for k, v in value.items()}
    if hint in (Any, object):
        return value
    if hint is None or hint is types.NoneType:
        if value is None:
            return None
        raise TypeError
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)  # 1e6 in a TOML file
    if (hint is bool or not isinstance(value, bool)) and isinstance(hint, type) and isinstance(value, hint):
        return value
    raise TypeError


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _describe(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(a) for a in args)
    if origin is typing.Literal:
        return "one of " + ", ".join(json.dumps(a) for a in args)
    if origin in (tuple, list):
        return f"a list of {_describe(args[0]).removeprefix('an ').removeprefix('a ')}s"
    if origin in (dict, Mapping):
        return "a table of values by name"
    names = {int: "an integer", float: "a number", str: "a string", bool: "true or false", types.NoneType: "nothing"}
    return names.get(hint, getattr(hint, "__name__", str(hint)))
