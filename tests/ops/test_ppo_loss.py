"""The PPO loss: hand-worked numbers, gradients, masks, every backend against the differentiable reference."""

import math

import pytest
import torch

from sharpwave.algos.shards import put_moments
from sharpwave.ops.ppo_loss import (
    STATS,
    advantage_moments,
    ppo_gradient_categorical,
    ppo_gradient_decoded,
    ppo_gradient_gaussian,
    ppo_loss_categorical,
    ppo_loss_gaussian,
)
from sharpwave.ops.ppo_loss.reference import summary
from tests.conftest import backends
from tests.parity import assert_parity

COEFS = dict(clip=0.2, vf_clip=0.2, vf_coef=2.0)


def rows(n, dtype=torch.float32, device="cpu", seed=0, p_invalid=0.0):
    """value, old_logprob, old_value, advantage, weight, ent_coef and valid of n rows."""
    g = torch.Generator().manual_seed(seed)
    value, old_value, advantage = (torch.randn(n, generator=g, dtype=torch.float64) for _ in range(3))
    old_logprob = -torch.rand(n, generator=g, dtype=torch.float64) * 2
    weight = torch.rand(n, generator=g, dtype=torch.float64) + 0.5
    valid = torch.rand(n, generator=g) >= p_invalid
    x = dict(value=value, old_logprob=old_logprob, old_value=old_value, advantage=advantage, weight=weight)
    x = {k: v.to(dtype).to(device) for k, v in x.items()}
    return x | dict(ent_coef=torch.tensor(0.01, dtype=dtype, device=device), valid=valid.to(device))


def discrete(n, nvec, dtype=torch.float32, device="cpu", seed=0, masked=False):
    g = torch.Generator().manual_seed(seed + 1)
    logits = torch.randn(n, sum(nvec), generator=g, dtype=torch.float64).to(dtype)
    action = torch.stack([torch.randint(0, k, (n,), generator=g) for k in nvec], dim=1)
    mask = None
    if masked:
        mask = torch.rand(n, sum(nvec), generator=g) < 0.5
        starts = torch.tensor([0, *nvec]).cumsum(0)[:-1]
        mask.scatter_(1, action + starts, True)
        mask = mask.to(device)
    return dict(logits=logits.to(device), action=action.to(device), nvec=nvec, mask=mask)


def run(loss_fn, inputs, leaves, backend):
    """(loss, ratio, stats, gradients of `leaves`)."""
    inputs = dict(inputs)
    for name in leaves:
        inputs[name] = inputs[name].detach().clone().requires_grad_()
    out = loss_fn(**inputs, **COEFS, backend=backend)
    out.loss.backward()
    return *out, *[inputs[name].grad for name in leaves]


def test_hand_worked_clipping():
    # Two actions of equal probability: logprob = -log 2. Old log-probabilities make the ratios 2, 1/2, 1, 1.
    # Advantages 1, 1, -1, -1 are normalised already (mean 0, std 1).
    # pg terms: max(-2, -1.2) = -1.2; max(-.5, -.8) = -.5; 1; 1. Mean .075.
    # Value 0, old value 0: R = A, so 0.5 mean A^2 = .5. Entropy log 2.
    logprob = -math.log(2)
    inputs = dict(
        logits=torch.zeros(4, 2), action=torch.zeros(4, 1, dtype=torch.int64), nvec=(2,), value=torch.zeros(4),
        old_logprob=torch.tensor([logprob - math.log(2), logprob + math.log(2), logprob, logprob]),
        old_value=torch.zeros(4), advantage=torch.tensor([1.0, 1, -1, -1]), weight=torch.ones(4),
        ent_coef=torch.tensor(0.1),
    )  # fmt: skip
    for backend in ("reference", "cpu"):
        loss, ratio, stats = ppo_loss_categorical(**inputs, **COEFS, backend=backend)
        assert ratio.tolist() == pytest.approx([2, 0.5, 1, 1])
        named = dict(zip(STATS, stats.tolist(), strict=True))
        assert named["policy_loss"] == pytest.approx(0.075, abs=1e-6)
        assert named["value_loss"] == pytest.approx(0.5)
        assert named["entropy"] == pytest.approx(math.log(2))
        assert named["clip_fraction"] == 0.5
        assert named["old_approx_kl"] == pytest.approx(0, abs=1e-6)  # -(log 2 - log 2 + 0 + 0) / 4
        assert named["approx_kl"] == pytest.approx((2 - 1 + 0.5 - 1) / 4)
        assert loss.item() == pytest.approx(0.075 + 2 * 0.5 - 0.1 * math.log(2), abs=1e-6)


def test_hand_worked_value_clip():
    # v moved from 0 to 1 while R = .5: unclipped error .25, clipped (0.2 - .5)^2 = .09: the larger counts.
    # v moved to -1 while R = .5: 2.25 against (-.2 - .5)^2 = .49. R stays .5 (A = .5), v = .1: both .16.
    value = torch.tensor([1.0, -1.0, 0.1], dtype=torch.float64)
    inputs = rows(3, torch.float64) | dict(value=value, old_value=torch.zeros(3, dtype=torch.float64))
    inputs |= dict(advantage=torch.full((3,), 0.5, dtype=torch.float64))
    out = ppo_loss_categorical(**inputs, **discrete(3, (2,), torch.float64), **COEFS, backend="reference")
    assert out.stats[1].item() == pytest.approx(0.5 * (0.25 + 2.25 + 0.16) / 3)


@pytest.mark.parametrize("nvec, masked", [((3,), False), ((3, 2), True)])
def test_gradcheck_categorical(nvec, masked):
    inputs = rows(6, torch.float64) | discrete(6, nvec, torch.float64, masked=masked)
    logits, value = inputs.pop("logits").requires_grad_(), inputs.pop("value").requires_grad_()

    def f(logits, value):
        return ppo_loss_categorical(logits, value, **inputs, **COEFS, backend="reference").loss

    assert torch.autograd.gradcheck(f, (logits, value))


@pytest.mark.parametrize("n", [1, 5, 257, 1000])
@pytest.mark.parametrize(
    "nvec, masked, p_invalid",
    [((2,), False, 0.0), ((43,), False, 0.3), ((3, 2), True, 0.0), ((1,), False, 0.0), ((2, 5, 1, 7), True, 0.5)],
)
@backends("cpu", "triton")
def test_categorical_matches_reference(backend, device, n, nvec, masked, p_invalid):
    inputs = rows(n, device=device, seed=n, p_invalid=p_invalid) | discrete(
        n, nvec, device=device, seed=n, masked=masked
    )
    want = run(ppo_loss_categorical, _double(inputs), ("logits", "value"), "reference")
    got = run(ppo_loss_categorical, inputs, ("logits", "value"), backend)
    for name, g, w in zip(("loss", "ratio", "stats", "d_logits", "d_value"), got, want, strict=True):
        # One row has no spread: A_hat divides a rounding error by 1e-8.
        assert_parity(g, w, name, scale=1e3 if n == 1 else 1.0)


@pytest.mark.parametrize("n, dim", [(1, 1), (300, 3), (65, 8)])
@pytest.mark.parametrize("shared_std", [True, False])
@backends("cpu", "triton")
def test_gaussian_matches_reference(backend, device, n, dim, shared_std):
    g = torch.Generator().manual_seed(n)
    inputs = rows(n, device=device, p_invalid=0.2 if n > 1 else 0.0)
    inputs |= dict(
        mean=torch.randn(n, dim, generator=g).to(device),
        action=torch.randn(n, dim, generator=g).to(device),
        log_std=(torch.randn(*(() if shared_std else (n,)), dim, generator=g) * 0.3).to(device),
    )
    leaves = ("mean", "log_std", "value")
    want = run(ppo_loss_gaussian, _double(inputs), leaves, "reference")
    got = run(ppo_loss_gaussian, inputs, leaves, backend)
    for name, x, w in zip(("loss", "ratio", "stats", *leaves), got, want, strict=True):
        assert_parity(x, w, name, scale=1e3 if n == 1 else 1.0)


def _double(inputs):
    return {
        k: v.double().cpu() if torch.is_tensor(v) and v.dtype.is_floating_point
        else v.cpu() if torch.is_tensor(v) else v
        for k, v in inputs.items()
    }  # fmt: skip


@backends("reference", "cpu", "triton")
def test_many_actions_one_legal(backend, device):
    """1400 actions, one legal, logits of +-1e4: everything is finite and the legal action certain."""
    n, k = 4, 1400
    mask = torch.zeros(n, k, dtype=torch.bool, device=device)
    mask[:, 7] = True
    logits = torch.where(torch.arange(k) % 2 == 0, 1e4, -1e4).expand(n, k).to(device)
    inputs = rows(n, device=device) | dict(
        logits=logits,
        mask=mask,
        nvec=(k,),
        action=torch.full((n, 1), 7, device=device),
        old_logprob=torch.zeros(n).to(device),
    )
    loss, ratio, stats, d_logits, d_value = run(ppo_loss_categorical, inputs, ("logits", "value"), backend)
    assert all(torch.isfinite(x).all() for x in (loss, ratio, stats, d_logits, d_value))
    assert ratio.tolist() == pytest.approx([1.0] * n)
    assert stats[STATS.index("entropy")].item() == pytest.approx(0, abs=1e-6)


@backends("reference", "cpu", "triton")
def test_ragged_multi_discrete_masks(backend, device):
    """Heads of 3 and 2 actions: masking one head leaves the other's distribution as it was."""
    inputs = rows(1, device=device) | dict(
        logits=torch.tensor([[0.0, 0, 0, 0, 0]], device=device), nvec=(3, 2), old_logprob=torch.zeros(1, device=device),
        action=torch.tensor([[1, 1]], device=device),
        mask=torch.tensor([[True, True, False, True, True]], device=device),
    )  # fmt: skip
    out = ppo_loss_categorical(**inputs, **COEFS, backend=backend)
    assert out.ratio.item() == pytest.approx(1 / 2 * 1 / 2)
    assert out.stats[STATS.index("entropy")].item() == pytest.approx(2 * math.log(2), rel=1e-6)


@backends("reference", "cpu", "triton")
def test_gradient_scales_with_the_importance_weight(backend, device):
    inputs = rows(16, device=device) | discrete(16, (4,), device=device)
    inputs["ent_coef"] = torch.tensor(0.0, device=device)
    one = run(ppo_loss_categorical, inputs, ("logits", "value"), backend)[3]
    inputs["weight"] = inputs["weight"] * 3
    assert torch.allclose(run(ppo_loss_categorical, inputs, ("logits", "value"), backend)[3], 3 * one, rtol=1e-5)


@backends("reference", "cpu", "triton")
def test_invalid_rows_change_nothing(backend, device):
    inputs = rows(64, device=device) | discrete(64, (4,), device=device)
    inputs["valid"] = torch.arange(64, device=device) < 40
    first = run(ppo_loss_categorical, inputs, ("logits", "value"), backend)
    for name in ("value", "old_logprob", "old_value", "advantage"):
        inputs[name] = inputs[name].clone()
        inputs[name][40:] = 123.0
    second = run(ppo_loss_categorical, inputs, ("logits", "value"), backend)
    for name, a, b in zip(
        ("loss", "stats", "d_logits", "d_value"), first[:1] + first[2:], second[:1] + second[2:], strict=True
    ):
        assert torch.equal(a, b), name
    assert (second[3][40:] == 0).all()
    inputs["valid"] = torch.zeros_like(inputs["valid"])
    assert ppo_loss_categorical(**inputs, **COEFS, backend=backend).loss.item() == 0


@pytest.mark.parametrize("name", ["value", "old_value", "advantage", "logits"])
@backends("reference", "cpu", "triton")
def test_nan_reaches_the_loss(backend, device, name):
    inputs = rows(300, device=device) | discrete(300, (4,), device=device)
    inputs[name] = inputs[name].clone()
    inputs[name][270] = float("nan")
    assert not torch.isfinite(ppo_loss_categorical(**inputs, **COEFS, backend=backend).loss)


def test_repeated_runs_are_the_same_bits():
    inputs = rows(5000) | discrete(5000, (7,))
    first = run(ppo_loss_categorical, inputs, ("logits", "value"), "cpu")
    for _ in range(5):
        again = run(ppo_loss_categorical, inputs, ("logits", "value"), "cpu")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_opcheck():
    x = rows(5)
    d = discrete(5, (3, 2), masked=True)
    args = (
        x["value"].requires_grad_(),
        d["action"],
        *(x[k] for k in ("old_logprob", "old_value", "advantage", "weight")),
    )
    args = (d["logits"].requires_grad_(), *args, d["mask"], x["valid"], x["ent_coef"], [3, 2], 0.2, 0.2, 2.0)
    torch.library.opcheck(torch.ops.sharpwave.ppo_loss_categorical.default, args)
    mean, log_std = torch.randn(5, 2, requires_grad=True), torch.zeros(5, 2, requires_grad=True)
    args = (
        mean,
        log_std,
        x["value"],
        torch.randn(5, 2),
        *(x[k] for k in ("old_logprob", "old_value", "advantage", "weight")),
    )
    torch.library.opcheck(
        torch.ops.sharpwave.ppo_loss_gaussian.default, (*args, x["valid"], x["ent_coef"], 0.2, 0.2, 2.0)
    )


@pytest.mark.parametrize(
    "change, error, words",
    [
        (dict(logits=torch.zeros(4, 5)), ValueError, r"logits must be \(4, 3\)"),
        (dict(action=torch.zeros(4, 2, dtype=torch.int64)), ValueError, r"action must be \(4, 1\)"),
        (dict(action=torch.zeros(4, 1)), TypeError, "action must be int64"),
        (dict(mask=torch.zeros(4, 3)), ValueError, "mask must be bool"),
        (dict(weight=torch.zeros(4, 1)), ValueError, r"weight must have shape \(4,\)"),
    ],
)
def test_errors_name_the_argument(change, error, words):
    inputs = rows(4) | discrete(4, (3,)) | change
    with pytest.raises(error, match=words):
        ppo_loss_categorical(**inputs, **COEFS)


@backends("reference", "cpu", "triton")
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("kind", ["categorical", "masked", "gaussian"])
def test_gradient_of_an_output_is_the_losss(backend, device, padding, kind):
    """Parameters and value side by side, weights shared by 4 rows; the gradient of the padding is 0."""
    n, g = 24, torch.Generator().manual_seed(3)
    x = rows(n, device=device, p_invalid=0.2)
    x["weight"] = torch.rand(n // 4, generator=g).to(device)
    if kind == "gaussian":
        width, options = 3, {}
        action = torch.randn(n, width, generator=g).to(device)
        log_std = torch.randn(width, generator=g).to(device)
    else:
        d = discrete(n, (3, 4), device=device, masked=kind == "masked")
        width, options, action = 7, dict(nvec=d["nvec"], mask=d["mask"]), d["action"]
    output = torch.randn(n, width + 1 + padding, generator=g).to(device)
    given = (action, x["old_logprob"], x["old_value"], x["advantage"], x["weight"], x["ent_coef"])
    options |= COEFS | dict(valid=x["valid"])

    leaf = output.clone().requires_grad_()
    each = (*given[:4], x["weight"].repeat_interleave(4), x["ent_coef"])
    if kind == "gaussian":
        deviation = log_std.clone().requires_grad_()
        got = ppo_gradient_gaussian(output, log_std, *given, **options, backend=backend)
        want = ppo_loss_gaussian(leaf[:, :width], deviation, leaf[:, width], *each, **options, backend="reference")
        want.loss.backward()
        assert_parity(got.d_log_std, deviation.grad)
    else:
        got = ppo_gradient_categorical(output, *given, **options, backend=backend)
        want = ppo_loss_categorical(leaf[:, :width], leaf[:, width], *each, **options, backend="reference")
        want.loss.backward()
        assert got.d_log_std is None
    assert_parity(got.d_output, leaf.grad)
    assert not got.d_output[:, width + 1 :].any()
    for mine, theirs in zip(got[:3], want, strict=True):
        assert_parity(mine, theirs.detach())
    narrow = (
        ppo_gradient_gaussian(output, log_std, *given, **options, dtype=torch.bfloat16, backend=backend)
        if kind == "gaussian"
        else ppo_gradient_categorical(output, *given, **options, dtype=torch.bfloat16, backend=backend)
    )
    assert narrow.d_output.dtype == torch.bfloat16
    assert torch.allclose(narrow.d_output.float(), got.d_output, rtol=2**-7, atol=1e-7)


@backends("reference", "cpu", "triton")
@pytest.mark.parametrize("n, h, nvec, padding", [(24, 40, (3, 4), 0), (72, 136, (43,), 4), (8, 16, (2,), 5)])
@pytest.mark.parametrize("kind", ["plain", "masked and invalid", "moments"])
def test_gradient_of_features_goes_through_the_decoder(backend, device, n, h, nvec, padding, kind):
    """16-bit numbers on a GPU, where only they go in one pass: d_output is rounded, and d_features made of it."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    g = torch.Generator().manual_seed(5)
    width = sum(nvec)
    features = torch.randn(n, h, generator=g).to(device, dtype)
    decoder = torch.zeros(width + 1 + padding, h)
    decoder[: width + 1] = torch.randn(width + 1, h, generator=g) / h**0.5
    decoder = decoder.to(device, dtype)
    x = rows(n, device=device, p_invalid=0.3 * (kind == "masked and invalid"))
    d = discrete(n, nvec, device=device, masked=kind == "masked and invalid")
    weight = torch.rand(n // 4, generator=g).to(device)
    given = (d["action"], x["old_logprob"], x["old_value"], x["advantage"], weight, x["ent_coef"])
    options = COEFS | dict(valid=x["valid"], mask=d["mask"], nvec=nvec)
    moments = advantage_moments(x["advantage"], x["valid"], backend=backend) if kind == "moments" else None
    got = ppo_gradient_decoded(features, decoder, *given, **options, moments=moments, backend=backend)
    output = features.double() @ decoder.double().t()
    want = ppo_gradient_categorical(output.float(), *given, **options, backend="reference")
    for name in ("loss", "ratio", "stats"):
        assert_parity(getattr(got, name), getattr(want, name))
    assert_parity(got.value, output[:, width].float())
    step = 2.0**-7 if dtype == torch.bfloat16 else 1e-5
    assert got.d_output.dtype == got.d_features.dtype == dtype
    torch.testing.assert_close(got.d_output.double(), want.d_output.double(), rtol=step, atol=1e-6)
    assert not got.d_output[:, width + 1 :].any()
    exact = got.d_output.double() @ decoder.double()
    torch.testing.assert_close(got.d_features.double(), exact, rtol=step, atol=step * exact.abs().mean().item())


@backends("reference", "cpu", "triton")
@pytest.mark.parametrize("p_invalid", [0.0, 0.4])
def test_moments_of_other_rows_normalise_these(backend, device, p_invalid):
    """As if the minibatch went on elsewhere: mean and deviation are the given ones, the means are over these rows."""
    n, g = 300, torch.Generator().manual_seed(3)
    x = rows(n, device=device, p_invalid=p_invalid)
    d = discrete(n, (3,), device=device)
    moments = advantage_moments(x["advantage"], x["valid"], backend=backend)
    if moments is None:
        moments = torch.zeros(4, 1, dtype=torch.float64)
        assert advantage_moments(x["advantage"], x["valid"], out=moments, backend=backend) is moments
    valid = x["advantage"][x["valid"]].double()
    for got, want in zip(summary(moments), (len(valid), valid.mean(), valid.var(correction=0)), strict=True):
        assert got.item() == pytest.approx(float(want), rel=1e-12)
    output = torch.randn(n, 4, generator=g).to(device)
    given = (d["action"], *(x[k] for k in ("old_logprob", "old_value", "advantage", "weight", "ent_coef")))
    options = COEFS | dict(valid=x["valid"], nvec=(3,), backend=backend)
    own = ppo_gradient_categorical(output, *given, **options)
    same = ppo_gradient_categorical(output, *given, **options, moments=moments)
    put_moments(moments, torch.tensor(0.7, device=device), torch.tensor(4.0, device=device))
    other = ppo_gradient_categorical(output, *given, **options, moments=moments)
    logp = torch.log_softmax(output[:, :3].double(), 1).gather(1, d["action"])[:, 0]
    ratio = (logp - x["old_logprob"]).exp()
    surrogate = x["weight"] * (x["advantage"].double() - 0.7) / (2 + 1e-8)
    policy = torch.maximum(-surrogate * ratio, -surrogate * ratio.clamp(0.8, 1.2))[x["valid"]].mean()
    assert other.stats[0].item() == pytest.approx(policy.item(), rel=1e-5)
    assert torch.equal(other.stats[1:], own.stats[1:]), "nothing else of the loss goes by them"
    for name in ("loss", "stats", "d_output"):
        assert_parity(getattr(same, name), getattr(own, name), name)


def test_gradient_errors():
    x, d = rows(6), discrete(6, (3,))
    given = [d["action"], *(x[k] for k in ("old_logprob", "old_value", "advantage", "weight", "ent_coef"))]
    with pytest.raises(ValueError, match=r"output must be \(n, K\) with K > 3.*got \(6, 3\)"):
        ppo_gradient_categorical(torch.zeros(6, 3), *given, nvec=(3,), **COEFS)
    given[4] = torch.ones(4)
    with pytest.raises(ValueError, match="m a divisor of n = 6; got"):
        ppo_gradient_categorical(torch.zeros(6, 4), *given, nvec=(3,), **COEFS)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize(
    "place, bad, error, words",
    [
        (0, torch.zeros(6, 2, dtype=torch.int64), ValueError, r"action must be \(6, 1\)"),
        (0, torch.zeros(6, 1, dtype=torch.int32), TypeError, "action must be int64"),
        (1, torch.zeros(3), ValueError, r"old_logprob must have shape \(6,\)"),
        (2, torch.zeros(6, 1), ValueError, r"old_value must have shape \(6,\)"),
        (3, torch.zeros(6, dtype=torch.int64), TypeError, "advantage must be floating"),
        ("valid", torch.ones(2, dtype=torch.bool), ValueError, r"valid must have shape \(6,\)"),
        ("valid", torch.ones(6), TypeError, "valid must be bool"),
        ("mask", torch.ones(6, 8, dtype=torch.bool), ValueError, "mask must be bool of logits' shape"),
        ("nvec", (), ValueError, "nvec must name at least one head"),
    ],
)
def test_gradients_check_their_rows(backend, decoded, place, bad, error, words):
    x, d = rows(6), discrete(6, (3,))
    given = [d["action"], *(x[k] for k in ("old_logprob", "old_value", "advantage", "weight", "ent_coef"))]
    options = dict(nvec=(3,), **COEFS)
    if isinstance(place, int):
        given[place] = bad
    else:
        options[place] = bad
    with pytest.raises(error, match=words):
        if decoded:
            ppo_gradient_decoded(torch.zeros(6, 4), torch.zeros(4, 4), *given, **options, backend=backend)
        else:
            ppo_gradient_categorical(torch.zeros(6, 4), *given, **options, backend=backend)


@backends("reference", "cpu", "triton")
def test_nearly_equal_advantages_are_normalised(backend, device):
    """By E[x^2] - E[x]^2 their deviation would be 0, and A_hat 0.25 / 1e-8."""
    n = 256
    advantage = torch.full((n,), 1e6)
    advantage[3] += 0.25
    zero = torch.zeros(n)
    given = (torch.zeros(n, 1, dtype=torch.int64), zero - math.log(2), zero, advantage, zero + 1, torch.tensor(0.0))
    given = [v.to(device) for v in given]
    got = ppo_gradient_categorical(torch.zeros(n, 3, device=device), *given, nvec=(2,), **COEFS, backend=backend)
    a_hat = (advantage.double() - advantage.double().mean()) / advantage.double().std(correction=0)
    want = -0.5 * a_hat / n
    torch.testing.assert_close(got.d_output[:, 0].double().cpu(), want, rtol=0.1, atol=1e-4)


@backends("reference", "cpu", "triton")
def test_what_means_nothing_may_be_nan(backend, device):
    """Rows that are not valid, and the decoder's rows past the value."""
    n, g = 8, torch.Generator().manual_seed(1)
    x, d = rows(n, device=device), discrete(n, (3,), device=device)
    x["valid"] = torch.arange(n, device=device) > 1
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    features, decoder = torch.randn(n, 16, generator=g).to(device, dtype), torch.randn(8, 16, generator=g)
    decoder = decoder.to(device, dtype)

    def gradient():
        given = (d["action"], *(x[k] for k in ("old_logprob", "old_value", "advantage", "weight", "ent_coef")))
        return ppo_gradient_decoded(features, decoder, *given, nvec=(3,), **COEFS, valid=x["valid"], backend=backend)

    decoder[4:] = 0
    want = gradient()
    decoder[4:] = math.nan
    features[0] = math.nan
    for name in ("old_logprob", "old_value", "advantage", "weight"):
        x[name][1] = math.nan
    got = gradient()
    assert torch.equal(got.loss, want.loss) and got.loss.isfinite()
    assert torch.equal(got.d_output, want.d_output) and torch.equal(got.d_features, want.d_features)
