"""The models that tasks can name: shapes, parameters counted by hand, heads, and what none of them takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedreuse.client.batches import has_batch_norm
from fedreuse.client.errors import TaskError
from fedreuse.client.proxy import head_parameters
from fedreuse.client.settings import ProxySettings
from fedreuse.client.workbench import schema_of
from fedreuse.proto.schema import PARAMETER
from fedreuse.sim.models import MODELS, Characters, Images, Inputs, LeNet5, choose

GREY, COLOUR, TEXT = Images(1, 28), Images(3, 32), Characters(80)


def made(name: str, inputs: Inputs, outputs: int = 10, **options: Any) -> nn.Module:
    return choose({"model": name, **options}, "cnn", inputs, outputs)()


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# 3·3·1·32 + 32, 3·3·32·64 + 64, 7·7·64·128 + 128, 128·10 + 10; with colour 8·8·64 inputs.
CNN_GREY = 320 + 18_496 + 401_536 + 1_290
CNN_COLOUR = 896 + 18_496 + 524_416 + 1_290
# 5·5·1·6 + 6, 5·5·6·16 + 16, 400·120 + 120, 120·84 + 84, 84·10 + 10.
LENET_GREY = 156 + 2_416 + 48_120 + 10_164 + 850
LENET_COLOUR = 456 + 2_416 + 48_120 + 10_164 + 850
# Stem 7·7·3·64 + 2·64; stages as counted in test_cifar.py; head 512·10 + 10. A grey stem lacks 2·64·49.
RESNET = 9_536 + 147_968 + 525_568 + 2_099_712 + 8_393_728 + 5_130
# 65·8; a layer has 3 gates of 256 with input and state weights and two biases; head 256·65 + 65.
GRU = 520 + 3 * 256 * (8 + 256 + 2) + 3 * 256 * (256 + 256 + 2) + 16_705


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "due"),
    [
        ("cnn", GREY, 10, CNN_GREY),
        ("cnn", COLOUR, 10, CNN_COLOUR),
        ("lenet5", GREY, 10, LENET_GREY),
        ("lenet5", COLOUR, 10, LENET_COLOUR),
        ("resnet18", COLOUR, 10, RESNET),
        ("resnet18", GREY, 10, RESNET - 2 * 64 * 49),
        ("resnet18-gn", COLOUR, 10, RESNET),
        ("resnet18-gn", COLOUR, 100, RESNET + 90 * 513),
        ("gru", TEXT, 65, GRU),
        ("gru", TEXT, 80, GRU + 15 * 8 + 15 * 257),
    ],
)
def test_shapes_and_parameters(name: str, inputs: Inputs, outputs: int, due: int) -> None:
    model = made(name, inputs, outputs)
    assert parameters(model) == due
    if isinstance(inputs, Images):
        x = torch.zeros(2, inputs.channels, inputs.size, inputs.size)
    else:
        x = torch.zeros(2, inputs.length, dtype=torch.int64)
    assert model(x).shape == (2, outputs)


def test_the_sums_are_the_known_ones() -> None:
    assert (CNN_GREY, LENET_GREY, LENET_COLOUR, RESNET, GRU) == (421_642, 61_706, 62_006, 11_181_642, 616_265)


@pytest.mark.parametrize("size", [4, 11, 31, 33])
def test_any_size_that_a_model_says_it_takes(size: int) -> None:
    x = torch.zeros(2, 3, size, size)
    inputs = Images(3, size)
    fitting = [name for name, kind in MODELS.items() if kind.can_take(inputs)]
    assert fitting == [
        name for name in ("cnn", "lenet5", "resnet18", "resnet18-gn") if size >= 12 or name != "lenet5"
    ]
    for name in fitting:
        assert made(name, inputs, 5)(x).shape == (2, 5)


def test_lenet_s_least_size_is_12() -> None:
    # 12 padded to 16, convolved to 12, pooled to 6, to 2, to 1; of 11 nothing is left.
    assert LeNet5(1, 12, 3)(torch.zeros(1, 1, 12, 12)).shape == (1, 3)
    with pytest.raises(ValueError, match="11x11"):
        LeNet5(1, 11, 3)


@pytest.mark.parametrize(
    ("name", "inputs", "head"),
    [
        # weights and biases of all fully connected layers, as in the shallow CNN
        ("cnn", GREY, [(128, 3136), (128,), (10, 128), (10,)]),
        ("lenet5", GREY, [(120, 400), (120,), (84, 120), (84,), (10, 84), (10,)]),
        ("resnet18", COLOUR, [(10, 512), (10,)]),
        ("resnet18-gn", COLOUR, [(10, 512), (10,)]),
        ("gru", TEXT, [(10, 256), (10,)]),
    ],
)
def test_the_gate_finds_the_head(name: str, inputs: Inputs, head: list[tuple[int, ...]]) -> None:
    found = head_parameters(made(name, inputs), ProxySettings())
    assert [tuple(p.shape) for p in found] == head


def test_group_normalisation_has_32_groups_and_nothing_but_parameters() -> None:
    model = made("resnet18-gn", COLOUR)
    norms = [module for module in model.modules() if isinstance(module, nn.GroupNorm)]
    assert {(norm.num_groups, norm.num_channels) for norm in norms} == {
        (32, 64),
        (32, 128),
        (32, 256),
        (32, 512),
    }
    assert len(norms) == 20  # as many as there are batch normalisations in ResNet-18
    assert not has_batch_norm(model)
    assert {spec.kind for spec in schema_of(model).tensors} == {PARAMETER}
    # Every example is normalised for itself: a batch of one is like any other.
    x = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(model(x)[1:2], model(x[1:2]))


def test_few_channels_have_a_group_each() -> None:
    from fedreuse.sim.models import group_norm

    x = torch.randn(2, 4, 5, 5)
    expected = functional.instance_norm(
        x
    )  # a group of one channel is that channel normalised over its pixels
    torch.testing.assert_close(group_norm(4)(x), expected)


def test_gru_reads_the_context_in_its_order_to_its_end() -> None:
    """Against the equations of torch's documentation, step by step."""
    torch.manual_seed(1)
    model = made("gru", Characters(5), 7)
    x = torch.tensor([[1, 4, 2, 6, 0]])
    inputs = model.embedding.weight[x[0]]
    for layer in range(2):
        w_i, w_h, b_i, b_h = (
            getattr(model.gru, f"{name}_l{layer}")
            for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        h, states = torch.zeros(256), []
        for step in inputs:
            i_r, i_z, i_n = (w_i @ step + b_i).chunk(3)
            h_r, h_z, h_n = (w_h @ h + b_h).chunk(3)
            z = torch.sigmoid(i_z + h_z)
            n = torch.tanh(i_n + torch.sigmoid(i_r + h_r) * h_n)
            h = (1 - z) * n + z * h
            states.append(h)
        inputs = torch.stack(states)
    torch.testing.assert_close(model(x)[0], model.classifier(inputs[-1]))


@pytest.mark.parametrize(
    ("name", "inputs", "options", "text"),
    [
        ("vgg", GREY, {}, r"no model called 'vgg'; task.model is one of cnn, lenet5, resnet18, resnet18-gn "),
        ("gru", GREY, {}, r"'gru' takes texts, .* 28x28 pixels in 1 channel; .*: cnn, lenet5, resnet18, res"),
        ("cnn", TEXT, {}, r"'cnn' takes images of 4x4 pixels or more, .* texts of 80 characters; .*: gru"),
        ("lenet5", Images(1, 8), {}, r"12x12 pixels or more, .* 8x8 .*: cnn, resnet18, resnet18-gn"),
        ("cnn", Images(3, 3), {}, r"3x3 pixels in 3 channels; task.model can be one of: none"),
        (
            "cnn",
            GREY,
            {"stem": "cifar"},
            r"task.options.stem is of the models resnet18, resnet18-gn, not of cnn",
        ),
        (
            "resnet18",
            GREY,
            {"stam": "cifar"},
            r"stam is unknown; this task with model resnet18 has options: stem",
        ),
        ("resnet18", GREY, {"stem": "vit"}, r"task\.options\.stem is 'vit'; known: imagenet, cifar"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(
    name: str, inputs: Inputs, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(TaskError, match=text):
        made(name, inputs, **options)


def test_a_task_has_a_default_and_options_of_its_own() -> None:
    options = {"model": None, "train_limit": 5, "partition": {}, "augment": True}
    assert isinstance(choose(options, "lenet5", GREY, 10, own=("augment",))(), LeNet5)
    with pytest.raises(TaskError, match=r"task\.options\.augment is unknown; .* has options: none"):
        choose(options, "lenet5", GREY, 10)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ["cnn", "lenet5"])
def test_relu_may_follow_the_pooling(name: str, layout: torch.memory_format) -> None:
    """The papers' order, ReLU first, gives the same bits forwards and backwards."""
    torch.manual_seed(3)
    model = made(name, GREY).to(memory_format=layout)  # type: ignore[call-overload]
    assert [type(part).__name__ for part in model.features] == ["Conv2d", "MaxPool2d", "ReLU"] * 2
    conv1, pool, relu, conv2 = list(model.features)[:4]
    usual = nn.Sequential(conv1, relu, pool, conv2, relu, pool, nn.Flatten(), *model.classifier)
    x = (torch.rand(7, 1, 28, 28) - 0.5).to(memory_format=layout)
    x[0] = 0  # windows of equal values: the bias alone, of either sign
    y = torch.arange(7)
    found = []
    for network in (model, usual):
        model.zero_grad()
        loss = functional.cross_entropy(network(x), y)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for mine, due in zip(*found, strict=True):
        assert torch.equal(mine, due)
