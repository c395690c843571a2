"""Faults keep their code on their way through a process pool."""

import pickle

from fedreuse.proto import federation_pb2 as pb
from fedreuse.proto.errors import ProtocolError, code_name


def test_a_protocol_error_survives_pickling():
    copy = pickle.loads(pickle.dumps(ProtocolError(pb.NOT_FINITE, "tensor 'w' contains NaN")))
    assert (copy.code, copy.detail, str(copy)) == (
        pb.NOT_FINITE,
        "tensor 'w' contains NaN",
        "NOT_FINITE: tensor 'w' contains NaN",
    )


def test_an_unknown_code_is_shown_as_its_number():
    assert (code_name(7), code_name(77)) == ("NOT_FINITE", "code 77")
