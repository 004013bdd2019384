"""Records of traffic, and their transport from a server to the learner."""
