"""`python -m sharpwave` is the command `sharpwave`."""

import sys

from sharpwave.cli import main

sys.exit(main())
