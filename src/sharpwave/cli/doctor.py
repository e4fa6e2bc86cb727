"""`sharpwave doctor`."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from sharpwave.run import options


@dataclass
class Doctor:
    """Check this machine and installation, and say what to do about each problem. Exit code 1 where there is one."""

    folder: Path = Path("runs")
    """Where runs shall go: room and permission are checked there."""

    json: bool = False
    """Print JSON instead of lines."""


def main(args: list[str]) -> int:
    chosen = options.parse(Doctor, args, "sharpwave doctor")
    from sharpwave.run import doctor

    findings = doctor.examine(chosen.folder)
    problems = sum(finding.state == "problem" for finding in findings)
    if chosen.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
        return 1 if problems else 0
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{finding.state:7}  {finding.what:{width}}  {finding.found}")
        if finding.advice:
            print(f"{'':7}  {'':{width}}  -> {finding.advice}")
    print({0: "no problem"}.get(problems, f"{problems} problem{'s' if problems > 1 else ''}"))
    return 1 if problems else 0
