"""The command `sharpwave`: one module here for each command, whose `main(args)` returns the exit code.

Nothing heavy is imported before a command needs it: `sharpwave --help` answers at once.
"""

import importlib
import os
import signal
import sys
from collections.abc import Sequence

import sharpwave
from sharpwave.run.errors import RankFailed, UserError, own_frames

EXIT_USER_ERROR = 2
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE, which Windows lacks

# A command's name is that of its module.
COMMANDS = {
    "train": "Train an agent: sharpwave train ppo --env CartPole-v1",
    "resume": "Continue a stopped run: sharpwave resume runs/x",
    "eval": "Play episodes with a trained agent: sharpwave eval runs/x --episodes 100",
    "sweep": "Search for settings: sharpwave sweep ppo --env CartPole-v1 --trials 20",
    "plot": "Learning curves with their spread over seeds: sharpwave plot runs",
    "runs": "List and compare runs: sharpwave runs",
    "envs": "Environments that can be used, and what one is like: sharpwave envs CartPole-v1",
    "doctor": "Check this machine and installation, and say what to do",
    "info": "Versions, devices, and the backend of every op",
    "parity": "Check kernels against their references: sharpwave parity mingru",
    "bench": "Measure speed: sharpwave bench train",
}

TOGETHER = ("train", "resume", "bench train")  # what the ranks that torchrun starts do together


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return its exit code.

    0: done. 2: the input was wrong; one line on stderr says what and what to do, and where an environment of the user's
    raised, the lines below it say where in the user's code. 130 and 143: stopped by Ctrl-C and by
    SIGTERM.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(args)
    except UserError as error:
        if isinstance(error, RankFailed) and not error.is_shown:
            return EXIT_USER_ERROR
        print("sharpwave: error:", " ".join(str(error).splitlines()), file=sys.stderr)
        for line in own_frames(error):
            print(line, file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # `sharpwave ... | head`: the reader has gone, and what is left in the buffer with it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        print("sharpwave: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except SystemExit as stop:  # after --help
        return int(stop.code or 0)


def _dispatch(args: list[str]) -> int:
    if not args:
        raise UserError(f"a command is missing: {', '.join(COMMANDS)} (see sharpwave --help)")
    name, *rest = args
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name in ("-V", "--version"):
        print(f"sharpwave {sharpwave.__version__}")
        return 0
    if name not in COMMANDS:
        from sharpwave.run.config import closest

        advice = closest(name, COMMANDS) or f": choose {' or '.join(COMMANDS)}"
        raise UserError(f"unknown command {name!r}{advice}")
    whole = f"{name} {rest[0]}" if name == "bench" and rest else name
    if "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1" and whole not in TOGETHER:
        raise UserError(f"sharpwave {whole} is done by one process: start it without torchrun")
    return importlib.import_module(f"sharpwave.cli.{name}").main(rest)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: sharpwave COMMAND [OPTIONS]",
            "",
            sharpwave.__doc__ or "",
            "",
            "commands:",
            *lines,
            "",
            "`sharpwave COMMAND --help` explains a command; `sharpwave --version` says which version this is.",
            "Start here: sharpwave train ppo --env CartPole-v1",
        ]
    )
