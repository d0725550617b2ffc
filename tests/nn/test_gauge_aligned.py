"""Gauge-aligned layers against the plain product U Vᵀ x, by every route of their forward."""

import jaxtyping
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import prune

from flexrank.errors import FlexrankError
from flexrank.nn import gauge_aligned
from flexrank.nn.alignment import choose_slack
from flexrank.nn.gauge_aligned import GaugeAlignedConv2d, GaugeAlignedLinear
from flexrank.nn.matrix import ConvGeometry

GEOMETRY = ConvGeometry(3, (3, 2), (2, 1), (1, 0), (1, 2))


def aligned(*, bias: bool = True, slack: int = 1) -> GaugeAlignedLinear:
    """A layer of 9 x 7, with 4 − slack aligned outputs."""
    factors = torch.randn(9, 4), torch.randn(7, 4)
    return GaugeAlignedLinear.from_factors(*factors, torch.randn(9) if bias else None, slack=slack)


def watch_writes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one at each output that is written in place."""
    written: list[object] = []
    write = GaugeAlignedLinear._write_in_place
    monkeypatch.setattr(GaugeAlignedLinear, "_write_in_place", lambda *args: written.append(1) or write(*args))
    return written


@pytest.mark.parametrize("slack", [0, 1, 4, "auto"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_aligned_linear_is_the_plain_product(slack: int | str, with_bias: bool) -> None:
    u, v, bias = torch.randn(9, 4), torch.randn(7, 4), torch.randn(9) if with_bias else None
    layer = GaugeAlignedLinear.from_factors(u, v, bias, slack=slack)
    x = torch.randn(2, 5, 7)
    torch.testing.assert_close(layer(x), functional.linear(x, u @ v.T, bias), rtol=1e-4, atol=1e-4)
    stored = sum(p.numel() for p in layer.parameters()) - (9 if with_bias else 0)
    assert stored == 4 * (9 + 7 - 4 + layer.slack)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 5, 7), (2, 0, 7)])
def test_writing_in_place_gives_what_concatenating_gives(
    shape: tuple[int, ...], with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gauge_aligned, "FEW_OUTPUTS", 0)
    layer, x, written = aligned(bias=with_bias), torch.randn(shape), watch_writes(monkeypatch)
    with torch.no_grad():
        output = layer(x)
    assert bool(written) == (x.numel() > 0)
    torch.testing.assert_close(output, layer(x).detach(), rtol=1e-6, atol=1e-6)


def test_small_outputs_are_concatenated(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, written, few = aligned(), watch_writes(monkeypatch), gauge_aligned.FEW_OUTPUTS // 9
    with torch.no_grad():
        layer(torch.randn(few, 7))
        assert not written
        layer(torch.randn(few + 1, 7))
        assert len(written) == 1


@pytest.mark.parametrize("child", ["latent", "expand"])
def test_hooks_adapters_and_autocast_see_the_children_called(child: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauge_aligned, "FEW_OUTPUTS", 0)
    layer = aligned()
    x, calls, own = torch.randn(2, 7), [], getattr(layer, child)
    with torch.no_grad():
        plain, written = layer(x), watch_writes(monkeypatch)
        for register in (own.register_forward_hook, own.register_forward_pre_hook):
            handle = register(lambda *_: calls.append(1))
            layer(x)
            handle.remove()
        assert calls == [1, 1]
        forward = own.forward
        own.forward = lambda values: calls.append(2) or forward(values)  # as accelerate's hooks do
        layer(x)
        del own.forward
        assert calls == [1, 1, 2]
        for register in (nn.modules.module.register_module_forward_hook, register_module_forward_pre_hook):
            calls.clear()
            handle = register(lambda *_: calls.append(3))
            layer(x)
            handle.remove()
            assert calls == [3, 3, 3]
        for name in ("weight", "bias") if child == "expand" else ("weight",):
            kept = getattr(own, name).clone()
            prune.l1_unstructured(own, name, 0.5)  # takes the parameter away
            pruned = layer(x)
            prune.remove(own, name)
            torch.testing.assert_close(layer(x), pruned)
            assert not torch.allclose(pruned, plain)
            getattr(own, name).copy_(kept)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        assert len(written) == (2 if child == "expand" else 1)  # once for each parameter that pruning gave back
        setattr(layer, child, nn.Sequential(own, nn.Tanh()))
        seen = layer(x)[:, 3:] if child == "expand" else layer(x)[:, :3] - layer.bias
        assert float(seen.abs().max()) <= 1 + 1e-6


@pytest.mark.parametrize("child", ["latent", "expand"])
def test_backward_hooks_see_the_children_called(child: str) -> None:
    layer, calls = aligned(), []
    getattr(layer, child).register_full_backward_hook(lambda *_: calls.append(1))
    layer(torch.randn(2, 7, requires_grad=True)).sum().backward()
    assert calls == [1]


@pytest.mark.parametrize("grad", [True, False])
def test_a_layer_is_traced(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # a traced value is no tensor
    layer = aligned()
    x = torch.randn(2, 7)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(torch.fx.symbolic_trace(layer)(x), layer(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("few", [0, 2**18])
@torch.no_grad()
def test_transforms_of_torch_func_go_through(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the plain product, also where outputs are many and would be written in place."""
    monkeypatch.setattr(gauge_aligned, "FEW_OUTPUTS", few)
    layer, plain = aligned(), nn.Linear(7, 9)
    plain.weight.copy_(layer(torch.eye(7)).T - layer(torch.zeros(1, 7)).T)
    plain.bias.copy_(layer(torch.zeros(7)))
    x, along = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    for one in (torch.vmap(layer)(x), torch.func.jvp(layer, (x,), (along,))[0]):
        torch.testing.assert_close(one, plain(x), rtol=1e-4, atol=1e-4)
    tangent = torch.func.jvp(layer, (x,), (along,))[1]
    torch.testing.assert_close(tangent, along @ plain.weight.T, rtol=1e-4, atol=1e-4)


def test_a_meta_tensor_goes_through() -> None:
    layer = GaugeAlignedLinear((9, 7), 4, 3, bias=False, device="meta")
    with torch.no_grad():
        assert layer(torch.randn(2, 7, device="meta")).shape == (2, 9)


def test_a_pruned_bias_of_the_aligned_outputs_counts() -> None:
    layer = aligned()
    x = torch.randn(2, 7)
    with torch.no_grad():
        before, bias = layer(x), layer.bias.clone()
        prune.l1_unstructured(layer, "bias", 2)  # takes the parameter away: `bias` is masked at each call
        torch.testing.assert_close(layer(x)[:, :3], before[:, :3] - bias + layer.bias)
        assert int((layer.bias == 0).sum()) == 2


@pytest.mark.parametrize("slack", [0, 2, "auto"])
def test_aligned_convolution_is_the_plain_product(slack: int | str) -> None:
    u, v, bias = torch.randn(9, 5), torch.randn(18, 5), torch.randn(9)
    layer = GaugeAlignedConv2d.from_factors(u, v, bias, GEOMETRY, slack=slack)
    x = torch.randn(2, 3, 9, 8)
    expected = functional.conv2d(x, (u @ v.T).view(9, 3, 3, 2), bias, *GEOMETRY[2:])
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer(x[0]), expected[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("with_bias", [True, False])
def test_under_autocast_outputs_have_the_dtype_of_a_dense_layers(with_bias: bool) -> None:
    bias = torch.randn(9) if with_bias else None
    conv = GaugeAlignedConv2d.from_factors(torch.randn(9, 4), torch.randn(18, 4), bias, GEOMETRY, slack=1)
    for layer, x in ((aligned(bias=with_bias), torch.randn(2, 7)), (conv, torch.randn(2, 3, 9, 8))):
        with torch.autocast("cpu", torch.bfloat16):
            output = layer(x)
        assert output.dtype == torch.bfloat16
        torch.testing.assert_close(output.float(), layer(x), rtol=0.05, atol=0.2)


def test_bf16_alignment_is_within_three_times_plain() -> None:
    u, v, x = torch.randn(384, 150), torch.randn(384, 150), torch.randn(100, 384).bfloat16()
    exact = x.double() @ v.double() @ u.double().T

    def error(slack: int | str) -> float:
        layer = GaugeAlignedLinear.from_factors(u, v, slack=slack, dtype=torch.bfloat16)
        return float((layer(x).detach().double() - exact).norm() / exact.norm())

    assert error("auto") <= 3 * error(150) < error(0)


def test_chosen_slack_leaves_whole_blocks_to_multiply_in_half_precision_alone() -> None:
    u, v, x = torch.randn(400, 150).double(), torch.randn(384, 150).double(), torch.randn(100, 384).double()
    for dtype, is_half in ((torch.bfloat16, True), (torch.float16, True), (torch.float32, False)):
        least = choose_slack(u, v, x, dtype)
        layer = GaugeAlignedLinear.from_factors(u, v, slack="auto", dtype=dtype, inputs=x)
        if is_half:
            assert (400 - layer.aligned) % 16 == 0  # 384 are 24 blocks of 16
            assert least <= layer.slack < least + 16
        else:
            assert layer.slack == least


def test_a_plain_linear_refuses_a_deployed_layers_state() -> None:
    layer = aligned(slack=0)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        nn.Linear(7, 9, bias=False).load_state_dict(layer.state_dict(), strict=False)


@pytest.mark.parametrize("slack", [0, "auto"])
def test_a_wide_layer_at_full_rank_keeps_one_column_of_slack(slack: int | str) -> None:
    u, v, x = torch.randn(5, 5), torch.randn(9, 5), torch.randn(4, 9)
    layer = GaugeAlignedLinear.from_factors(u, v, slack=slack)
    torch.testing.assert_close(layer(x), x @ v @ u.T, rtol=1e-3, atol=1e-3)


def test_at_full_rank_the_slack_that_is_used_is_the_one_that_was_measured() -> None:
    """Two equal rows of U make its leading block singular; zero rows do so whatever their order."""
    u, v, x = torch.randn(30, 30).double(), torch.randn(40, 30).double(), torch.randn(50, 40)
    u[1] = u[0]
    for factor in (u, torch.cat([torch.zeros(15, 30).double(), u[15:]])):
        layer = GaugeAlignedLinear.from_factors(factor, v, dtype=torch.float32)
        exact = x.double() @ v @ factor.T
        assert (layer(x).double() - exact).norm() < 3e-6 * exact.norm()


def test_rows_of_zeros_do_not_count_as_exact() -> None:
    """Every form is exact on them; the slack is then chosen on normal rows."""
    u, v = torch.randn(64, 24), torch.randn(48, 24)
    u[1] = u[0] * (1 + 1e-4)  # the leading block is all but singular
    how = {"slack": "auto", "dtype": torch.bfloat16}
    chosen = GaugeAlignedLinear.from_factors(u, v, **how).slack
    assert GaugeAlignedLinear.from_factors(u, v, **how, inputs=torch.zeros(5, 48)).slack == chosen > 0


def test_wrong_slacks_and_factors_are_named() -> None:
    with pytest.raises(FlexrankError, match="slack 5 is out of range"):
        aligned(slack=5)
    with pytest.raises(FlexrankError, match="leading 4 rows of U are singular"):
        GaugeAlignedLinear.from_factors(torch.zeros(9, 4), torch.randn(7, 4), slack=0)
    u, v = torch.randn(9, 4), torch.randn(7, 4)
    with pytest.raises(FlexrankError, match="overflow torch.float16; choose another dtype"):
        GaugeAlignedLinear.from_factors(u * 1e6, v, slack=4, dtype=torch.float16)
    u[1] = u[0] * (1 + 1e-6)
    with pytest.raises(FlexrankError, match="overflow torch.float16; give more than 0 slack"):
        GaugeAlignedLinear.from_factors(u, v, slack=0, dtype=torch.float16)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_by_torchscript_holds_for_any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gauge_aligned, "FEW_OUTPUTS", 0)  # all outputs are large
    u, v = torch.randn(24, 6), torch.randn(16, 6)
    layer = GaugeAlignedLinear.from_factors(u, v, torch.randn(24), slack=2)
    with torch.no_grad():
        traced = torch.jit.trace(layer, torch.randn(8, 16))
        for rows in (8, 5, 11):
            x = torch.randn(rows, 16)
            torch.testing.assert_close(traced(x), layer(x))
