"""`fa.tanh_approx` outside of kernels is `torch.tanh`, under torch's modes and transforms too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flashattn_jit as fa

X = torch.linspace(-6.0, 6.0, 49)


@pytest.mark.parametrize("x", [X, X.double(), X.int(), X[:7].reshape(7, 1), X[3], X[:0]], ids=str)
def test_eager_values_are_those_of_tanh(x: Tensor) -> None:
    got = fa.tanh_approx(x)
    assert torch.equal(got, torch.tanh(x)) and got.dtype == torch.tanh(x).dtype


def test_a_default_device_changes_nothing() -> None:
    with torch.device("meta"):
        assert torch.equal(fa.tanh_approx(X), torch.tanh(X))


def test_of_fake_tensors() -> None:
    with FakeTensorMode() as mode:
        made = fa.tanh_approx(mode.from_tensor(X))
    assert made.shape == X.shape and made.dtype == X.dtype


def test_it_has_gradients() -> None:
    weight = torch.nn.Parameter(X.clone())
    fa.tanh_approx(weight).sum().backward()
    torch.testing.assert_close(weight.grad, 1 - torch.tanh(X) ** 2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own modules
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.compile(f, fullgraph=True, backend="aot_eager"),
        lambda f: torch.export.export(_Module(f), (X,)).module(),
        torch.vmap,
    ],
    ids=["compile", "export", "vmap"],
)
def test_under_transforms(transform: Callable[..., Callable[..., Tensor]]) -> None:
    f = transform(lambda x: 2 * fa.tanh_approx(x / 2))
    torch.testing.assert_close(f(X), 2 * torch.tanh(X / 2))


class _Module(torch.nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


@pytest.mark.parametrize("wrong", [1.0, None, "1", [X]])
def test_what_is_no_tensor_is_an_error(wrong: object) -> None:
    with pytest.raises(TypeError):
        fa.tanh_approx(wrong)  # type: ignore[arg-type]
