"""The sum tree for GPUs: updates (`_update_triton`) and draws (`_draw_triton`)."""

from sharpwave.ops.sumtree._draw_triton import draw_leaves, stratum, top_level, total_value, tree_sample
from sharpwave.ops.sumtree._update_triton import (
    add_change,
    refresh_extrema,
    tree_rebuild,
    tree_update,
    tree_update_priorities,
)

__all__ = [
    "add_change",
    "draw_leaves",
    "refresh_extrema",
    "stratum",
    "top_level",
    "total_value",
    "tree_rebuild",
    "tree_sample",
    "tree_update",
    "tree_update_priorities",
]
