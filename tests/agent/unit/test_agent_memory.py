"""What servers know of agents, and tell each other."""

from datetime import UTC, datetime, timedelta

from cavvy.control.agents.memory import AgentMemory
from cavvy.store.channel import GANG, AgentContact

NOW = datetime(2026, 3, 1, tzinfo=UTC)


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def shared() -> AgentMemory:
    memory = AgentMemory()
    memory.shares = True
    return memory


def test_news_are_taken_once_and_given_back_if_they_were_not_sent() -> None:
    memory = shared()
    memory.hear("j1-1", 0, after(1))
    memory.hear("j1-1", 0, after(2), asks=True)
    memory.afford("j1-1", after(60))
    news = {each.rank: each for each in memory.take_news()}
    assert (news[0].heard_at, news[0].asked_at) == (after(2), after(2))
    assert news[GANG].paid_until == after(60)
    assert memory.take_news() == []
    memory.give_back(list(news.values()))
    assert len(memory.take_news()) == 2


def test_the_newest_of_what_two_servers_know_counts() -> None:
    memory = shared()
    memory.hear("j1-1", 0, after(5))
    memory.learn([AgentContact(attempt_id="j1-1", rank=0, heard_at=after(3), server="b")])
    assert (memory.heard_at("j1-1", 0), memory.server_of("j1-1", 0)) == (after(5), "")
    memory.learn([AgentContact(attempt_id="j1-1", rank=0, heard_at=after(9), server="b")])
    assert (memory.heard_at("j1-1", 0), memory.server_of("j1-1", 0)) == (after(9), "b")
    memory.hear("j1-1", 0, after(10))
    assert memory.server_of("j1-1", 0) == ""


def test_what_others_told_is_no_news_and_an_ended_attempt_is_forgotten() -> None:
    memory = shared()
    memory.learn([AgentContact(attempt_id="j1-1", rank=GANG, paid_until=after(7), server="b")])
    assert memory.paid_until("j1-1") == after(7)
    assert memory.take_news() == []
    memory.hear("j1-1", 1, after(1))
    memory.forget("j1-1", range(2))
    assert memory.heard_at("j1-1", 1) is memory.paid_until("j1-1") is None
    assert memory.take_news() == []


def test_a_limit_that_ends_is_told_to_others() -> None:
    memory, other = shared(), shared()
    memory.afford("j1-1", None)
    assert memory.take_news() == []  # there was no limit
    memory.afford("j1-1", after(60))
    other.learn(memory.take_news())
    assert other.paid_until("j1-1") == after(60)
    memory.afford("j1-1", None)
    assert memory.paid_until("j1-1") is None
    other.learn(memory.take_news())
    assert other.paid_until("j1-1") is None
    memory.afford("j1-1", None)
    assert memory.take_news() == []
    memory.afford("j1-1", after(90))
    other.learn(memory.take_news())
    assert other.paid_until("j1-1") == after(90)


def test_a_server_that_is_alone_keeps_no_news() -> None:
    memory = AgentMemory()
    memory.hear("j1-1", 0, after(1))
    assert memory.take_news() == []
