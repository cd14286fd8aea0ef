"""What a process said before it ended is heard, whatever was sent to it meanwhile."""

import socket

from perdure.training.wire import Wire


def test_last_words_are_heard_after_a_send_has_failed() -> None:
    ours, theirs = socket.socketpair()
    agent, rank = Wire(ours), Wire(theirs)
    agent.send({"freed": 0})  # never read: the close is a reset
    rank.send({"stopped": True})
    rank.close()
    assert not agent.send({"freed": 1})
    assert not agent.closed
    assert agent.receive() == [{"stopped": True}]
    assert agent.receive() == []
    assert agent.closed
    agent.close()
