"""`sharpwave parity OP`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from sharpwave.run import options
from sharpwave.run.errors import UserError


@dataclass
class Parity:
    """Hold an op's kernels against their reference, bit for bit or to the stated tolerance."""

    op: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OP")] = ""
    """Which op: cdf, mingru, sumtree, or any other whose folder has a parity.py. Without it they are listed."""

    device: str = "auto"
    """Where its kernels run: cpu, cuda, or auto (cuda where there is one)."""


def main(args: list[str]) -> int:
    chosen = options.parse(Parity, args, "sharpwave parity")
    from sharpwave.run import parity as harness
    from sharpwave.run.info import check_device

    if not chosen.op:
        raise UserError(f"an op is missing: sharpwave parity {' or '.join(harness.ops_with_cases())}")
    check_device(chosen.device)
    try:
        harness.cases(chosen.op)
    except ValueError as error:
        raise UserError(str(error)) from error
    return harness.main(chosen.op, None if chosen.device == "auto" else chosen.device)
