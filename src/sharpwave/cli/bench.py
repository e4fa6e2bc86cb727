"""`sharpwave bench train`."""

from sharpwave.run import options
from sharpwave.run.bench_train import TrainBenchmark
from sharpwave.run.errors import UserError


def main(args: list[str]) -> int:
    if args and args[0] in ("-h", "--help"):
        print("usage: sharpwave bench train [OPTIONS]\n\n`sharpwave bench train --help` lists them.")
        return 0
    if not args or args[0] != "train":
        raise UserError(f"what to measure is missing: sharpwave bench train; got {args[0] if args else 'nothing'!r}")
    chosen = options.parse(TrainBenchmark, args[1:], "sharpwave bench train")
    from sharpwave.run import bench_train
    from sharpwave.run.info import check_device

    check_device(chosen.device)
    return bench_train.main(chosen)
