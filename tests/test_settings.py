"""The client's plan: one message from the server that every client checks before it obeys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedreuse.client.settings import (
    ClientPlan,
    CompressorSettings,
    ObjectiveSettings,
    ProxySettings,
    TrainSettings,
)
from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.errors import ProtocolError

NAN, INFINITY = float("nan"), float("inf")
positive = st.floats(0, 1e9, exclude_min=True)
shares = st.floats(0, 1, exclude_max=True)

plans = st.builds(
    ClientPlan,
    seed=st.integers(0, (1 << 63) - 1),
    train=st.builds(
        TrainSettings,
        local_epochs=st.integers(1, 10_000),
        batch_size=st.integers(1, 1 << 20),
        learning_rate=positive,
        momentum=shares,
        weight_decay=st.floats(0, 1e9),
        memory_format=st.sampled_from(["contiguous", "channels_last"]),
        amp=st.booleans(),
    ),
    objective=st.one_of(
        st.just(ObjectiveSettings()), st.builds(ObjectiveSettings, kind=st.just("proximal"), mu=positive)
    ),
    compressor=st.builds(CompressorSettings, kind=st.just("topk"), ratio=st.floats(0, 1, exclude_min=True)),
    proxy=st.one_of(
        st.none(),
        st.builds(
            ProxySettings,
            batches=st.integers(1, 10_000),
            batch_size=st.integers(1, 1 << 20),
            keep=shares,
            head=st.lists(st.text(st.characters(codec="utf-8"), max_size=5), min_size=1, max_size=3).map(
                tuple
            ),
        ),
    ),
)


def over_the_wire(plan: ClientPlan) -> ClientPlan:
    return ClientPlan.from_proto(pb.ClientPlan.FromString(plan.to_proto().SerializeToString()))


@given(plans)
def test_a_plan_arrives_as_it_was_sent(plan: ClientPlan) -> None:
    assert over_the_wire(plan) == plan


def test_a_dense_plan_arrives_as_one_that_keeps_everything() -> None:
    arrived = over_the_wire(ClientPlan(seed=1, compressor=CompressorSettings(kind="dense", ratio=0.2)))
    assert arrived.compressor.keep_ratio == 1.0


def test_a_plain_plan_has_no_proximal_term_whatever_mu_says() -> None:
    arrived = over_the_wire(ClientPlan(seed=1, objective=ObjectiveSettings(kind="plain", mu=0.5)))
    assert (arrived.objective.kind, arrived.objective.mu) == ("plain", 0.0)


def test_the_fields_of_the_message_by_name() -> None:
    plan = ClientPlan(
        seed=101,
        train=TrainSettings(amp=True),
        objective=ObjectiveSettings(kind="proximal", mu=3.4156e-4),
        compressor=CompressorSettings(kind="topk", ratio=0.2),
        proxy=ProxySettings(),
    )
    # The DG paper's protocol, section 5.2.
    assert plan.to_proto() == pb.ClientPlan(
        seed=101,
        local_epochs=3,
        batch_size=128,
        learning_rate=0.05,
        momentum=0.9,
        weight_decay=1e-4,
        proximal_mu=3.4156e-4,
        keep_ratio=0.2,
        memory_format="channels_last",
        amp=True,
        pack=True,
        proxy=pb.ProxyPlan(batches=5, batch_size=64, keep=0.9, head=["classifier", "fc"]),
    )


# Hostile plans


def assign(**fields: object) -> Callable[[pb.ClientPlan], None]:
    def change(message: pb.ClientPlan) -> None:
        for name, value in fields.items():
            setattr(message, name, value)

    return change


def assign_proxy(**fields: object) -> Callable[[pb.ClientPlan], None]:
    def change(message: pb.ClientPlan) -> None:
        for name, value in fields.items():
            setattr(message.proxy, name, value)

    return change


HOSTILE = [
    ("seed", assign(seed=1 << 63)),
    ("seed", assign(seed=(1 << 64) - 1)),
    ("train.local_epochs", assign(local_epochs=0)),
    ("train.local_epochs", assign(local_epochs=10_001)),
    ("train.batch_size", assign(batch_size=0)),
    ("train.batch_size", assign(batch_size=(1 << 20) + 1)),
    ("train.learning_rate", assign(learning_rate=0.0)),
    ("train.learning_rate", assign(learning_rate=-0.1)),
    ("train.learning_rate", assign(learning_rate=NAN)),
    ("train.learning_rate", assign(learning_rate=INFINITY)),
    ("train.momentum", assign(momentum=1.0)),
    ("train.momentum", assign(momentum=-0.1)),
    ("train.momentum", assign(momentum=NAN)),
    ("train.weight_decay", assign(weight_decay=-1e-4)),
    ("train.weight_decay", assign(weight_decay=NAN)),
    ("train.weight_decay", assign(weight_decay=INFINITY)),
    ("train.memory_format", assign(memory_format="")),
    ("train.memory_format", assign(memory_format="sparse")),
    ("objective.mu", assign(proximal_mu=-1.0)),
    ("objective.mu", assign(proximal_mu=NAN)),
    ("objective.mu", assign(proximal_mu=INFINITY)),
    ("compressor.ratio", assign(keep_ratio=0.0)),
    ("compressor.ratio", assign(keep_ratio=1.5)),
    ("compressor.ratio", assign(keep_ratio=NAN)),
    ("proxy.batches", assign_proxy(batches=0)),
    ("proxy.batch_size", assign_proxy(batch_size=0)),
    ("proxy.keep", assign_proxy(keep=1.0)),
    ("proxy.keep", assign_proxy(keep=NAN)),
    ("proxy.head", lambda message: message.proxy.ClearField("head")),
]


@pytest.mark.parametrize(("field", "change"), HOSTILE)
def test_a_hostile_value_is_refused_and_its_field_named(
    field: str, change: Callable[[pb.ClientPlan], None]
) -> None:
    message = ClientPlan(seed=1, proxy=ProxySettings()).to_proto()
    ClientPlan.from_proto(message)  # is fine as it is
    change(message)
    with pytest.raises(ProtocolError) as caught:
        ClientPlan.from_proto(message)
    assert caught.value.code == pb.MALFORMED
    assert f"bad {field}:" in caught.value.detail


def test_an_empty_plan_is_refused() -> None:
    with pytest.raises(ProtocolError, match="MALFORMED: the server's plan has a bad train"):
        ClientPlan.from_proto(pb.ClientPlan())


def test_settings_are_frozen_and_know_their_keys() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        TrainSettings().batch_size = 3  # type: ignore[misc]
    with pytest.raises(ValidationError, match="lr"):
        TrainSettings(lr=0.1)  # type: ignore[call-arg]
