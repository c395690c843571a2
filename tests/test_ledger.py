"""The ledger: what was not observed stays absent, and sums keep it so."""

import pytest

from fedreuse.proto.ledger import COLUMNS, CONNECTION_LAYERS, GRPC_PREFIX_BYTES, LAYERS, Row, Totals
from fedreuse.server.books import Books


def totals(*rows: Row) -> Totals:
    result = Totals()
    result.add(rows)
    return result


def test_layers_and_columns_have_fixed_names() -> None:
    below = ("http2", "tls", "tcp_payload", "tcp_retransmitted", "segments", "pure_acks", "ip")
    assert ("modelled", "payload", "message", "grpc", *below) == LAYERS
    assert (
        "round",
        "client",
        "direction",
        "kind",
        "status",
        "modelled",
        "payload",
        "message",
        "grpc",
        *below,
        "how",
    ) == COLUMNS
    assert GRPC_PREFIX_BYTES == 5


def test_an_absent_layer_is_an_empty_cell_and_zero_is_a_zero() -> None:
    row = Row(3, 7, "up", "score_reply", payload=0, message=14, grpc=19)
    assert row.cells() == ["3", "7", "up", "score_reply", "ok", "", "0", "14", "19", *[""] * 8]


def test_a_layer_nobody_observed_stays_absent() -> None:
    result = totals(Row(0, 0, "up", "update", payload=10), Row(1, 0, "up", "update", payload=0))
    assert result.total("up", "payload") == 10
    assert result.total("up", "modelled") is None
    assert result.layers("up") == dict.fromkeys(LAYERS) | {"payload": 10}


def test_an_observed_zero_is_zero() -> None:
    result = totals(Row(0, 0, "down", "model", modelled=0))
    assert result.total("down", "modelled") == 0
    assert result.total("down", "modelled", "model") == 0
    assert result.total("up", "modelled") is None


def test_rows_without_a_layer_do_not_make_it_zero_or_absent_for_the_others() -> None:
    result = totals(
        Row(0, 0, "up", "update", modelled=5),
        Row(0, 1, "up", "update"),
        Row(0, 2, "up", "update", modelled=7),
    )
    assert result.total("up", "modelled") == 12


def test_nothing_observed_at_all() -> None:
    assert totals().total("up", "grpc") is None
    assert totals().kinds("up") == []
    assert totals().layers("down") == dict.fromkeys(LAYERS)
    assert totals(Row(0, 0, "up", "join")).kinds("up") == []


@pytest.fixture
def round_of_three() -> Totals:
    """One round: client 0 fresh, client 1 reused (16 modelled bytes), client 2's update lost on its way."""
    result = totals(
        Row(0, 0, "down", "model", modelled=0, payload=100, message=120, grpc=130),
        Row(0, 1, "down", "model", modelled=0, payload=100, message=121, grpc=131),
        Row(0, 2, "down", "model", modelled=0, payload=100, message=122, grpc=132),
        Row(0, 1, "down", "reuse_notice", message=12, grpc=17),
    )
    result.add(
        [
            Row(0, 0, "up", "update", modelled=30, payload=31, message=50, grpc=60),
            Row(0, 1, "up", "reuse", modelled=16),
            Row(0, 2, "up", "update", "lost", payload=31, message=51, grpc=61),
        ]
    )
    return result


def test_totals_by_direction_and_layer(round_of_three: Totals) -> None:
    unobserved = dict.fromkeys(CONNECTION_LAYERS)
    up = {"modelled": 46, "payload": 62, "message": 101, "grpc": 121}
    down = {"modelled": 0, "payload": 300, "message": 375, "grpc": 410}
    assert round_of_three.layers("up") == up | unobserved
    assert round_of_three.layers("down") == down | unobserved


def test_totals_of_one_kind_include_what_was_lost(round_of_three: Totals) -> None:
    assert round_of_three.total("up", "payload", "update") == 62
    assert round_of_three.total("up", "modelled", "update") == 30
    assert round_of_three.total("up", "modelled", "reuse") == 16
    assert round_of_three.total("up", "grpc", "reuse") is None
    assert round_of_three.total("down", "grpc", "update") is None
    assert round_of_three.total("down", "payload", "reuse_notice") is None


def test_refusals_and_faults_count_as_well() -> None:
    rows = [
        Row(0, n, "up", "update", status, message=10**n) for n, status in enumerate(("ok", "refused", "lost"))
    ]
    assert totals(*rows, Row(0, 3, "up", "update", "fault", modelled=16)).layers("up") == dict.fromkeys(
        LAYERS
    ) | {
        "modelled": 16,
        "message": 111,
    }


def test_kinds_are_sorted_and_seen_by_direction(round_of_three: Totals) -> None:
    assert round_of_three.kinds("up") == ["reuse", "update"]
    assert round_of_three.kinds("down") == ["model", "reuse_notice"]


def test_totals_go_beyond_32_and_64_bits() -> None:
    result = totals(*(Row(n, 0, "up", "update", message=2**63) for n in range(3)))
    assert result.total("up", "message") == 3 * 2**63


def test_a_round_has_no_sum_of_a_layer_that_some_connection_lacks() -> None:
    books = Books(100, 10, 3, {})
    books.record(Row(3, 0, "up", "connection", http2=50, tcp_payload=60, ip=90))
    books.record(Row(3, 1, "up", "connection", tls=70, tcp_payload=70))
    books.record(Row(3, 0, "down", "connection", http2=5, tcp_payload=5, ip=9))
    books.record(Row(2, 1, "down", "connection", http2=5))  # of another round
    sums = books.round_sums()
    assert (sums["uplink_http2"], sums["uplink_tls"], sums["uplink_tcp_payload"]) == (50, 70, 130)
    assert (sums["uplink_ip"], sums["downlink_ip"], sums["uplink_segments"]) == (None, 9, None)
    books.open_round(4)
    books.record(Row(4, 0, "up", "connection", http2=1, ip=2))
    assert books.round_sums()["uplink_ip"] == 2


def test_a_round_without_the_reports_that_are_due_has_no_sums_of_them() -> None:
    books = Books(100, 10, 3, {})
    books.record(Row(3, 0, "up", "connection", http2=50, ip=90))
    books.record(Row(3, 0, "down", "connection", http2=5, ip=9))
    books.lacks("up")
    sums = books.round_sums()
    assert (sums["uplink_http2"], sums["uplink_ip"], sums["downlink_http2"]) == (None, None, 5)
