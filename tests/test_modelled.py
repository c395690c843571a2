"""Modelled bytes against numbers worked out by hand (DG paper, Eq. 9-16)."""

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedreuse.proto import modelled

# The shallow CNN for 28 x 28 images and ten classes: 421,642 float32 parameters.
# At r = 0.2 the bitmap is the smallest form of every one of its tensors:
#
#   tensor                 d       k = floor(d/5)   4k         + ceil(d/8)   = bytes
#   conv1.weight 32x1x3x3      288       57            228          36           264
#   conv1.bias   32             32        6             24           4            28
#   conv2.weight 64x32x3x3  18,432    3,686         14,744       2,304        17,048
#   conv2.bias   64             64       12             48           8            56
#   fc1.weight   128x3136  401,408   80,281        321,124      50,176       371,300
#   fc1.bias     128           128       25            100          16           116
#   fc2.weight   10x128      1,280      256          1,024         160         1,184
#   fc2.bias     10             10        2              8           2            10
#   sum                    421,642                                           390,006
SHALLOW_CNN = {
    32 * 1 * 3 * 3: 264,
    32: 28,
    64 * 32 * 3 * 3: 17_048,
    64: 56,
    128 * 3136: 371_300,
    128: 116,
    10 * 128: 1_184,
    10: 10,
}
SHALLOW_CNN_TENSORS = [(d, 4) for d in SHALLOW_CNN]

unhurried = settings(deadline=None)
sizes = st.integers(0, 10_000_000)
widths = st.sampled_from([1, 2, 4, 8])


def test_large_float32_tensor_goes_as_bitmap() -> None:
    # d = 10^6, b = 4, r = 0.2, so k = 200,000.
    # dense 4,000,000; pairs 200,000 * 8 = 1,600,000; bitmap 800,000 + 125,000 = 925,000.
    assert modelled.kept(1_000_000, 0.2) == 200_000
    assert modelled.dense(1_000_000, 4) == 4_000_000
    assert modelled.pairs(200_000, 4) == 1_600_000
    assert modelled.bitmap(1_000_000, 200_000, 4) == 925_000
    assert modelled.tensor_bytes(1_000_000, 4, 0.2) == 925_000
    # 1 - 925/4000 = 76.875 %, the paper's 76.88 %.
    assert modelled.uplink_saving(925_000, 1, 4_000_000) == 0.76875


def test_int64_scalar_goes_dense() -> None:
    # d = 1, b = 8, so k = 1: dense 8 < bitmap 8 + 1 < pairs 8 + 4.
    assert modelled.kept(1, 0.2) == 1
    assert (modelled.dense(1, 8), modelled.bitmap(1, 1, 8), modelled.pairs(1, 8)) == (8, 9, 12)
    assert modelled.tensor_bytes(1, 8, 0.2) == 8


def test_pairs_win_where_few_coordinates_are_kept() -> None:
    # d = 10^6, r = 0.01, k = 10,000: pairs 80,000 < bitmap 40,000 + 125,000.
    assert modelled.tensor_bytes(1_000_000, 4, 0.01) == 80_000
    # The indices cost 4k, the bitmap d/8: pairs win below r = 1/32 whatever the width.
    # d = 3200: k = 99 gives 792 < 396 + 400 = 796, k = 101 gives 808 > 404 + 400 = 804.
    assert modelled.tensor_bytes(3200, 4, 99 / 3200) == 792
    assert modelled.tensor_bytes(3200, 4, 101 / 3200) == 804
    assert modelled.tensor_bytes(3200, 2, 99 / 3200) == 99 * 6
    assert modelled.tensor_bytes(3200, 2, 101 / 3200) == 101 * 2 + 400


@pytest.mark.parametrize(("d", "b"), [(1, 4), (7, 8), (10, 4), (401_408, 4), (1_000_003, 2)])
def test_everything_kept_goes_dense(d: int, b: int) -> None:
    assert modelled.kept(d, 1.0) == d
    assert modelled.tensor_bytes(d, b, 1.0) == d * b


def test_an_empty_tensor_costs_nothing() -> None:
    assert modelled.kept(0, 0.2) == 0
    assert modelled.tensor_bytes(0, 4, 0.2) == 0
    assert modelled.dense_bytes([(0, 4), (3, 4)]) == 12


@pytest.mark.parametrize(
    ("d", "ratio", "k"),
    [
        (3, 0.2, 1),  # floor(0.6) = 0, but at least one
        (4, 0.2, 1),
        (5, 0.2, 1),
        (9, 0.2, 1),
        (10, 0.2, 2),
        (1000, 0.0001, 1),
        (8, 0.5, 4),
        (7, 0.5, 3),
        (6, 2.0, 6),  # never more than d
    ],
)
def test_kept_coordinates(d: int, ratio: float, k: int) -> None:
    assert modelled.kept(d, ratio) == k


@unhurried
@given(d=st.integers(1, 10_000_000), n=st.integers(1, 64))
def test_kept_is_the_floor_between_one_and_d(d: int, n: int) -> None:
    # n/64 is exact in binary, so the floor can be taken in integers.
    assert modelled.kept(d, n / 64) == min(d, max(1, d * n // 64))


@unhurried
@given(d=st.integers(1, 10_000_000))
def test_a_fifth_in_binary_still_keeps_a_fifth(d: int) -> None:
    assert modelled.kept(d, 0.2) == max(1, d // 5)


@unhurried
@given(d=sizes, b=widths, n=st.integers(1, 64))
def test_a_tensor_costs_its_cheapest_form(d: int, b: int, n: int) -> None:
    k = min(d, max(1, d * n // 64))
    assert modelled.tensor_bytes(d, b, n / 64) == min(d * b, k * (b + 4), k * b + ceil(Fraction(d, 8)))


def test_shallow_cnn_tensor_by_tensor() -> None:
    assert sum(d for d, _ in SHALLOW_CNN_TENSORS) == 421_642
    assert {d: modelled.tensor_bytes(d, 4, 0.2) for d in SHALLOW_CNN} == SHALLOW_CNN
    assert modelled.update_bytes(SHALLOW_CNN_TENSORS, 0.2) == 390_006
    assert modelled.dense_bytes(SHALLOW_CNN_TENSORS) == 421_642 * 4 == 1_686_568
    assert modelled.uplink_saving(390_006, 1, 1_686_568) == pytest.approx(0.768758, abs=5e-7)


def test_integer_buffers_count_with_their_true_width() -> None:
    # Batch normalisation of 64 channels: weight, bias, mean, variance (float32), one int64 counter.
    # Each float tensor: k = 12, 48 + 8 = 56 of 256 bytes; the counter 8 of 8.
    tensors = [(64, 4)] * 4 + [(1, 8)]
    assert modelled.update_bytes(tensors, 0.2) == 4 * 56 + 8
    assert modelled.dense_bytes(tensors) == 4 * 256 + 8


def test_a_round_of_six_fresh_and_four_reused_clients() -> None:
    # M_t = 6 * 390,006 + 4 * 16 = 2,340,100 of m B_0 = 10 * 1,686,568 = 16,865,680 (Eq. 13, 14).
    assert modelled.REUSE_EVENT_BYTES == 16
    uplink = 6 * modelled.update_bytes(SHALLOW_CNN_TENSORS, 0.2) + 4 * modelled.REUSE_EVENT_BYTES
    assert uplink == 2_340_100
    # 2,340,100 / 16,865,680 = 0.1387492..., so s = 0.8612508 and both directions half of it.
    b0 = modelled.dense_bytes(SHALLOW_CNN_TENSORS)
    assert modelled.uplink_saving(uplink, 10, b0) == pytest.approx(0.8612508, abs=5e-8)
    assert modelled.symmetric_saving(10 * b0 + uplink, 10, b0) == pytest.approx(0.4306254, abs=5e-8)


@unhurried
@given(m=st.integers(1, 1000), b0=st.integers(1, 10**12), data=st.data())
def test_symmetric_saving_is_half_of_the_uplink_saving(m: int, b0: int, data: st.DataObject) -> None:
    uplink = data.draw(st.integers(0, 2 * m * b0))
    expected = Fraction(m * b0 - uplink, m * b0)
    assert modelled.uplink_saving(uplink, m, b0) == pytest.approx(float(expected), abs=1e-12)
    assert modelled.symmetric_saving(m * b0 + uplink, m, b0) == pytest.approx(float(expected / 2), abs=1e-12)


def test_dense_traffic_saves_nothing_and_silence_saves_all() -> None:
    assert modelled.uplink_saving(30 * 100, 30, 100) == 0
    assert modelled.uplink_saving(0, 30, 100) == 1
    # Sending twice the dense state is a negative saving, not an error.
    assert modelled.uplink_saving(200, 1, 100) == -1
