"""The policy: steps equal the segment, spaces and encoders, draws from its distributions."""

import pytest
import torch

from sharpwave.envs import Continuous, Discrete, Observation
from sharpwave.nn import CategoricalActions, GaussianActions, Policy, make_encoder
from sharpwave.nn.linear import AlignedLinear, linear_float32
from sharpwave.ops.ppo_loss import ppo_loss_categorical

FLAT = Observation((5,), torch.float32)


@pytest.mark.parametrize("action", [Discrete((3,)), Discrete((3, 2)), Continuous(2, (-1.0,) * 2, (1.0,) * 2)])
@pytest.mark.parametrize("layers", [0, 2])
def test_steps_equal_the_segment(action, layers, gen):
    policy = Policy(FLAT, action, hidden=16, layers=layers)
    obs = torch.randn(4, 9, 5, generator=gen)
    reset = torch.rand(4, 9, generator=gen) < 0.3
    state = torch.randn(layers, 4, 16, generator=gen)
    whole = policy(obs, state, reset)
    for t in range(9):
        out = policy.step(obs[:, t], state, reset[:, t])
        state = out.state
        assert torch.allclose(out.params, whole.params[:, t], atol=1e-6)
        assert torch.allclose(out.value, whole.value[:, t], atol=1e-6)
    assert torch.allclose(state, whole.state, atol=1e-6)
    assert whole.params.shape == (4, 9, policy.actions.width) and whole.params.dtype == torch.float32


@pytest.mark.parametrize("layers", [0, 2])
def test_a_step_reads_a_rollouts_column_and_writes_the_state_in_place(layers, gen):
    policy = Policy(FLAT, Discrete((3,)), hidden=16, layers=layers)
    rollout = torch.randn(4, 9, 5, generator=gen)
    state = torch.randn(layers, 4, 16, generator=gen)
    want = policy.step(rollout[:, 3].contiguous(), state)
    with torch.no_grad():
        got = policy.step(rollout[:, 3], state, out_state=state)
    assert got.state is state and torch.allclose(state, want.state, atol=1e-6)
    assert torch.allclose(got.params, want.params, atol=1e-6) and torch.allclose(got.value, want.value, atol=1e-6)


@pytest.mark.parametrize(
    "kind, shape, dtype",
    [
        ("linear", (5,), torch.float32),
        ("linear", (2, 3), torch.int64),
        ("mlp", (5,), torch.float64),
        ("cnn", (84, 84, 3), torch.uint8),
        ("cnn", (4, 84, 84), torch.uint8),
        ("cnn", (10, 10, 4), torch.bool),
        ("mlp", (), torch.int64),
        ("linear", (5,), torch.float16),
        ("mlp", (5,), torch.bfloat16),
    ],
)
def test_encoders_take_what_environments_give(kind, shape, dtype):
    encoder = make_encoder(kind, Observation(shape, dtype), 8)
    obs = torch.randint(0, 2, (3, *shape)).to(dtype)
    assert encoder(obs).shape == (3, 8)


def test_what_is_kept_of_observations():
    """On a GPU, the rows that the encoder reads, rounded and padded, where they are smaller; else as they come."""
    cuda, cpu, narrow = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
    image, numbers = Observation((6, 6, 3), torch.uint8), Observation((3, 5), torch.float32)

    def kept(observation, device=cuda, dtype=narrow, **options):
        return Policy(observation, Discrete((2,)), 8, **options).kept(observation, device, dtype)

    assert kept(numbers) == Observation((16,), narrow)
    assert kept(numbers, encoder="mlp") == Observation((16,), narrow)
    assert kept(numbers, cpu) == kept(numbers, dtype=torch.float32) == numbers
    assert kept(numbers, normalize_obs=True) == numbers
    assert kept(image) == kept(image, encoder="cnn") == image


def test_bytes_are_scaled():
    encoder = make_encoder("linear", Observation((2,), torch.uint8), 1)
    encoder[-1].weight.data.fill_(1)
    assert encoder(torch.tensor([[255, 0]], dtype=torch.uint8)).item() == 1


def test_padded_input_gives_the_same_output_and_gradient():
    layer = AlignedLinear(5, 3)
    x = torch.randn(4, 5)
    y = layer(x)
    y.square().sum().backward()
    grad = layer.weight.grad.clone()
    layer.weight.grad = None
    z = layer(torch.nn.functional.pad(x, (0, 3)))
    z.square().sum().backward()
    assert torch.allclose(y, z) and torch.allclose(grad, layer.weight.grad)


@pytest.mark.gpu
def test_float32_out_of_bf16_products():
    """Exact products of the bf16 operands, but for the rounding of float32 sums."""
    x = torch.randn(64, 9, 32, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(5, 32, device="cuda", requires_grad=True)
    y = linear_float32(x, weight)
    assert y.dtype == torch.float32 and y.shape == (64, 9, 8) and (y[..., 5:] == 0).all()
    want = x.double() @ weight.bfloat16().double().t()
    assert (y[..., :5] - want).abs().max() < 1e-5 * want.abs().max()
    dy = torch.randn_like(y)
    y.backward(dy)
    dy = dy.bfloat16().double()
    assert torch.allclose(
        weight.grad.double(), dy[..., :5].flatten(0, 1).t() @ x.double().flatten(0, 1), rtol=1e-4, atol=1e-4
    )
    assert torch.allclose(x.grad.double(), dy[..., :5] @ weight.bfloat16().double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("kind, shape, words", [("rnn", (5,), "encoder must be one of"), ("cnn", (5,), "use 'mlp'")])
def test_errors(kind, shape, words):
    with pytest.raises(ValueError, match=words):
        make_encoder(kind, Observation(shape, torch.float32), 8)


def chi_square(counts, probabilities):
    expected = probabilities * counts.sum()
    return ((counts - expected).square() / expected).sum().item()


def test_draws_follow_the_probabilities(gen):
    """Two heads, 200 000 draws: chi-square with 2 and 1 degrees of freedom, p = 0.001 at 13.8 and 10.8."""
    actions = CategoricalActions((3, 2))
    logits = torch.tensor([[0.0, 1.0, -1.0, 0.5, 0.0]])
    sample = actions.sample(logits.expand(200_000, 5), generator=gen)
    for column, head in enumerate(logits.split((3, 2), 1)):
        counts = torch.bincount(sample.action[:, column]).double()
        assert chi_square(counts, head[0].double().softmax(0)) < 10.8
    want = sum(h.log_softmax(1)[0, a] for h, a in zip(logits.split((3, 2), 1), sample.action[0], strict=True))
    assert sample.logprob[0].item() == pytest.approx(want.item(), abs=1e-6)


def test_illegal_choices_are_never_drawn(gen):
    actions = CategoricalActions((1400,))
    mask = torch.zeros(1000, 1400, dtype=torch.bool)
    mask[:, 7] = True
    logits = torch.where(torch.arange(1400) % 2 == 0, 1e4, -1e4).expand(1000, 1400)
    sample = actions.sample(logits, mask, gen)
    assert (sample.action == 7).all() and (sample.logprob == 0).all()


def test_deterministic_is_the_mode():
    sample = CategoricalActions((2, 2)).sample(torch.tensor([[0.0, 1.0, 3.0, 2.0]]), deterministic=True)
    assert sample.action.tolist() == [[1, 0]]
    sample = GaussianActions(2).sample(torch.tensor([[0.3, -4.0]]), torch.zeros(2), deterministic=True)
    assert sample.action.tolist() == [pytest.approx([0.3, -4.0])]


def test_gaussian_moments_and_density(gen):
    mean, log_std = torch.tensor([[1.0, -2.0]]).expand(100_000, 2), torch.tensor([0.5, -1.0])
    sample = GaussianActions(2).sample(mean, log_std, gen)
    assert torch.allclose(sample.action.mean(0), mean[0], atol=0.02)
    assert torch.allclose(sample.action.std(0), log_std.exp(), rtol=0.02)
    want = torch.distributions.Normal(mean, log_std.exp()).log_prob(sample.action).sum(1)
    assert torch.allclose(sample.logprob, want, atol=1e-5)


class TestRounded:
    """Copies of the weights to compute from, and gradients taken beside the backward pass."""

    def make(self, encoder, dtype=None):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            policy = Policy(Observation((5,), torch.float32), Discrete((3,)), hidden=16, layers=2, encoder=encoder)
        return policy, {} if dtype is None else policy.keep_rounded(dtype)

    @pytest.mark.parametrize("encoder", ["linear", "mlp"])
    def test_same_numbers_and_gradients_as_without(self, encoder, gen):
        plain, _ = self.make(encoder)
        copied, copies = self.make(encoder, torch.float32)
        assert len(copies) == sum(p.ndim == 2 for p in plain.parameters())
        obs, state = torch.randn(4, 6, 5, generator=gen), torch.rand(2, 4, 16, generator=gen)
        reset = torch.rand(4, 6, generator=gen) < 0.3
        rows = (
            torch.randint(3, (24, 1), generator=gen),
            *torch.randn(4, 24, generator=gen).unbind(),
            torch.tensor(0.1),
        )
        settings = dict(clip=0.2, vf_clip=0.2, vf_coef=0.5)
        for policy in (plain, copied):
            features = policy.features(obs, state, reset)
            gradient = policy.loss(features, None, *rows, **settings)
            assert torch.allclose(gradient.value, policy(obs, state, reset).value.flatten(), atol=1e-6)
            policy.backward(features, gradient)
        want, got = plain(obs, state, reset), copied(obs, state, reset)
        assert torch.allclose(want.params, got.params, atol=1e-6) and torch.allclose(want.state, got.state, atol=1e-6)
        for p, q in zip(plain.parameters(), copied.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-5)
        # And they are those of autograd through all of it.
        plain.zero_grad()
        out = plain(obs, state, reset)
        loss = ppo_loss_categorical(out.params.flatten(0, 1), out.value.flatten(), *rows, nvec=(3,), **settings).loss
        assert torch.allclose(loss, gradient.loss, atol=1e-6)
        loss.backward()
        for p, q in zip(plain.parameters(), copied.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-5)

    def test_the_copies_are_what_is_computed_from_and_loading_writes_them(self, gen):
        policy, copies = self.make("linear", torch.float32)
        other = Policy(Observation((5,), torch.float32), Discrete((3,)), hidden=16, layers=2)
        policy.load_state_dict(other.state_dict())
        for weight, copy in copies.items():
            assert torch.equal(copy[: weight.shape[0], : weight.shape[1]], weight.detach())
        obs, state = torch.randn(4, 5, generator=gen), torch.rand(2, 4, 16, generator=gen)
        assert torch.allclose(policy.step(obs, state).params, other.step(obs, state).params, atol=1e-6)
