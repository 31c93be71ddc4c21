"""How servers share the leases, without talking to each other."""

from hypothesis import given
from hypothesis import strategies as st

from cavvy.store.leases import SHARDS, find_preferred, list_shards, shard_of, share_leases

SERVERS = st.sets(st.text("abcdef0123", min_size=4, max_size=8), min_size=1, max_size=6)


def test_a_jobs_shard_never_changes() -> None:
    assert [shard_of(each) for each in ("01m866hyrkn1mrdj", "01m866hyqy5sc8st", "j1")] == [
        "shard:18",
        "shard:12",
        "shard:38",
    ]
    assert {shard_of(f"job-{n}") for n in range(2000)} == {*list_shards()}


@given(SERVERS)
def test_each_lease_is_wanted_by_one_server(alive: set[str]) -> None:
    takes = [share_leases(list_shards(), {}, alive, me).take for me in alive]
    assert sorted(name for take in takes for name in take) == sorted(list_shards())


@given(SERVERS, st.data())
def test_a_server_that_goes_moves_only_its_share(alive: set[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(sorted(alive)))
    left = alive - {gone}
    for name in list_shards() if left else ():
        before = find_preferred(name, alive)
        assert before == gone or find_preferred(name, left) == before


def test_a_server_takes_only_what_is_free_and_gives_only_what_it_holds() -> None:
    alive = {"a", "b"}
    mine = [name for name in list_shards() if find_preferred(name, alive) == "a"]
    theirs = [name for name in list_shards() if name not in mine]
    assert SHARDS / 4 < len(mine) < SHARDS * 3 / 4
    holders = {mine[0]: "b", mine[1]: "dead", mine[2]: "a", theirs[0]: "a", theirs[1]: "b"}
    changes = share_leases(list_shards(), holders, alive, "a")
    assert set(changes.take) == {*mine} - {mine[0], mine[2]}
    assert changes.give == [theirs[0]]
