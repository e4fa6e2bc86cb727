"""Every table in turn, each in a process of its own: python -m benchmarks [NAME ...] [--device cpu]"""

import argparse
import pkgutil
import subprocess
import sys
from pathlib import Path

import torch

import benchmarks


def tables() -> list[str]:
    found = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(name for name in found if _is_table(name))


def _is_table(name: str) -> bool:
    # By its text: importing it would import its peers.
    source = (Path(benchmarks.__file__).parent / f"{name}.py").read_text()
    return not name.startswith("_") and "\ndef main(" in source and '"--device"' in source


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(tables())}; all by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    failed = []
    for name in args.names or tables():
        print(f"== {name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}", "--device", args.device]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
