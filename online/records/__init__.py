"""Records of traffic, and the ways they travel from a server to the learner."""
