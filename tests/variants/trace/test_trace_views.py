"""In-place operations on values that share memory: as in eager torch, all of them change."""

# Hooks are written as users write them: lambdas of tensors.
# mypy: disable-error-code="no-untyped-call,no-untyped-def"

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F

from flashattn_jit.errors import TraceError
from flashattn_jit.variants.params import Dims
from flashattn_jit.variants.variant import variant
from tests.harness import rotation
from tests.variants.ir_eval import evaluate
from tests.variants.trace.trace_oracle import compare

D = 8
DIMS = Dims(1, 1, 1, 3, 7, D, D)


def changed(take, change):
    """A hook that takes something of a row, changes it in place, and returns both."""

    def hook(x, b, h, i):
        part = take(x)
        change(part)
        return x + part.sum()

    return hook


TAKEN = {
    "slice": lambda x: x[:4],
    "steps": lambda x: x[1::2],
    "all": lambda x: x[...],
    "list": lambda x: x[[0, 1, 2]],
    "mask": lambda x: x[[True, False] * 4],
    "view": lambda x: x.view(2, 4),
    "new axis": lambda x: x[None],
    "bool axis": lambda x: x[True],
    "chunk": lambda x: x.chunk(2)[1],
    "split": lambda x: torch.split(x, [3, 5])[0],
    "unbind": lambda x: x.view(4, 2).unbind(1)[0],
    "select": lambda x: x.select(0, 2),
    "narrow": lambda x: x.narrow(0, 4, 2),
    "transposed": lambda x: x.view(4, 2).t()[0],
    "transposed, as rows": lambda x: x.view(4, 2).t().reshape(-1),
    "rows again": lambda x: x.view(4, 2).reshape(-1),
    "permuted": lambda x: x.view(2, 2, 2).permute(2, 0, 1)[1],
    "T": lambda x: x.view(2, 4).T,
    "unflattened": lambda x: x.unflatten(0, (2, 4))[1],
    "flattened": lambda x: x.view(2, 4).flatten(),
    "squeezed": lambda x: x.unsqueeze(0).squeeze(0),
    "view of a view": lambda x: x[2:6][1:3],
    "detached": lambda x: x.detach(),
    "contiguous": lambda x: x.contiguous(),
    "of strides": lambda x: x[::2].contiguous(),
    "float": lambda x: x.float(),
    "double": lambda x: x.double(),
    "half": lambda x: x.half().float(),
    "to": lambda x: x.to(torch.float32),
    "to, copied": lambda x: x.to(torch.float32, copy=True),
    "positive": lambda x: +x,
    "as_tensor": lambda x: torch.as_tensor(x),
    "broadcast": lambda x: torch.broadcast_tensors(x)[0],
    "cloned": lambda x: x.clone(),
    "flipped": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1),
    "relu": torch.relu,
    "largest": lambda x: x.amax(),
    "element": lambda x: x[3].sum(),
    "stacked": lambda x: torch.stack([x])[0],
    "joined": lambda x: torch.cat([x]),
}
CHANGES = {
    "+=": lambda x: x.__iadd__(2),
    "mul_": lambda x: x.mul_(x.sum()),
    "fill_": lambda x: x.fill_(3.0),
    "zero_": lambda x: x.zero_(),
    "copy_": lambda x: x.copy_(x * 2 + 1),
    "[...]": lambda x: x.__setitem__(..., 5.0),
    "clamp_": lambda x: x.clamp_(min=0.0),
}


def assert_rows_equal_eager(hook):
    bound = variant(query_mod=hook).bind(DIMS)
    rows = torch.randn(1, 1, 3, D, generator=torch.Generator().manual_seed(1)).mul(8).round() / 8
    zero = torch.zeros(1, 1, 3, dtype=torch.int32)
    graph = bound.ir.hook("query_mod")
    assert graph is not None
    inputs = {"row": rows, "b": zero, "h": zero, "q_idx": zero + torch.arange(3, dtype=torch.int32)}
    got = evaluate(graph, inputs, bound.tensors, bound.scalars).expand(rows.shape)
    wanted = [hook(row.clone(), 0, 0, torch.tensor(i)) for i, row in enumerate(rows[0, 0])]
    torch.testing.assert_close(got[0, 0], torch.stack(wanted).float())


@pytest.mark.parametrize("take", TAKEN)
@pytest.mark.parametrize("change", rotation.some(list(CHANGES), 3))
def test_what_shares_memory_changes(take, change):
    assert_rows_equal_eager(changed(TAKEN[take], CHANGES[change]))


def base_changes(x, b, h, i):
    z = x[:4]
    x *= 2
    return torch.cat([z, x[4:]])


def parts_of_one_row(x, b, h, i):
    a, c = x.chunk(2)
    a *= 2
    c -= a
    return torch.cat([c, a]) + x


def columns(x, b, h, i):
    y = x.view(2, 4)
    first = y[:, 0].clone()
    y[:, 0] = y[:, 1]
    y[:, 1] = first
    y[1, 2] = 7
    return x


def pairs(x, b, h, i):
    even, odd = x[::2], x[1::2]
    even += odd
    odd *= even
    return x


def relu_in_place(x, b, h, i):
    F.relu(x.view(4, 2), inplace=True)
    return x


@pytest.mark.parametrize("hook", [base_changes, parts_of_one_row, columns, pairs, relu_in_place])
def test_rows_in_parts(hook):
    assert_rows_equal_eager(hook)


def test_random_views_and_changes():
    generator = random.Random(rotation.seed())
    takes = [take for name, take in TAKEN.items() if name != "half"]  # kernels do not round
    changes = list(CHANGES.values())
    for _ in range(60):
        steps = [
            (generator.random() < 0.5, generator.choice(takes), generator.choice(changes),
             generator.random())
            for _ in range(6)
        ]  # fmt: skip

        def hook(x, b, h, i, steps=steps):
            found = [x]
            for takes_part, take, change, which in steps:
                one = found[int(which * len(found))]
                if not takes_part:
                    change(one)
                elif one.shape == (D,):
                    found.append(take(one))
            return x + sum(y.sum() for y in found)

        assert_rows_equal_eager(hook)


ARRANGED = {
    "t": lambda y: y.mT,
    "permute": lambda y: y.reshape(2, 2, 2).permute(2, 0, 1),
    "view": lambda y: y.reshape(4, 2),
    "rows": lambda y: y.reshape(2, 4),
    "flatten": lambda y: y.flatten().unflatten(0, (4, 2)),
    "contiguous": lambda y: y.contiguous(),
    "clone": lambda y: y.clone(),
    "clone, row-major": lambda y: y.clone(memory_format=torch.contiguous_format),
    "double": lambda y: y.double(),
    "mul": lambda y: y * 2,
    "rsub": lambda y: 1 - y,
    "relu": torch.relu,
    "where": lambda y: torch.where(y > 0, y, -1.0),
    "where, method": lambda y: y.where(y > 0, 0.5),
    "two": lambda y: y + y.reshape(-1).view(y.shape),
    "two layouts": lambda y: y.contiguous() - y,
    "broadcast": lambda y: y[:1] + y,
    "largest": lambda y: y - y.amax(-1, keepdim=True),
    "like": lambda y: torch.ones_like(y) + 0 * y,
    "filled": torch.zeros_like,
    "flip": lambda y: y.flip(0),
    "roll": lambda y: y.roll(1, 0),
    "cat": lambda y: torch.cat([y]),
    "copied": copy.copy,
    "copied deeply": copy.deepcopy,
    "copied together": lambda y: copy.deepcopy([y, y[0]])[0],
    "softmax": lambda y: torch.softmax(y, 0),
}


def random_layouts(names):
    """A hook that arranges a row and what it becomes, and changes flattened values in place."""

    def hook(x, b, h, i):
        found = [x.view(2, 4)]
        for arrange, which, change in names:
            y = found[int(which * len(found))]
            if change:
                z = y.flatten()
                z += 1
                y.reshape(-1)[1:3].mul_(2)
            found.append(ARRANGED[arrange](y))
        return x + sum(y.sum() + 3 * y.reshape(-1)[2] for y in found).float()

    return hook


@pytest.mark.parametrize("arrange", ARRANGED)
def test_results_have_the_strides_of_torch(arrange):
    for before in ("t", "permute", "rows"):
        assert_rows_equal_eager(
            random_layouts([(before, 0, False), (arrange, 0.9, False), ("mul", 0.9, True)])
        )


def test_random_layouts():
    generator = random.Random(rotation.seed())
    for _ in range(60):
        names = [
            (generator.choice(list(ARRANGED)), generator.random(), generator.random() < 0.4)
            for _ in range(6)
        ]
        assert_rows_equal_eager(random_layouts(names))


def test_copies_are_apart():
    def hook(x, b, h, i):
        part = x[:4]
        both = copy.deepcopy({"whole": x, "part": part})
        both["part"] += 100  # as in torch, the copies share memory
        return x + part.sum() + both["whole"].sum()

    assert_rows_equal_eager(hook)


def of_half(x, b, h, i):
    y = x.half()
    up, same = y.float(), y.half()
    up += 1
    same *= 2
    return y.float() + x


def to_device(x, b, h, i):
    y = x.to("cpu", torch.float32, True)  # the third argument is non_blocking
    y += 1
    z = x.to("cpu", torch.float32, False, True)
    z += 1
    return x


@pytest.mark.parametrize("hook", [of_half, to_device])
def test_conversions(hook):
    assert_rows_equal_eager(hook)


def counted(s, b, h, q, k):
    d = k - q
    d.view(1).add_(h)
    both = torch.stack([q, d])
    both[0] += k
    both.flip(0).add_(9)
    return s + both.sum()


def converted(s, b, h, q, k):
    d = k.long()
    d -= q
    return s + k * 70_000 + d.to(torch.int64, copy=True).add_(7)


def summed(s, b, h, q, k):
    y = s.sum()
    y += 1
    return s * y


@pytest.mark.parametrize("hook", [counted, converted, summed])
def test_numbers(hook):
    compare(hook)


def test_expanded_values_cannot_be_changed():
    def hook(x, b, h, i):
        x[:1].expand(4).add_(1)
        return x

    with pytest.raises(TraceError, match=r"elements share memory.*clone"):
        variant(query_mod=hook).bind(DIMS)


TABLE = torch.arange(24.0).view(6, 4)
ROWS = torch.arange(48.0).view(6, 4, 2).transpose(1, 2)


def read_before_the_index_changes(x, b, h, i):
    before = TABLE[i]
    i += 1
    return x + before.sum() * 10 + TABLE[i].sum()


def read_before_a_computed_index_changes(x, b, h, i):
    at = 2 * i
    before = TABLE[at, 1]
    at *= 0
    return x + before


def computed_halves(x, b, h, i):
    half = x.half() * 2
    single = half.float()
    single += 1
    return half.float() + single


def halves_again(x, b, h, i):
    half = torch.relu(x.half())
    same = half.half()
    same += 1
    return half.float()


def as_a_half(x, b, h, i):
    half = x.half()
    other = x.to(half)
    other += 1
    third = x.type_as(half)
    third += 1
    return x + other.float() + third.float()


def a_captured_half(x, b, h, i):
    row = HALVES_TABLE[i].float()
    row += 1
    return x + row.sum()


def tiled(x, b, h, i):
    tile = x.view(2, 4).t().tile(1, 1)
    tile.reshape(-1)[0] = 9.0
    return x + tile.sum()


def divided(x, b, h, i):
    parts = torch.stack([i, i + 1])
    quotient = parts.expand(2, 2) // torch.stack([parts, parts + 1]).t().clamp(min=1)
    quotient.reshape(-1)[0] = 9
    return x + quotient.sum()


HALVES_TABLE = (torch.arange(24.0).view(6, 4) / 8).half()


@pytest.mark.parametrize(
    "hook",
    [
        read_before_the_index_changes, read_before_a_computed_index_changes, computed_halves,
        halves_again, as_a_half, a_captured_half, tiled, divided,
    ],
)  # fmt: skip
def test_copies_and_views_are_those_of_torch(hook):
    assert_rows_equal_eager(hook)


@pytest.mark.parametrize(
    "reshape",
    [
        lambda y: y.reshape(-1), lambda y: y.flatten(), torch.ravel, lambda y: y.contiguous(),
        lambda y: y.T.reshape(-1), lambda y: y.reshape_as(torch.zeros(8)),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "take", [lambda x, i: ROWS[i] * x[0], lambda x, i: ROWS[i] + 1, lambda x, i: -ROWS[i]]
)
def test_strides_of_captured_tensors_do_not_decide(take, reshape):
    def through_the_reshaped(x, b, h, i):
        y = take(x, i)
        reshape(y).add_(1)
        return x + y.sum()

    def through_the_other(x, b, h, i):
        y = take(x, i)
        flat = reshape(y)
        y += 1
        return x + flat.sum()

    def of_copies(x, b, h, i):
        y = take(x, i)
        flat = reshape(y).clone()
        flat += 1
        return x + y.clone().add_(flat.sum()).sum()

    for hook in (through_the_reshaped, through_the_other):
        with pytest.raises(TraceError, match=r"may share memory.*clone"):
            variant(query_mod=hook).bind(DIMS)
    assert_rows_equal_eager(of_copies)


@pytest.mark.parametrize(
    "take",
    [
        lambda i: ROWS[i].reshape(-1), lambda i: TABLE[i].float(), lambda i: TABLE[i].view(2, 2),
        lambda i: TABLE[i, 1].reshape(1), lambda i: TABLE[i][:2].flatten(),
    ],
)  # fmt: skip
def test_captured_tensors_are_not_written_through_views(take):
    def hook(x, b, h, i):
        row = take(i)
        row += 1
        return x + row.sum()

    with pytest.raises(TraceError, match=r"captured tensor"):
        variant(query_mod=hook).bind(DIMS)

    def of_a_copy(x, b, h, i):
        row = take(i).clone()
        row += 1
        return x + row.sum()

    assert_rows_equal_eager(of_a_copy)


def test_large_captured_tensors_cost_no_memory():
    huge = torch.zeros(1, dtype=torch.bfloat16).expand(1 << 24, 1 << 20)

    def hook(x, b, h, i):
        y = x.type_as(huge)
        y += 1
        return y.float() + x.to(huge)

    bound = variant(query_mod=hook).bind(DIMS)
    assert bound.ir.hook("query_mod") is not None
