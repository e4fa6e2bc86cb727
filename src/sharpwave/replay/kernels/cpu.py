"""The steps of a buffer for CPUs: one Numba call each, on NumPy views taken once.

The tree's kernels are called from within, past the dispatcher: a small PyTorch operation costs 2 to 5 us here, as long
as drawing 30 items, and the checks of the public functions twice that.
"""

import numba
import numpy as np

from sharpwave.ops.sumtree import cpu as tree
from sharpwave.ops.sumtree._prefetch import prefetch
from sharpwave.replay.kernels._addresses import clear_bytes, copy_bytes, prefetch_address
from sharpwave.replay.state import AGE, DRAWN, HELD, NOTHING, WRITTEN

NO_NORM, BATCH_NORM, BUFFER_NORM = range(3)


@numba.njit(cache=True)
def fill(leaves, nodes, offsets, shift, start, end, value):
    """leaf[start:end] = value: neighbours share their nodes, so a node is read and written once for all of them."""
    levels = offsets.shape[0] - 1
    high, low = tree.digits(value)
    at = start
    while at < end:
        parent = at >> shift
        stop = min(end, (parent + 1) << shift)
        change_high, change_low = np.int64(0), np.int64(0)
        for i in range(at, stop):
            old_high, old_low = tree.digits(leaves[i])
            change_high += high - old_high
            change_low += low - old_low
            leaves[i] = value
        node = at
        for level in range(levels - 1, -1, -1):
            node >>= shift
            k = 2 * (offsets[level] + node)
            nodes[k] += change_high
            nodes[k + 1] += change_low
        at = stop


@numba.njit(cache=True)
def add_items(leaves, nodes, offsets, shift, generation, head, counters, ring, n, value):
    """`reference.add_items`; returns the first slot."""
    first = head[0]
    written, fresh = counters[WRITTEN], 0
    for k in range(n):
        slot = first + k
        if slot >= ring:
            slot -= ring
        fresh += leaves[slot] == 0
        generation[slot] = written + k
    end = min(first + n, ring)
    fill(leaves, nodes, offsets, shift, first, end, value)
    fill(leaves, nodes, offsets, shift, 0, first + n - end, value)
    counters[HELD] += fresh
    counters[WRITTEN] += n
    head[0] = (first + n) % ring
    return first


@numba.njit(cache=True)
def add_step(
    leaves,
    nodes,
    offsets,
    shift,
    generation,
    step,
    head,
    episode_step,
    counters,
    status,
    ended,
    valid,
    ring,
    span,
    short,
    period,
    frames,
    value,
    slots,
    next_slots,
    touched,
):
    """`reference.add_step`; `touched` (N (frames + 1 + span),) receives the leaves that may have changed: how many."""
    held, written = 0, counters[WRITTEN]
    values = np.zeros(touched.shape[0], np.float32)
    k = 0
    for env in range(head.shape[0]):
        base, position, at = env * ring, head[env], episode_step[env]
        slots[env] = base + position
        next_slots[env] = base + (position + 1) % ring
        if not valid[env]:
            continue
        for ahead in range(frames + 1):
            dead = base + (position + ahead) % ring
            held -= leaves[dead] > 0
            generation[dead] = NOTHING
            touched[k] = dead
            k += 1
        generation[slots[env]] = written + env
        step[slots[env]] = at
        for back in range(span):
            complete = back == span - 1 or (short and ended[env])
            complete = complete and back <= at and (at - back) % period == 0
            touched[k] = base + (position - back) % ring if complete else next_slots[env]
            values[k] = value if complete else np.float32(0)
            held += complete
            k += 1
        head[env] = (position + 1 + ended[env]) % ring
        episode_step[env] = 0 if ended[env] else at + 1
    tree.update(leaves, nodes, offsets, shift, leaves.shape[0], status, touched[:k], values[:k], True)
    counters[HELD] += held
    counters[WRITTEN] += head.shape[0]
    return k


@numba.njit(cache=True)
def _current_beta(beta, offset):
    done = np.float32(0)
    if beta[2] > 0:
        done = min(np.float32(offset[0]) / max(beta[2], np.float32(1)), np.float32(1))
    return beta[0] + (beta[1] - beta[0]) * done


@numba.njit(cache=True)
def draw(
    leaves,
    nodes,
    offsets,
    shift,
    generation,
    counters,
    seed,
    offset,
    stratified,
    betas,
    own_beta,
    beta,
    norm,
    smallest,
    ints,
    floats,
):
    """`reference.draw`; False if there is nothing to draw. With own_beta, beta is the buffer's own.

    ints (2 or more, B): indices, generations. floats (2 or more, B): weights, probabilities.
    """
    indices, generations = ints[0], ints[1]
    weights, probabilities = floats[0], floats[1]
    n = indices.shape[0]
    total = np.empty(1)
    power = np.float64(_current_beta(betas, offset)) if own_beta else beta
    # The leaves pass through `weights`.
    if not tree.sample(leaves, nodes, offsets, shift, seed[0], offset, stratified, indices, weights, total):
        return False
    for k in range(n):
        prefetch(generation, indices[k])
    if norm == BATCH_NORM:
        smallest = weights[0]
        for k in range(n):
            smallest = min(smallest, weights[k])
    age, newest = 0, counters[WRITTEN] - 1
    mass = total[0] / counters[HELD]
    for k in range(n):
        leaf = np.float64(weights[k])
        probabilities[k] = leaf / total[0]
        ratio = mass / leaf if norm == NO_NORM else np.float64(smallest) / leaf
        weights[k] = 1.0 if ratio == 1.0 else ratio**power
        generations[k] = generation[indices[k]]
        age += newest - generations[k]
    counters[DRAWN] += n
    counters[AGE] += age
    return True


@numba.njit(cache=True)
def update(
    leaves,
    nodes,
    offsets,
    shift,
    capacity,
    status,
    generations,
    indices,
    td_error,
    max_priority,
    generation,
    has_generation,
    alpha,
    eps,
    p_max,
    kept_indices,
):
    """How many leaves were set (their indices are in `kept_indices`); or minus the first bad item's number, less 1."""
    n = indices.shape[0]
    for k in range(n):
        if indices[k] < 0 or indices[k] >= capacity:
            return -1 - k
        prefetch(generations, indices[k])
        prefetch(leaves, indices[k])
    given = generation
    if not has_generation:
        given = np.empty(n, np.int64)
        for k in range(n):
            given[k] = generations[indices[k]]
    kept, values = tree.priorities(
        leaves, indices, td_error, max_priority, given, generations, True, alpha, eps, p_max, status
    )
    tree.update(leaves, nodes, offsets, shift, capacity, status, kept, values, True)
    kept_indices[: kept.shape[0]] = kept
    return kept.shape[0]


@numba.njit(cache=True)
def discount(ints, terminated, gamma, floats):
    for k in range(ints.shape[1]):
        floats[2, k] = np.float32(0) if terminated[ints[0, k]] else gamma


@numba.njit(cache=True)
def window(ints, reward, terminated, truncated, step, gamma, span, ring, frames, floats, flags, slots):
    """n-step windows and the slots of their stacks: `windows.n_step_return` and `windows.stack_slots`.

    ints[0]: first slots. floats[2] and [3] receive discount and return, flags (2, B) terminated and truncated of the
    last step, slots (3, B, frames) the first slot, the first observation's stack, and the next observation's.
    """
    n = ints.shape[1]
    for k in range(n):
        prefetch(reward, ints[0, k])
        prefetch(terminated, ints[0, k])
        prefetch(truncated, ints[0, k])
        prefetch(step, ints[0, k])
    for k in range(n):
        first = ints[0, k]
        base = first - first % ring
        position = first - base
        total, power = np.float32(0), np.float32(1)
        at = first
        for j in range(span):
            at = base + (position + j) % ring
            total += power * reward[at]
            power *= gamma
            if terminated[at] or truncated[at]:
                break
        floats[2, k] = np.float32(0) if terminated[at] else power
        floats[3, k] = total
        flags[0, k] = terminated[at]
        flags[1, k] = truncated[at]
        following = at - base + 1
        for j in range(frames):
            back = frames - 1 - j
            slots[0, k, j] = first
            slots[1, k, j] = base + (position - min(back, step[first])) % ring
            slots[2, k, j] = base + (following - min(back, step[at] + 1)) % ring


@numba.njit(inline="always", cache=True)
def _copy_rows(origin, size, to, indices):
    """Rows of `size` bytes; a constant size compiles to a load and a store."""
    n = indices.shape[0]
    if size == 1:
        for k in range(n):
            copy_bytes(to + k, origin + indices[k], 1)
    elif size == 4:
        for k in range(n):
            copy_bytes(to + 4 * k, origin + 4 * indices[k], 4)
    elif size == 8:
        for k in range(n):
            copy_bytes(to + 8 * k, origin + 8 * indices[k], 8)
    elif size == 16:
        for k in range(n):
            copy_bytes(to + 16 * k, origin + 16 * indices[k], 16)
    else:
        for k in range(n):
            copy_bytes(to + size * k, origin + size * indices[k], size)


@numba.njit(cache=True)
def gather(table, ints):
    """Copy the rows ints[0] of every field. table (fields, 3) int64: address of the field, bytes a row, address of the
    output. The caller keeps all of it alive, and the rows in range."""
    for f in range(table.shape[0]):
        for k in range(ints.shape[1]):
            prefetch_address(table[f, 0] + ints[0, k] * table[f, 1])
    for f in range(table.shape[0]):
        _copy_rows(table[f, 0], table[f, 1], table[f, 2], ints[0])


@numba.njit(cache=True)
def gather_stacks(table, which, slots):
    """The same with three kinds of rows, which[f] of slots (3, B, frames): 0 takes one row an item, 1 and 2 a stack."""
    for f in range(table.shape[0]):
        for k in range(slots.shape[1]):
            prefetch_address(table[f, 0] + slots[which[f], k, 0] * table[f, 1])
    for f in range(table.shape[0]):
        if which[f] == 0:
            _copy_rows(table[f, 0], table[f, 1], table[f, 2], slots[0, :, 0])
        else:
            _copy_rows(table[f, 0], table[f, 1], table[f, 2], slots[which[f]].reshape(-1))


@numba.njit(cache=True)
def sequence(ints, terminated, truncated, ring, mask, lengths, last):
    """Windows of consecutive steps from the slots ints[0] on: mask (B, span) of the steps up to the first end, their
    number lengths (B,), and last (B,), the slot of the observation after them."""
    n, span = mask.shape
    for k in range(n):
        prefetch(terminated, ints[0, k])
        prefetch(truncated, ints[0, k])
    for k in range(n):
        position = ints[0, k] % ring
        base = ints[0, k] - position
        length = 0
        goes_on = True
        for j in range(span):
            mask[k, j] = goes_on
            length += goes_on
            at = base + position
            goes_on = goes_on and not (terminated[at] or truncated[at])
            position += 1
            if position == ring:
                position = 0
        lengths[k] = length
        last[k] = base + (ints[0, k] - base + length) % ring


@numba.njit(cache=True)
def gather_sequences(table, which, ints, lengths, last, span, ring, pad):
    """Rows of every field: where which[f] is 0 `span` consecutive ones of ints[0]'s ring (with `pad`, zeros instead of
    those past `lengths`), else one row an item, of `last`."""
    for f in range(table.shape[0]):
        origin, size, to = table[f]
        if which[f] == 1:
            _copy_rows(origin, size, to, last)
            continue
        for k in range(lengths.shape[0]):
            prefetch_address(origin + ints[0, k] * size)
        for k in range(lengths.shape[0]):
            first = ints[0, k]
            start = to + k * span * size
            count = lengths[k] if pad else span
            before_seam = min(count, ring - first % ring)
            copy_bytes(start, origin + first * size, before_seam * size)
            copy_bytes(start + before_seam * size, origin + (first - first % ring) * size, (count - before_seam) * size)
            clear_bytes(start + count * size, (span - count) * size)
