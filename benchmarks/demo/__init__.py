"""The online demo: a learner next to two real servers."""
