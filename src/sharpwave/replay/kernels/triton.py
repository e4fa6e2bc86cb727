"""The steps of a buffer on a GPU: one launch for an `add`, one for a `sample`, whatever the fields.

The definitions are `reference` and `windows`. Counters, heads, beta and the stream's position stay on the device. A
program serves one item. The last program of a launch to arrive at its end, which a count that all of them raise tells,
moves the counters on for the next launch and does what needs every draw: nobody waits for anybody.
"""

from sharpwave.ops._philox_triton import MAX_PROGRAMS
from sharpwave.replay.kernels._add_triton import add
from sharpwave.replay.kernels._sample_triton import BATCH_NORM, BUFFER_NORM, NO_NORM, sample

__all__ = ["BATCH_NORM", "BUFFER_NORM", "MAX_PROGRAMS", "NO_NORM", "add", "sample"]
