"""Stands in for `sharpwave train` and `resume` in tests of sweeps: a run of ten epochs with the same files, in no time.

An epoch takes `vf_coef` seconds, and the return rises to 100 - |log10(lr) + 2| * 20. Where `hidden` is 13 it fails, and
where it is 14 no episode ends.
"""

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

from sharpwave.algos.ppo_config import PPOConfig
from sharpwave.run import config as configs
from sharpwave.run import rundir, runs

EPOCHS = 10


def main(command: str, *args: str) -> int:
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    if command == "train":
        options = dict(zip(args[1::2], args[2::2], strict=True))
        settings = configs.read_file(Path(options["--config"]))
        if settings["hidden"] == 13:
            print("sharpwave: error: 13 is unlucky")
            return 2
        run = rundir.create(Path(options["--run-dir"]), "ppo", PPOConfig(**settings), [command, *args])
        (run / rundir.CHECKPOINTS).mkdir()
        epoch = 0
    else:
        run = Path(args[0])
        epoch = runs.read(run).checkpoint // 32
    (run / "pid").write_text(str(os.getpid()))
    settings = json.loads((run / rundir.CONFIG).read_text())
    top = math.nan if settings["hidden"] == 14 else 100 - 20 * abs(math.log10(settings["lr"]) + 2)
    with rundir.lock(run), (run / rundir.METRICS).open("a+") as log:
        log.seek(0)
        kept = log.readlines()[:epoch]
        log.truncate(0)
        log.writelines(kept)
        while epoch < EPOCHS and not stopped:
            time.sleep(settings["vf_coef"])
            epoch += 1
            line = {"step": 32 * epoch, "epoch": epoch, "time/elapsed": 0.1 * epoch}
            if math.isfinite(top):
                line["episode/return"] = top * epoch / EPOCHS
            log.write(json.dumps(line) + "\n")
            log.flush()
            if epoch in (1, EPOCHS) or stopped:
                (run / rundir.CHECKPOINTS / f"step-{32 * epoch:012d}").mkdir(exist_ok=True)
    return 143 if stopped else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
