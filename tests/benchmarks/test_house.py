from benchmarks.house import walk_target


def test_the_walk_of_the_target_is_counted_with_todays_defaults() -> None:
    returns, entries = walk_target()
    assert any("called by Run.__init__" in line for line in returns)
    assert 0 < entries < len(returns)
