import msgpack
import pytest

from pdserve import messages as m
from pdserve.codec import MalformedError
from pdserve.request import Sampling

KEY = m.Key(request="r1", attempt=1)
TOKEN = m.TokenOut(key=KEY, sample=0, position=5, token=9, logprob=-0.5, top=((9, -0.5), (3, -1.5)))
PREFILL = m.Prefill(
    key=KEY,
    tokens=(1, 2, 3),
    num_prompt=3,
    sampling=Sampling(max_tokens=4, logit_bias=((7, 1.5),), stop_token_ids=(2,)),
    priority=0,
    salt="",
    reader="e2",
)


@pytest.mark.parametrize(
    "message",
    [
        PREFILL,
        m.StepReport(tokens=(TOKEN,), stamps=(m.Stamp(key=KEY, name="joined", time_ns=5),)),
        m.Published(
            key=KEY,
            runs=(m.Run(first_position=0, num_tokens=20, blocks=(4, 5), generations=(1, 2**63)),),
            is_last=True,
        ),
        m.CacheEvents(first=0, stored=(b"\x00" * 16,), removed=(), is_snapshot=False),
    ],
)
def test_a_message_comes_back_as_it_was_sent(message):
    assert m.decode(m.encode(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"\x80\x04K\x01.",
        msgpack.packb(1),
        msgpack.packb([1]),
        msgpack.packb([999, []]),
        msgpack.packb([37, []]),
        msgpack.packb([37, [["r", 1], 3]]),
        msgpack.packb([37, [["r", "1"]]]),
        msgpack.packb([37, [["r", True]]]),
        msgpack.packb([41, [b"bytes"]]),
        msgpack.packb([{}, []]),
    ],
)
def test_what_is_not_a_message_is_a_malformed_error_and_nothing_else(data):
    with pytest.raises(MalformedError):
        m.decode(data)


def test_a_nested_field_of_the_wrong_type_is_refused():
    good = msgpack.unpackb(m.encode(PREFILL))
    good[1][1] = [1, "2", 3]
    with pytest.raises(MalformedError):
        m.decode(msgpack.packb(good))
