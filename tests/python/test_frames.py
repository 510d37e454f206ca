"""What an error holds on to when ferry lets it go."""

import pytest

from ferry_offload.frames import holding_nothing


def variables_of(error, function):
    trace, found = error.__traceback__, []
    while trace is not None:
        if trace.tb_frame.f_code.co_name == function:
            found.append(dict(trace.tb_frame.f_locals))
        trace = trace.tb_next
    return found


def fail():
    held = bytearray(4)
    raise KeyError(len(held))


def test_variables_are_let_go():
    with pytest.raises(KeyError) as raised:
        holding_nothing(fail)
    assert variables_of(raised.value, "fail") == [{}]


def test_those_of_an_error_that_is_being_handled_stay():
    def own():
        kept = 1
        raise ValueError(kept)

    with pytest.raises(KeyError) as raised:
        try:
            own()
        except ValueError:
            holding_nothing(fail)
    assert variables_of(raised.value, "fail") == [{}]
    assert variables_of(raised.value.__context__, "own") == [{"kept": 1}]
