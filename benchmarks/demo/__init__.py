"""The online demo: a learner beside two real servers."""
