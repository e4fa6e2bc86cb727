"""A buffer in shards: what one rank draws weighs what it would in a draw from all of them."""

import pytest
import torch

import sharpwave

TD = torch.tensor([[0.5, 0.0, 3.0, 1.0], [1.0, 8.0, 0.25, 0.1]])
F = torch.tensor([[1.0, -2.0, 0.5, 2.0], [4.0, 0.1, -3.0, 1.0]], dtype=torch.float64)


def shard(rank, **options):
    buffer = sharpwave.PrioritizedReplay(4, seed=rank, **options)
    indices = buffer.add(x=torch.arange(4))
    buffer.update_priorities(indices, TD[rank])
    return buffer


class Told(Exception):
    pass


def sample_both(shards, n, **options):
    """Each shard's draw, once all have told each other what they must: two passes, of which the first only tells."""
    told = []

    def listen(x):
        told.append(x.clone())
        raise Told

    states = [buffer.state_dict() for buffer in shards]
    for buffer, state in zip(shards, states, strict=True):
        with pytest.raises(Told):
            buffer.sample(n, group=listen, **options)
        buffer.load_state_dict(state)
    return [buffer.sample(n, group=lambda _x: torch.stack(told), **options) for buffer in shards]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("norm", ["batch", "buffer", None])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_weights_and_probabilities_are_the_unions(norm, beta, backend):
    shards = [shard(rank, weight_norm=norm, beta=beta, backend=backend) for rank in range(2)]
    leaves = torch.stack([buffer.state.tree.leaves[:4].double() for buffer in shards])
    union = leaves / leaves.sum()
    raw = (8 * union).pow(-beta)
    batches = sample_both(shards, 3000)
    assert all(len(batch.indices.unique()) >= 3 for batch in batches)
    drawn = torch.stack([batch.indices for batch in batches])
    largest = {"batch": raw.gather(1, drawn).max(), "buffer": raw.max(), None: 1.0}[norm]
    counts_for = 2 * leaves.sum(1) / leaves.sum()
    for rank, batch in enumerate(batches):
        torch.testing.assert_close(batch.probabilities, union[rank, batch.indices].float(), rtol=1e-6, atol=0)
        want = raw[rank, batch.indices] / largest * counts_for[rank]
        torch.testing.assert_close(batch.weights, want.float(), rtol=1e-5, atol=0)
        assert torch.equal(batch.x, batch.indices)


@pytest.mark.parametrize("beta", [0.0, 0.6])
def test_the_expected_loss_is_one_buffers(beta):
    """Of every item its weight, times the probability with which its own shard draws it: no sampling error."""
    shards = [shard(rank, weight_norm="buffer", beta=beta) for rank in range(2)]
    leaves = torch.stack([buffer.state.tree.leaves[:4].double() for buffer in shards])
    local, union = leaves / leaves.sum(1, keepdim=True), leaves / leaves.sum()
    got = torch.zeros(())
    for rank, batch in enumerate(sample_both(shards, 200_000)):
        weight = torch.zeros(4).index_copy(0, batch.indices, batch.weights)
        assert (weight > 0).sum() >= 3  # the item without an error is drawn once in a thousand draws or less
        got = got + 0.5 * (local[rank] * weight * F[rank] * (weight > 0)).sum()
    raw = (8 * union).pow(-beta)
    assert got.item() == pytest.approx((union * raw / raw.max() * F).sum().item(), rel=2e-3)
    assert (0.5 * local * F).sum() != pytest.approx((union * F).sum().item(), rel=0.01), "it could be wrong"


def test_new_items_enter_with_the_largest_priority_of_all_shards():
    shards = [shard(rank, alpha=1.0) for rank in range(2)]
    sample_both(shards, 8)
    assert [float(buffer.max_priority) for buffer in shards] == [pytest.approx(8.0, rel=1e-6)] * 2


def test_into_an_earlier_batch_and_with_a_beta_of_its_own():
    shards = [shard(rank, weight_norm=None) for rank in range(2)]
    kept = [buffer.sample(16) for buffer in shards]
    draws = [int(buffer.state.offset) for buffer in shards]
    told = []
    for buffer, batch in zip(shards, kept, strict=True):
        # A shard beside one like it: it is half of the union.
        again = buffer.sample(16, out=batch, beta=1.0, group=lambda x: told.append(x) or torch.stack([x, x]))
        assert again is batch
        torch.testing.assert_close(batch.weights, 1 / (8 * batch.probabilities))
    assert all(len(x) == 4 for x in told) and draws == [16, 16]


def test_what_is_no_group_is_refused():
    with pytest.raises(TypeError, match=r"group must be a torch.distributed process group.*got 3"):
        shard(0).sample(4, group=3)


@pytest.mark.parametrize("norm", ["batch", "buffer", None])
def test_a_shard_with_nothing_to_draw_leaves_the_others_their_weights(norm):
    """It tells that it is empty before it raises, and the other draws as if it were alone."""
    told = []

    def gather(x):
        told.append(x.clone())
        return torch.stack([torch.zeros_like(x), x])

    with pytest.raises(ValueError, match="empty buffer"):
        sharpwave.PrioritizedReplay(4, weight_norm=norm).sample(5, group=gather)
    cleared = shard(0, weight_norm=norm)
    cleared.clear()
    with pytest.raises(ValueError, match="nothing to draw"):
        cleared.sample(5, group=gather)
    assert all(torch.equal(x, torch.zeros(4, dtype=torch.float64)) for x in told) and len(told) == 2
    alone = shard(1, weight_norm=norm).sample(50)
    batch = shard(1, weight_norm=norm).sample(50, group=gather)
    assert torch.equal(batch.indices, alone.indices)
    # An empty shard counts for nothing, and the other for both.
    torch.testing.assert_close(batch.weights, 2 * alone.weights, rtol=1e-6, atol=0)
