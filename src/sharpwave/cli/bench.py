"""`sharpwave bench`: one measurement a module, each found when it is asked for."""

import importlib

from sharpwave.run import options
from sharpwave.run.config import closest
from sharpwave.run.errors import UserError

BENCHMARKS = {
    "train": ("sharpwave.run.bench_train", "TrainBenchmark", "PPO: collecting and training, by minibatch"),
    "dqn": ("sharpwave.run.bench_dqn", "DQNBenchmark", "DQN: updates by phase, beside other replay buffers"),
}


def main(args: list[str]) -> int:
    if args and args[0] in ("-h", "--help"):
        print("usage: sharpwave bench WHAT [OPTIONS]\n")
        for name, (_, _, summary) in BENCHMARKS.items():
            print(f"  {name:6} {summary}")
        print("\n`sharpwave bench WHAT --help` lists its options.")
        return 0
    if not args:
        raise UserError(f"what to measure is missing: sharpwave bench {' or '.join(BENCHMARKS)}")
    name = args[0]
    if name not in BENCHMARKS:
        advice = closest(name, BENCHMARKS) or f": choose {' or '.join(BENCHMARKS)}"
        raise UserError(f"sharpwave bench: unknown {name!r}{advice}")
    module_name, cls, _ = BENCHMARKS[name]
    module = importlib.import_module(module_name)
    chosen = options.parse(getattr(module, cls), args[1:], f"sharpwave bench {name}")
    from sharpwave.run.info import check_device

    check_device(chosen.device)
    return module.main(chosen)
