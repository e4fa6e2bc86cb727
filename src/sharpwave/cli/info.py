"""`sharpwave info`."""

from dataclasses import dataclass

from sharpwave.run import options


@dataclass
class Info:
    """Versions, devices, and which backend serves each op on each device: what to send with a bug report."""


def main(args: list[str]) -> int:
    options.parse(Info, args, "sharpwave info")
    from sharpwave.run import info as report

    print(report.text())
    return 0
